"""One decision for all ranks: rank 0 decides, or everybody says whether it went well. Alone, nothing is sent.

A group other than the world's is that of a thread beside the training, which has all ranks too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from msrun.errors import CheckpointError, ParallelError
from msrun.runtime.progress import waiting_in
from msrun.runtime.world import get_rank, simulation_level

T = TypeVar("T")
Group = dist.ProcessGroup | None
"""Of all ranks; None is the world's own."""


def decide(question: Callable[[], T]) -> T:
    """Let rank 0 answer and give every rank its answer. All ranks call it together.

    Raises:
        CheckpointError: what rank 0 met instead of an answer; the same on every rank.
    """
    answer: list[Any] = [None, None]
    is_simulated = simulation_level() is not None
    if get_rank() == 0 or is_simulated:
        try:
            answer = [question(), None]
        except (ParallelError, OSError) as error:
            answer = [None, describe(error)]
    if dist.is_initialized() and not is_simulated:
        with waiting_in(lambda: "the broadcast of rank 0's answer"):
            dist.broadcast_object_list(answer, 0)
    value, failure = answer
    if failure is not None:
        raise CheckpointError(failure)
    result: T = value
    return result


def attempt(work: Callable[[], T], group: Group = None) -> T:
    """Do something on every rank and go on only if it went well everywhere. All ranks call it together.

    Raises:
        CheckpointError: what this rank met, else what the first other rank met.
    """
    result, failure = _try(work)
    _raise_first(failure, gather(failure, group))
    done: T = result
    return done


def attempt_all(work: Callable[[], T], group: Group = None) -> list[T]:
    """Do something on every rank and return every rank's result on every rank. All ranks call it together.

    Raises:
        CheckpointError: what this rank met, else what the first other rank met.
    """
    result, failure = _try(work)
    outcomes = gather((result, failure), group)
    _raise_first(failure, [other for _, other in outcomes])
    return [value for value, _ in outcomes]


def _try(work: Callable[[], T]) -> tuple[Any, str | None]:
    try:
        return work(), None
    except (ParallelError, OSError) as error:
        return None, describe(error)


def _raise_first(own: str | None, failures: list[str | None]) -> None:
    if own is not None:
        raise CheckpointError(own)
    for rank, other in enumerate(failures):
        if other is not None:
            raise CheckpointError(f"rank {rank}: {other}")


def gather(value: T, group: Group = None, *, what: str = "the exchange of answers") -> list[T]:
    """Return every rank's value on every rank, in order; in a dry run every rank has this one's.

    Args:
        what: it is for, for whoever asks what this rank waits for.
    """
    if not dist.is_initialized():
        return [value]
    if simulation_level() is not None:
        return [value] * dist.get_world_size()
    values: list[Any] = [None] * dist.get_world_size()
    waits = waiting_in(lambda: f"{what} by {len(values)} ranks")
    with waits if group is None else contextlib.nullcontext():  # what a thread waits for is no wait of the training
        dist.all_gather_object(values, value, group)
    return values


def describe(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}" if error.filename else str(error.strerror or error)
    return str(error)
