"""The line of operations of one group, and torch's `Work` on some of them: no thread does anything.

Starting an operation writes this rank's part as far as there are free slots, and announces it. Whoever waits moves all
operations of this process on, in every group, so that no rank waits for another's part of an operation that the other
has started; when nothing moves it sleeps on the word that the rank it waits for will count in.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.progress import waiting_in
from msrun.runtime.shm.collectives import Collective, describe
from msrun.runtime.shm.segment import NOTE, SLOTS, Segment

_LOOK_EVERY_S = 0.2
"""How often a rank that sleeps looks whether the others are alive."""
_MOVE_EVERY_S = 0.001
"""The same where it has other operations to move on meanwhile."""
_lock = threading.RLock()
_moving: dict[Line, None] = {}
"""The lines that hold operations which are not done."""


class Operation(Protocol):
    """What a `Work` waits for."""

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is over."""
        ...

    def describe(self) -> str:
        """Return what to call it."""
        ...


class Line(Protocol):
    """Operations of one group that move on in some order."""

    def advance(self) -> bool:
        """Do what can be done now; return whether operations are left."""
        ...

    def next_word(self) -> tuple[int, int]:
        """Return the word that counts when more can be done, and its value at a moment when nothing could."""
        ...

    def check(self, operation: Operation) -> None:
        """Raise if the operation can never end."""
        ...

    def sleep(self, word: int, seen: int, most_s: float) -> None:
        """Sleep until the word has another value."""
        ...

    def late_ranks(self) -> list[int]:
        """Return whom the first operation waits for."""
        ...

    @property
    def error(self) -> RuntimeError | None:
        """Why nothing moves any more."""
        ...


def move(line: Line) -> None:
    """Move a line on, and note whether there is more to do."""
    if line.advance():
        _moving[line] = None
    else:
        _moving.pop(line, None)


def start(line: Line, add: Callable[[], None]) -> None:
    """Add an operation to a line and begin with it."""
    with _lock:
        add()
        move(line)


def forget(line: Line) -> None:
    """Move a line on no more."""
    with _lock:
        _moving.pop(line, None)


def wait_for(line: Line, operation: Operation, most_s: float) -> bool:
    """Move everything on until an operation is done; return False when the time is over.

    Raises:
        RuntimeError: it can never end.
    """
    now = time.monotonic()
    end, look_at = now + most_s, now + _LOOK_EVERY_S
    while True:
        with _lock:
            for other in [line, *_moving]:
                if other is not line:
                    move(other)
            word, seen = line.next_word()
            move(line)
            if operation.is_done:
                return True
            if line.error is not None:
                raise line.error
            is_stuck = line.next_word()[0] == word
            most = _LOOK_EVERY_S if len(_moving) == 1 else _MOVE_EVERY_S
        if is_stuck:
            line.sleep(word, seen, min(max(end - now, 0), most))
        now = time.monotonic()
        if now >= look_at:
            line.check(operation)
            look_at = now + _LOOK_EVERY_S
        if now >= end:
            return operation.is_done


