"""Worlds of dry runs: one process stands for one rank of a world of any size, and nothing is sent."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.joining.spec import WorldSpec, parse_number

SOURCE = "dry run"
LEVELS = range(4)
REAL_VALUES = 3
"""Level from which parameters have values and steps are run."""


def find_simulated(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place that `msrun --sim_level` gave this process.

    Raises:
        WorldError: a level that does not exist, or a variable is missing.
    """
    if contract.MSRUN_SIM_LEVEL not in environ:
        return None
    read_level(environ)
    size, rank = parse_number(environ, contract.WORLD_SIZE), parse_number(environ, contract.RANK)
    local_size = parse_number(environ, contract.LOCAL_WORLD_SIZE, size)
    return WorldSpec(SOURCE, rank, size, rank % local_size, local_size, "fake://")


def read_level(environ: Mapping[str, str]) -> int:
    """Return the level of this process' dry run.

    Raises:
        WorldError: it is none.
    """
    level = parse_number(environ, contract.MSRUN_SIM_LEVEL)
    if level not in LEVELS:
        raise WorldError(f"{contract.MSRUN_SIM_LEVEL}={level}: must be 0, 1, 2 or 3; start with msrun --sim_level")
    return level


def join_fake_world(spec: WorldSpec) -> None:
    """Make torch's default group one whose collectives send nothing: every other rank seems to hold what this one does.

    Its groups cost nothing to make, whatever their size (torch 2.11 to 2.13).
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # it registers torch's backend "fake"
    dist.init_process_group("fake", store=HashStore(), rank=spec.global_rank, world_size=spec.world_size)
