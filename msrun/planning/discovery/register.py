"""The environments that msrun understands, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msrun import contract
from msrun.planning.discovery.kubernetes_job import find_kubernetes_job
from msrun.planning.discovery.open_mpi import find_open_mpi
from msrun.planning.discovery.slurm import find_slurm
from msrun.planning.discovery.surroundings import HostView, Surroundings
from msrun.planning.discovery.torchrun import find_pytorch_pods, find_torchrun
from msrun.planning.discovery.volcano import find_volcano

Finder = Callable[[Mapping[str, str], HostView], Surroundings | None]

FINDERS: Final[tuple[Finder, ...]] = (
    find_torchrun,  # set on purpose, for a launcher of this kind: nearer than the cluster that it runs in
    find_open_mpi,  # an mpirun in a Slurm allocation, or in a pod of an MPIJob, has started this process
    find_slurm,
    find_pytorch_pods,  # of Kubeflow, or of Volcano's plugin pytorch, which numbers the pods over all tasks
    find_volcano,
    find_kubernetes_job,  # last: other kinds make their pods through Indexed Jobs
)
"""What is nearer to this process comes first: the first that finds something decides alone."""


def find_surroundings(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the job of several hosts, or the one host of an allocation, that this process was started in.

    None outside of all that is known, and in a worker of msrun: what its environment tells is msrun's own place.

    Raises:
        UsageError: variables that contradict each other, or that ask for what msrun does not do.
    """
    if contract.MSRUN_JOB_ID in environ:
        return None
    for find in FINDERS:
        found = find(environ, host)
        if found is not None:
            return found
    return None
