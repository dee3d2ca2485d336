"""Host lists with slots: DeepSpeed, Open MPI, MPICH and Intel MPI, Horovod.

Sources: the host file parsers of DeepSpeed's runner and of PRRTE, the documentation of MPICH's Hydra, Intel MPI and
Horovod. All of them number the ranks host by host in the order of the list.
"""

from __future__ import annotations

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
