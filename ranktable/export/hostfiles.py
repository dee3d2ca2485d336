"""Host lists: of DeepSpeed, Open MPI, MPICH and Intel MPI, Horovod, and of Slurm.

Sources: the host file parsers of DeepSpeed's runner and of PRRTE, the documentation of MPICH's Hydra, Intel MPI and
Horovod. All of them number the ranks host by host in the order of the list.

Slurm: a compressed host list for --nodelist, and a host file for --distribution=arbitrary.

Source: the documentation of sbatch and srun. Slurm sorts the hosts of --nodelist itself and numbers the tasks in that
order; a file named by SLURM_HOSTFILE has one host per task, in the order of rank, and keeps any order. The grammar of
the list is also that of pdsh and clustershell.
"""

from __future__ import annotations

from ranktable.assembly.generate import numeric_key
from ranktable.export.exporter import Exporter
from ranktable.export.nodes import Job, refuse_colons
from ranktable.hostlist.brackets import fold


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


def _write_hostlist(job: Job) -> dict[str, str]:
    refuse_colons(job.nodes, "a Slurm host list")
    return {"": fold(node.name for node in job.nodes) + "\n"}


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
