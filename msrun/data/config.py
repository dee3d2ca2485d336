"""What holds for every dataset of this process unless it says otherwise; MindSpore's `dataset.config`.

from msrun.data import config
config.set_num_parallel_workers(4)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from msrun import contract
from msrun.errors import UsageError, near_miss

if TYPE_CHECKING:
    import torch


def is_integer(value: object) -> bool:
    """True for Python and numpy integers, not for bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def parse_count(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """Return `value` as int."""
    if not is_integer(value) or value < minimum or (maximum is not None and value > maximum):
        allowed = f"of at least {minimum}" if maximum is None else f"in {minimum}..{maximum}"
        raise UsageError(f"{name}={value!r}; it must be an integer {allowed}")
    return int(value)


def parse_counts(name: str, value: Any, *, lengths: tuple[int, ...], minimum: int) -> tuple[int, ...]:
    """Return one integer or a sequence of them as a tuple."""
    counts = (value,) if is_integer(value) else tuple(value) if isinstance(value, Iterable) else ()
    if len(counts) not in lengths or not all(is_integer(count) and count >= minimum for count in counts):
        choices = " or ".join(str(length) for length in lengths)
        raise UsageError(f"{name}={value!r}; give {choices} integers of at least {minimum}")
    return tuple(int(count) for count in counts)


def parse_sizes(sizes: Any, count: int) -> list[int]:
    """Return whole numbers of samples that add up to `count`, of such numbers or of shares that add up to 1."""
    listed = list(sizes) if isinstance(sizes, Iterable) else []
    numbers = listed
    if listed and all(isinstance(size, float) and 0 < size < 1 for size in listed) and abs(sum(listed) - 1) < 1e-6:
        numbers = [round(size * count) for size in listed]
        numbers[0] += count - sum(numbers)
    if not numbers or not all(is_integer(size) and size >= 1 for size in numbers) or sum(numbers) != count:
        raise UsageError(f"split: sizes={sizes!r}; give integers that add up to {count}, or shares that add up to 1")
    return [int(size) for size in numbers]


@dataclass(frozen=True)
class Shard:
    """Part `shard_id` of `num_shards` equal parts."""

    num_shards: int
    shard_id: int


def check_shard(num_shards: int | None, shard_id: int | None) -> Shard | None:
    """Return the shard that the caller asked for, or None for "as the initialised world says"."""
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


START_METHODS = ("auto", "fork", "forkserver", "spawn")
MAX_SEED = 2**63 - 1
UNSET_SEED = 5489
"""MindSpore's, before one is set: that of std::mt19937."""


@dataclass
class _Settings:
    seed: int | None = None
    num_parallel_workers: int = 0
    prefetch_size: int = 2
    start_method: str = "auto"


_settings = _Settings()


def set_seed(seed: int) -> None:
    """Set the seed of datasets made from now on without one of their own; 0 at first. All ranks need the same.

    Raises:
        UsageError: no integer in 0..2**63-1.
    """
    _settings.seed = parse_count("seed", seed, minimum=0, maximum=MAX_SEED)


def get_seed() -> int:
    """Return the seed of datasets without one of their own."""
    if _settings.seed is not None:
        return _settings.seed
    return UNSET_SEED if find_compat() == "mindspore" else 0


def has_seed() -> bool:
    """Return whether a seed has been set."""
    return _settings.seed is not None


def set_num_parallel_workers(num: int) -> None:
    """Set how many processes read and transform for each dataset made from now on; 0, the default: this process does.

    Raises:
        UsageError: no integer of at least 0.
    """
    _settings.num_parallel_workers = parse_count("num_parallel_workers", num, minimum=0)


def get_num_parallel_workers() -> int:
    """Return the number of workers of datasets that do not say."""
    return _settings.num_parallel_workers


def set_prefetch_size(size: int) -> None:
    """Set how many steps each worker reads ahead; 2 at first.

    Raises:
        UsageError: no integer of at least 1.
    """
    _settings.prefetch_size = parse_count("prefetch_size", size, minimum=1)


def get_prefetch_size() -> int:
    """Return how many steps each worker reads ahead."""
    return _settings.prefetch_size


def set_multiprocessing_start_method(start_method: str) -> None:
    """Set how workers are started: "fork", "forkserver", "spawn", or "auto", the default.

    "auto" is fork in a process without threads and accelerator, where it is safe, and forkserver in all others.

    Raises:
        UsageError: another word.
    """
    if start_method not in START_METHODS:
        hint = near_miss(str(start_method), START_METHODS)
        raise UsageError(f"start_method={start_method!r}{hint}; it must be one of {', '.join(START_METHODS)}")
    _settings.start_method = start_method


def get_multiprocessing_start_method() -> str:
    """Return how workers are started."""
    return _settings.start_method