class Collectives:
    """The collectives of one group, in the order in which all ranks call them."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._words = segment, segment.words
        self._next = 0
        """Number of the next step that this rank writes."""
        self._least_finished = 0
        self._sums = [0] * SLOTS
        """Per slot: how many of its steps so far were added up."""
        self._to_post: deque[Collective] = deque()
        self._to_add: deque[Collective] = deque()
        self._to_take: deque[Collective] = deque()
        self._error: RuntimeError | None = None

    def add(self, operation: Collective) -> None:
        """Put an operation at the end of the line."""
        if self._error is not None:
            raise self._error
        self._to_post.append(operation)
        self._to_add.append(operation)
        self._to_take.append(operation)

    @torch.no_grad()
    def advance(self) -> bool:
        """Do what can be done now; return whether operations are left."""
        moved = True
        while moved and self._error is None:
            try:
                moved = self._post() | self._add_up() | self._take()
            except Exception as error:
                self._error = RuntimeError(f"{self._to_take[0].describe()}: {error}")
                raise
        return bool(self._to_take) and self._error is None

    def _post(self) -> bool:
        moved = False
        while self._to_post:
            operation = self._to_post[0]
            if operation.posted == operation.steps:
                if not operation.is_settled:
                    break
                self._to_post.popleft()
                continue
            if not self._is_free(self._next):
                break
            self._post_step(operation)
            moved = True
        return moved

    def _is_free(self, step: int) -> bool:
        """Return whether all ranks are done with what was in the slot before."""
        if self._least_finished > step - SLOTS:
            return True
        finished = self._segment.finished
        for rank in range(self._segment.size):
            if not self._words.has_reached(finished + rank, step - SLOTS + 1):
                return False
        self._words.fence()
        self._least_finished = step - SLOTS + 1
        return True

    def _post_step(self, operation: Collective) -> None:
        segment, words, step = self._segment, self._words, self._next
        slot = step % SLOTS
        if not operation.posted:
            operation.first = step
        operation.put(operation.posted, slot)
        at = (slot * segment.size + segment.rank) * NOTE
        for index, number in enumerate(operation.note):
            segment.notes[at + index] = number
        self._sums[slot] += operation.adds_up(operation.posted)
        words.fence()
        words[segment.posted + segment.rank] = step + 1
        words.add(segment.arrived + slot)
        if words.has_reached(segment.arrived + slot, self._all_arrived(step)):
            words.wake(segment.arrived + slot)
        if operation.root == segment.rank and operation.gives_alone:
            words.wake(segment.posted + segment.rank)
        operation.posted += 1
        self._next += 1

    def _all_arrived(self, step: int) -> int:
        return (step // SLOTS + 1) * self._segment.size

    def _add_up(self) -> bool:
        moved = False
        while self._to_add:
            operation = self._to_add[0]
            if operation.added == operation.posted:
                if operation.added < operation.steps or not operation.is_settled:
                    break
                self._to_add.popleft()
                continue
            step = operation.first + operation.added
            if operation.adds_up(operation.added):
                if not self._has_arrived(operation, step):
                    break
                segment, slot = self._segment, step % SLOTS
                operation.add_up(operation.added, slot)
                self._words.fence()
                self._words[segment.added + segment.rank] = step + 1
                self._words.add(segment.summed + slot)
                if self._words.has_reached(segment.summed + slot, self._sums[slot] * segment.size):
                    self._words.wake(segment.summed + slot)
            operation.added += 1
            moved = True
        return moved

    def _has_arrived(self, operation: Collective, step: int) -> bool:
        """Return whether what an operation reads is there."""
        segment = self._segment
        if operation.gives_alone and operation.root is not None:
            here = self._words.has_reached(segment.posted + operation.root, step + 1)
            ranks: Sequence[int] = (operation.root,)
        else:
            here = self._words.has_reached(segment.arrived + step % SLOTS, self._all_arrived(step))
            ranks = range(segment.size)
        if here:
            self._words.fence()
            self._compare(operation, step, ranks)
        return here and self._error is None

    def _compare(self, operation: Collective, step: int, ranks: Sequence[int]) -> None:
        """Compare what the ranks have called."""
        if step != operation.first:
            return
        notes, size = self._segment.notes, self._segment.size
        for rank in ranks:
            at = ((step % SLOTS) * size + rank) * NOTE
            note = tuple(notes[at : at + NOTE])
            if note != operation.note:
                self._error = RuntimeError(
                    f"the ranks of a group have called different operations: rank {self._segment.rank} "
                    f"{operation.describe()}, rank {rank} {describe(note, size)} (step {step} of the group); all must "
                    "call the same ones in the same order"
                )
                return

    def _take(self) -> bool:
        moved = False
        while self._to_take and self._error is None:
            operation = self._to_take[0]
            if operation.taken == operation.added:
                if operation.taken < operation.steps or not operation.is_settled:
                    break
                self._to_take.popleft()
                continue
            step = operation.first + operation.taken
            slot = step % SLOTS
            if operation.adds_up(operation.taken):
                summed = self._segment.summed + slot
                if not self._words.has_reached(summed, self._sums[slot] * self._segment.size):
                    break
                self._words.fence()
            elif operation.reads and not self._has_arrived(operation, step):
                break
            operation.take(operation.taken, slot)
            self._finish(step)
            operation.taken += 1
            moved = True
        return moved

    def _finish(self, step: int) -> None:
        """Let the others write into the slot again."""
        segment, words = self._segment, self._words
        words.fence()
        words[segment.finished + segment.rank] = step + 1
        if words.any(segment.blocked, segment.size):
            words.wake(segment.finished + segment.rank)

    # -- waiting ------------------------------------------------------------------------------------------------

    def _blocking(self) -> tuple[int, int, int]:
        """Return what the line waits for: word, the value it must reach, and the first of its counters per rank."""
        segment = self._segment
        operation = self._to_take[0]
        if operation.taken < operation.posted:
            step = operation.first + operation.taken
            slot = step % SLOTS
            if operation.taken < operation.added and operation.adds_up(operation.taken):
                return segment.summed + slot, self._sums[slot] * segment.size, segment.added
            if operation.gives_alone and operation.root is not None:
                return segment.posted + operation.root, step + 1, segment.posted
            return segment.arrived + slot, self._all_arrived(step), segment.posted
        need = self._next - SLOTS + 1
        late = (r for r in range(segment.size) if not self._words.has_reached(segment.finished + r, need))
        return segment.finished + next(late, segment.rank), need, segment.finished

    def next_word(self) -> tuple[int, int]:
        """Return the word that counts when more can be done, and its value now."""
        if not self._to_take:
            return self._segment.arrived, self._words[self._segment.arrived]
        word, _, kind = self._blocking()
        if kind == self._segment.finished:
            self._words[self._segment.blocked + self._segment.rank] = 1
        return word, self._words[word]

    def sleep(self, word: int, seen: int, most_s: float) -> None:
        """Sleep until the word has another value."""
        is_for_slot = word >= self._segment.finished and word < self._segment.left
        # who finishes a slot looks whether somebody is blocked before the other's store may be there: look again soon
        self._words.sleep(word, seen, min(most_s, 0.002) if is_for_slot else most_s)
        self._words[self._segment.blocked + self._segment.rank] = 0

    def late_ranks(self) -> list[int]:
        """Return whom the first operation waits for."""
        if not self._to_take:
            return []
        word, value, kind = self._blocking()
        segment = self._segment
        operation = self._to_take[0]
        if kind == segment.finished:
            step = value
        else:
            step = operation.first + operation.taken + 1
        ranks = [operation.root] if kind == segment.posted and word >= segment.posted else range(segment.size)
        return [rank for rank in ranks if rank is not None and not self._words.has_reached(kind + rank, step)]

    def check(self, operation: Operation) -> None:
        """Raise if an operation can never end.

        Raises:
            RuntimeError: ranks have called different operations, or one that is waited for has ended or left.
        """
        with _lock:
            if self._error is not None:
                raise self._error
            for rank in self.late_ranks():
                gone = gone_how(self._segment, rank)
                if gone and rank in self.late_ranks():  # it may have counted before it ended
                    self._error = RuntimeError(
                        f"rank {rank} of the group {gone} while rank {self._segment.rank} waits for it in "
                        f"{operation.describe()}"
                    )
                    raise self._error

    @property
    def error(self) -> RuntimeError | None:
        """Why nothing moves any more."""
        return self._error


def gone_how(segment: Segment, rank: int) -> str:
    """Return how a rank is gone, if it is."""
    if segment.words[segment.left + rank]:
        return "has left it"
    return "has ended" if segment.has_ended(rank) else ""


class ShmWork(dist.Work):
    """What torch waits for: some operations of one line."""

    def __init__(
        self,
        line: Any,
        operations: Sequence[Any],
        results: Sequence[Tensor],
        most_s: float,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            finish: called once when all are done.
        """
        super().__init__()
        self._line, self._operations, self._results = line, list(operations), list(results)
        self._most_s, self._finish = most_s, finish
        self._error: RuntimeError | None = None
        """Why it can never be done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operations.

        Raises:
            RuntimeError: they can never end, or the time is over; after `timeout` one may wait again.
        """
        given = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        most_s = self._most_s if given is None else given
        for operation in self._operations:
            if operation.is_done:
                continue
            with waiting_in(operation.describe):
                try:
                    is_done = wait_for(self._line, operation, most_s)
                except RuntimeError as error:
                    self._error = error
                    raise
            if not is_done:
                raise RuntimeError(self._describe_time_out(operation, most_s))
        self._close()
        return True

    def _describe_time_out(self, operation: Operation, most_s: float) -> str:
        late = ", ".join(map(str, self._line.late_ranks()))
        return f"Timed out after {most_s:g} s in {operation.describe()}: waits for rank {late or 'of the other end'}"

    def _close(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        """Return whether the operations are done, or can never be; moves them on."""
        with _lock:
            move(self._line)
        done = all(operation.is_done for operation in self._operations)
        if done:
            self._close()
        return done or self._error is not None

    def is_success(self) -> bool:
        """Return whether they are done without an error."""
        return self.is_completed() and self._error is None

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that the operations write."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that is done: nobody else would finish the operations while torch waits for it."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def _source_rank(self) -> int:
        """Return whom a message came from."""
        return int(self._operations[0].source)
