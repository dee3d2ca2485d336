"""Host lists: of DeepSpeed, Open MPI, MPICH and Intel MPI, Horovod, and of Slurm.

Sources: the host file parsers of DeepSpeed's runner and of PRRTE, the documentation of MPICH's Hydra, Intel MPI and
Horovod. All of them number the ranks host by host in the order of the list.

Slurm: a compressed host list for --nodelist, and a host file for --distribution=arbitrary.

Source: the documentation of sbatch and srun. Slurm sorts the hosts of --nodelist itself and numbers the tasks in that
order; a file named by SLURM_HOSTFILE has one host per task, in the order of rank, and keeps any order. The grammar of
the list is also that of pdsh and clustershell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ranktable.assembly.generate import numeric_key
from ranktable.export.exporter import Exporter
from ranktable.export.nodes import Job, refuse_colons


def _write_slots(job: Job) -> dict[str, str]:
    """Return `host slots=8` lines, which DeepSpeed, Open MPI and Horovod's --hostfile read."""
    return {"": "".join(f"{node.name} slots={len(node.devices)}\n" for node in job.nodes)}


def _write_hydra(job: Job) -> dict[str, str]:
    """Return `host:8` lines."""
    refuse_colons(job.nodes, "an MPICH host file")
    return {"": "".join(f"{node.name}:{len(node.devices)}\n" for node in job.nodes)}


def _write_horovod(job: Job) -> dict[str, str]:
    """Return the one line that horovodrun takes after -H."""
    refuse_colons(job.nodes, "a Horovod host list")
    return {"": ",".join(f"{node.name}:{len(node.devices)}" for node in job.nodes) + "\n"}


DEEPSPEED = Exporter("a DeepSpeed host file (deepspeed --hostfile)", _write_slots)
OPENMPI = Exporter("an Open MPI host file (mpirun --hostfile)", _write_slots)
MPICH = Exporter("an MPICH or Intel MPI host file (mpiexec -f)", _write_hydra)
HOROVOD = Exporter("a Horovod host list (horovodrun -H)", _write_horovod)


_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)


def compress_hosts(names: Iterable[str]) -> str:
    """Return the host list of `names` in their order, with ranges, which keep zero padding.

    >>> compress_hosts(["node08", "node09", "node10", "node14", "gpu1"])
    'node[08-10,14],gpu1'
    """
    pieces: list[_Piece] = []
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        piece = _Piece(match[1], match[3], [(match[2], match[2])]) if match else _Piece(name, "", [])
        if not (pieces and pieces[-1].absorb(piece)):
            pieces.append(piece)
    return ",".join(map(str, pieces))


@dataclass(slots=True)
class _Piece:
    """Names that differ in their last number only, as ranges; a name without a number has none."""

    head: str
    tail: str
    ranges: list[tuple[str, str]]

    def absorb(self, other: _Piece) -> bool:
        """Take in a piece of one name when it differs in the number only; return whether it does."""
        if not self.ranges or not other.ranges or (self.head, self.tail) != (other.head, other.tail):
            return False
        (first, last), (number, _) = self.ranges[-1], other.ranges[0]
        if _counts_on(first, last, number):
            self.ranges[-1] = first, number
        else:
            self.ranges.append((number, number))
        return True

    def __str__(self) -> str:
        if not self.ranges:
            return self.head
        parts = [first if first == last else f"{first}-{last}" for first, last in self.ranges]
        is_single = len(parts) == 1 and "-" not in parts[0]
        return f"{self.head}{parts[0] if is_single else '[' + ','.join(parts) + ']'}{self.tail}"


def _counts_on(first: str, last: str, number: str) -> bool:
    """True when `number` continues the range: one more, and padded to the same width when the range is padded."""
    same_width = len(number) == len(first) if _is_padded(first) else not _is_padded(number)
    return same_width and int(number) == int(last) + 1


def _is_padded(number: str) -> bool:
    return len(number) > 1 and number.startswith("0")


def _write_hostlist(job: Job) -> dict[str, str]:
    refuse_colons(job.nodes, "a Slurm host list")
    return {"": compress_hosts(node.name for node in job.nodes) + "\n"}


def _write_hostfile(job: Job) -> dict[str, str]:
    refuse_colons(job.nodes, "a Slurm host file")
    names = {rank: node.name for node in job.nodes for rank in node.ranks}
    return {"": "".join(f"{names[rank]}\n" for rank in range(job.world_size))}


def _find_losses(job: Job) -> tuple[str, ...]:
    counts = [len(node.devices) for node in job.nodes]
    lost = [f"the devices per server (give Slurm {_ask_for(counts)})"]
    names = [node.name for node in job.nodes]
    if names != sorted(names, key=numeric_key):
        lost.append("the order of the servers (Slurm sorts the hosts itself; slurm-hostfile keeps it)")
    return tuple(lost)


def _ask_for(counts: list[int]) -> str:
    if len(set(counts)) == 1:
        return f"--nodes={len(counts)} --ntasks-per-node={counts[0]}"
    return f"--nodes={len(counts)} --ntasks={sum(counts)}, and slurm-hostfile for unequal servers"


HOSTLIST = Exporter("a Slurm host list (srun --nodelist)", _write_hostlist, find_losses=_find_losses)
HOSTFILE = Exporter(
    "a Slurm host file (SLURM_HOSTFILE with srun --distribution=arbitrary)", _write_hostfile, keeps_ranks=True
)
