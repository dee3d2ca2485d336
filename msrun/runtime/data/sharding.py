"""Which part of every global batch this process reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msrun import contract
from msrun.errors import UsageError
from msrun.runtime.data.parameters import parse_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """Part `shard_id` of `num_shards` equal parts."""

    num_shards: int
    shard_id: int

    @property
    def is_whole(self) -> bool:
        return self.num_shards == 1


def check_shard(num_shards: int | None, shard_id: int | None) -> Shard | None:
    """Return the shard that the caller asked for, or None for "as the initialised world says".

    Raises:
        UsageError: a value is not an integer or out of range, or one is given without the other.
    """
    if num_shards is None:
        if shard_id is not None:
            raise UsageError(
                f"shard_id={shard_id!r} without num_shards; pass both, or neither to follow the job's ranks"
            )
        return None
    num_shards = parse_count("num_shards", num_shards, minimum=1)
    if shard_id is None:
        if num_shards > 1:
            raise UsageError(f"num_shards={num_shards} without shard_id; pass shard_id in 0..{num_shards - 1}")
        return Shard(1, 0)
    return Shard(num_shards, parse_count("shard_id", shard_id, minimum=0, maximum=num_shards - 1))


def find_world_shard() -> Shard:
    """Return one shard per rank of the initialised world; the whole dataset when no world is initialised."""
    from msrun.runtime.world import get_group_size, get_rank, is_initialized

    if not is_initialized():
        return Shard(1, 0)
    return Shard(get_group_size(), get_rank())


def find_rank() -> int:
    """Return this process's rank, also before the world is initialised."""
    from msrun.runtime.world import get_rank, is_initialized

    if is_initialized():
        return get_rank()
    rank = os.environ.get(contract.RANK, "")
    return int(rank) if rank.isdecimal() else 0


def find_compat() -> str:
    """Return whose meaning holds for datasets that are made now, "torch" or "mindspore"."""
    from msrun.runtime.parallel.precision import find_compat as find

    return find()


def find_world_device() -> torch.device | None:
    """Return the device of this rank; None when no world is initialised."""
    from msrun.runtime.world import device, is_initialized

    return device() if is_initialized() else None
