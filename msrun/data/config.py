"""What holds for every dataset of this process unless it says otherwise; MindSpore's `dataset.config`.

from msrun.data import config
config.set_num_parallel_workers(4)
"""

from __future__ import annotations

from dataclasses import dataclass

from msrun.data.parameters import find_compat, parse_count
from msrun.errors import UsageError, near_miss

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
