"""Joining the world, ranks and groups, under MindSpore's path."""

from __future__ import annotations

from typing import Any

from msrun import runtime
from msrun.mindspore.import_paths import take_names
from msrun.mindspore.missing import missing_names
from msrun.runtime import init as _init
from msrun.runtime.world import is_initialized

_OF_RUNTIME = """
create_group destroy_group get_group_rank_from_world_rank get_group_size get_local_rank get_local_rank_size
get_process_group_ranks get_rank get_world_rank_from_group_rank release
"""
__all__ = [
    *take_names(__name__, runtime, _OF_RUNTIME), "HCCL_WORLD_COMM_GROUP", "MCCL_WORLD_COMM_GROUP",
    "NCCL_WORLD_COMM_GROUP", "GlobalComm", "init",
]  # fmt: skip
__getattr__ = missing_names("communication", __all__)


HCCL_WORLD_COMM_GROUP, NCCL_WORLD_COMM_GROUP = "hccl_world_group", "nccl_world_group"
MCCL_WORLD_COMM_GROUP = "mccl_world_group"


class GlobalComm:
    """The name of the group of all ranks."""

    WORLD_COMM_GROUP = "hccl_world_group"
    BACKEND = "hccl"
    INITED = True


def init(backend_name: str | None = None, **words: Any) -> None:
    """Join the world, once: a second call changes nothing, as in MindSpore. See `msrun.runtime.init`."""
    if not is_initialized():
        _init(backend_name, **words)
