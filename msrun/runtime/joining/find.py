"""Which of the ways to start a job this process was started in."""

from __future__ import annotations

from collections.abc import Mapping

from msrun.errors import WorldError
from msrun.runtime.joining.launchers import find_mpirun, find_msrun, find_torchrun
from msrun.runtime.joining.ms_role import find_worker, refuse_without_role
from msrun.runtime.joining.rank_table import find_rank_table
from msrun.runtime.joining.simulated import find_simulated
from msrun.runtime.joining.slurm import find_slurm
from msrun.runtime.joining.spec import ALONE, WorldSpec

_FINDERS = (find_simulated, find_msrun, find_torchrun, find_worker, find_mpirun, find_slurm, find_rank_table)


def find_world(environ: Mapping[str, str]) -> WorldSpec:
    """Find this process's place from its environment; opens nothing but the rank table.

    Order: a dry run; msrun's variables; torchrun's; MS_ROLE by hand, which in MindSpore too comes before what follows;
    mpirun's (OMPI_*); Slurm's; RANK_TABLE_FILE with RANK_ID; none of them = one process.

    Raises:
        WorldError: variables that contradict each other, are not numbers, or of which one is missing.
    """
    for finder in _FINDERS:
        spec = finder(environ)
        if spec is not None:
            _check(spec)
            return spec
    refuse_without_role(environ)
    return ALONE


def _check(spec: WorldSpec) -> None:
    if spec.global_rank == -1 and spec.source == "MS_ROLE" and spec.world_size > 0:
        return
    if not 0 <= spec.global_rank < spec.world_size:
        raise WorldError(
            f"rank {spec.global_rank} of a world of {spec.world_size} ({spec.source} variables): must be 0 to "
            f"{spec.world_size - 1}; stale variables in the shell? start with msrun"
        )
