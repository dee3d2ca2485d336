"""Where AutoParallel meets a dry run (`msrun --sim_level`), in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msrun.runtime import world
from msrun.runtime.capture.target import Target
from msrun.runtime.joining.simulated import REAL_VALUES
from msrun.runtime.parallel.settings import ParallelSettings


def has_no_values() -> bool:
    """Return whether this is a dry run in which parameters have no values."""
    level = world.simulation_level()
    return level is not None and level < REAL_VALUES


def look_at_dry_run(settings: ParallelSettings, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """In a dry run, report what this call would do and end the process; at level 3 after some steps."""
    if world.simulation_level() is not None:
        from msrun.runtime.simulate.session import begin_step

        begin_step(settings, target, args, kwargs)
