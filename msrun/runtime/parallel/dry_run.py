"""Where AutoParallel meets a dry run (`msrun --sim_level`), in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msrun.runtime import world
from msrun.runtime.capture.target import Target

if TYPE_CHECKING:
    from msrun.runtime.parallel.auto_parallel import AutoParallel

COMPUTES = 3
"""Level at which steps are run."""


def look_at_dry_run(parallel: AutoParallel, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """In a dry run, report what this call would do and end the process; at level 3 after some steps."""
    level = world.simulation_level()
    if level is None:
        return
    from msrun.runtime.simulate.session import end_dry_run

    end_dry_run(parallel, target, args, kwargs)
