"""Where AutoParallel meets a dry run (`msrun --sim_level`), in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msrun.runtime import world
from msrun.runtime.capture.target import Target

if TYPE_CHECKING:
    from msrun.runtime.parallel.auto_parallel import AutoParallel


def look_at_dry_run(parallel: AutoParallel, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """In a dry run, report what this call would do and end the process; at level 3 after some steps."""
    if world.simulation_level() is not None:
        from msrun.runtime.simulate.session import begin_step

        begin_step(parallel, target, args, kwargs)
