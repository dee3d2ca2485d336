"""One decision for all ranks: rank 0 decides, or everybody says whether it went well. Alone, nothing is sent.

A group other than the world's is that of a thread beside the training, which has all ranks too.

Ranks that do different things would wait for each other for ever, and asking in every step would cost a message per
step, so nobody asks: a rank that is about to do what all must do together, to capture a call or to gather whole
parameters after one, writes so in the job's store and waits there for the others. One that has waited in a collective
for longer than a moment looks into the store; where another rank waits for what this one has passed by, it refuses for
all. Steps without such a wait cost nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from msrun.errors import CaptureError, CheckpointError, ParallelError
from msrun.runtime.progress import waiting_in
from msrun.runtime.world import at_release, get_rank, simulation_level

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


_PREFIX = "msrun_meeting"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.2


class Meetings:
    """This rank's meetings with all others, before they capture a call or gather after it.

    All ranks make the same calls in the same order.
    """

    def __init__(self) -> None:
        self._world = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew, with a new world; its ranks may share the store with the old one."""
        self._world += 1
        self._call = self._gathers = 0
        self._captures = False
        self._left: list[list[str]] = []
        """This rank's keys of the last meetings."""
        self._missed: str | None = None
        """The first meeting after the last call to which this rank did not come."""

    def begin_call(self) -> None:
        """Count a call of a parallel network; it runs what was captured unless `capture` follows."""
        self._missed = self._meeting_after()
        self._call += 1
        self._gathers = 0
        self._captures = False

    def capture(self, what: str) -> None:
        """Wait until every rank is about to capture in this call.

        Args:
            what: the batch for which it is captured, for the other ranks' messages.
        """
        self._captures = True
        self._meet(
            self._meeting_in(),
            f"rank {get_rank()} got {what}, which no rank had before, while other ranks go on with shapes that they "
            "know: give every rank a batch of the same shape in each step (drop the last, smaller one)",
        )

    def gather(self, what: str) -> None:
        """Wait until every rank is about to gather whole tensors between two calls.

        Args:
            what: the call that gathers them, for messages.
        """
        meeting = self._meeting_after()
        self._gathers += 1
        self._meet(
            meeting,
            f"{what} was called on rank {get_rank()} while other ranks went on without it, and it joins what all ranks "
            f"hold: call {what} on all ranks together",
        )

    def _meet(self, meeting: str, refusal: str) -> None:
        """Wait in a meeting until all ranks have come.

        Args:
            refusal: what all ranks are told if one passes by.
        """
        if simulation_level() is not None or not dist.is_initialized():
            return
        store, keys = job_store(), [f"{meeting}/{rank}" for rank in range(dist.get_world_size())]
        store.set(meeting, refusal)
        store.set(keys[get_rank()], "")
        pause_s, deadline = _FIRST_PAUSE_S, time.monotonic() + store.timeout.total_seconds()
        with waiting_in(lambda: f"a meeting of {len(keys)} ranks, else {refusal}"):
            while not store.check(keys):
                self.look()
                if time.monotonic() > deadline:
                    raise _error(meeting, refusal)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._left.append([keys[get_rank()], *([] if get_rank() else [meeting])])
        if len(self._left) > 2:  # all have left the meeting before the last one
            for key in self._left.pop(0):
                store.delete_key(key)

    def look(self) -> None:
        """Refuse for all ranks when another one waits in a meeting that this one has passed by."""
        if not dist.is_initialized():
            return
        store = job_store()
        passed = (self._missed, None if self._captures else self._meeting_in())
        refused = f"{_PREFIX}/{self._world}/refused"
        if not store.check([refused]):
            found = next((meeting for meeting in passed if meeting and store.check([meeting])), None)
            if found is None:
                return
            store.set(refused, found)
        meeting = store.get(refused).decode()
        raise _error(meeting, store.get(meeting).decode())

    def _meeting_in(self) -> str:
        return f"{_PREFIX}/{self._world}/{self._call}"

    def _meeting_after(self) -> str:
        return f"{_PREFIX}/{self._world}/{self._call}+{self._gathers}"


def _error(meeting: str, refusal: str) -> ParallelError:
    return ParallelError(refusal) if "+" in meeting else CaptureError(refusal)


def job_store() -> Any:
    """Return the store that the job's processes have in common; torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


meetings = Meetings()
"""Of this process."""
at_release(meetings.forget)
