"""One decision for all ranks: rank 0 decides, or everybody says whether it went well. Alone, nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from msrun.errors import CheckpointError, ParallelError
from msrun.runtime.progress import waiting_in
from msrun.runtime.world import get_rank

T = TypeVar("T")


def decide(question: Callable[[], T]) -> T:
    """Let rank 0 answer and give every rank its answer. All ranks call it together.

    Raises:
        CheckpointError: what rank 0 met instead of an answer; the same on every rank.
    """
    answer: list[Any] = [None, None]
    if get_rank() == 0:
        try:
            answer = [question(), None]
        except (ParallelError, OSError) as error:
            answer = [None, _describe(error)]
    if dist.is_initialized():
        with waiting_in(lambda: "the broadcast of rank 0's answer"):
            dist.broadcast_object_list(answer, 0)
    value, failure = answer
    if failure is not None:
        raise CheckpointError(failure)
    result: T = value
    return result


def attempt(work: Callable[[], T]) -> T:
    """Do something on every rank and go on only if it went well everywhere. All ranks call it together.

    Raises:
        CheckpointError: what this rank met, else what the first other rank met.
    """
    result: Any = None
    failure = None
    try:
        result = work()
    except (ParallelError, OSError) as error:
        failure = _describe(error)
    failures = gather(failure)
    if failure is not None:
        raise CheckpointError(failure)
    for rank, other in enumerate(failures):
        if other is not None:
            raise CheckpointError(f"rank {rank}: {other}")
    done: T = result
    return done


def gather(value: T) -> list[T]:
    """Return every rank's value on every rank, in order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with waiting_in(lambda: f"the exchange of answers by {len(values)} ranks"):
        dist.all_gather_object(values, value)
    return values


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}" if error.filename else str(error.strerror or error)
    return str(error)
