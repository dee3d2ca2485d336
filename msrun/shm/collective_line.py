"""The line of a group's collectives: every rank writes and takes them in the order in which all call them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msrun.errors import CollectiveError
from msrun.shm.collectives import Collective, describe
from msrun.shm.segment import NOTE, SLOTS, Segment, distance, is_reached
from msrun.shm.work import Line, Operation, lock


class Collectives(Line):
    """The collectives of one group, in the order in which all ranks call them."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self._segment, self._words = segment, segment.words
        self._ranks = range(segment.size)
        self._next = 0
        """Number of the next step that this rank writes."""
        self._least_finished = 0
        self._to_post: deque[Collective] = deque()
        self._to_take: deque[Collective] = deque()

    def add(self, operation: Collective) -> None:
        if self.error is not None:
            raise self.error
        self._to_post.append(operation)
        self._to_take.append(operation)

    def advance(self) -> bool:
        try:
            while self._to_take and self.error is None and (self._post() | self._take()):
                pass
        except Exception as error:
            self.error = CollectiveError(f"{self._to_take[0].describe()}: {error}")
            raise
        return bool(self._to_take) and self.error is None

    def _has_reached(self, word: int, value: int) -> bool:
        seen = self._words[word]
        if is_reached(seen, value):
            self._words.fence()
            return True
        self.blocked_on = word, seen
        return False

    def _post(self) -> bool:
        moved = False
        while self._to_post:
            operation = self._to_post[0]
            if operation.posted < operation.steps:
                if not operation.can_put(operation.posted) or not self._is_free(self._next):
                    break
                if operation.in_turn and not self._is_turn():
                    break
                self._post_step(operation)
                moved = True
            if operation.posted == operation.steps:
                if not operation.is_settled:
                    break
                self._to_post.popleft()
        return moved

    def _is_free(self, step: int) -> bool:
        if self._least_finished > step - SLOTS:
            return True
        finished = self._segment.finished
        if not all(self._has_reached(finished + rank, step - SLOTS + 1) for rank in self._ranks):
            return False
        needed = step - SLOTS + 1
        self._least_finished = needed + min(distance(self._words[finished + r], needed) for r in self._ranks)
        return True

    def _is_turn(self) -> bool:
        rank = self._segment.rank
        return not rank or self._has_reached(self._segment.posted + rank - 1, self._next + 1)

    def _post_step(self, operation: Collective) -> None:
        segment, words, step = self._segment, self._words, self._next
        slot = step % SLOTS
        if not operation.posted:
            operation.first = step
            at = (slot * segment.size + segment.rank) * NOTE.size
            segment.notes[at : at + NOTE.size] = operation.note
        operation.put(operation.posted, slot)
        words.fence()
        words[segment.posted + segment.rank] = step + 1
        arrived = segment.arrived + slot
        words.add(arrived)
        if is_reached(words[arrived], self._all_arrived(step)):
            words.wake(arrived)
        if operation.in_turn or (operation.gives_alone and operation.writes):
            words.wake(segment.posted + segment.rank)
        operation.posted += 1
        self._next += 1

    def _all_arrived(self, step: int) -> int:
        return (step // SLOTS + 1) * self._segment.size

    def _has_arrived(self, operation: Collective, step: int) -> bool:
        segment = self._segment
        if operation.gives_alone and operation.root is not None:
            here = self._has_reached(segment.posted + operation.root, step + 1)
        else:
            here = self._has_reached(segment.arrived + step % SLOTS, self._all_arrived(step))
        if here and step == operation.first:
            self._compare(operation, step)
        return here and self.error is None

    def _compare(self, operation: Collective, step: int) -> None:
        notes, size = self._segment.notes, self._segment.size
        begin = step % SLOTS * size * NOTE.size
        if operation.gives_alone and operation.root is not None:
            ranks: Sequence[int] = (operation.root,)
        elif notes[begin : begin + size * NOTE.size] == operation.note * size:
            return
        else:
            ranks = range(size)
        for rank in ranks:
            note = bytes(notes[begin + rank * NOTE.size :][: NOTE.size])
            if note != operation.note:
                self.error = CollectiveError(
                    f"the ranks of a group have called different operations: {self._segment.name()} "
                    f"{operation.describe()}, {self._segment.name(rank)} {describe(note, size)} (step {step} of the "
                    "group); all must call the same ones in the same order"
                )
                return

    def _take(self) -> bool:
        moved = False
        while self._to_take and self.error is None:
            operation = self._to_take[0]
            if operation.taken < operation.posted:
                step = operation.first + operation.taken
                if operation.reads and not self._has_arrived(operation, step):
                    break
                operation.take(operation.taken, step % SLOTS)
                self._finish(step)
                operation.taken += 1
                moved = True
            if operation.is_done:
                self._to_take.popleft()
            elif operation.taken == operation.posted:
                break
        return moved

    def _finish(self, step: int) -> None:
        segment, words = self._segment, self._words
        words.fence()
        words[segment.finished + segment.rank] = step + 1
        if words.any(segment.blocked, segment.size):
            words.wake(segment.finished + segment.rank)

    # -- waiting ------------------------------------------------------------------------------------------------

    def sleep(self, word: int, seen: int, most_s: float) -> None:
        segment = self._segment
        if segment.finished <= word < segment.left:
            # who finishes a slot looks whether somebody is blocked before this store may be there: look again soon
            self._words[segment.blocked + segment.rank] = 1
            segment.sleep(word, seen, min(most_s, 0.002))
            self._words[segment.blocked + segment.rank] = 0
        else:
            segment.sleep(word, seen, most_s)

    def late_ranks(self) -> list[str]:
        return [self._segment.name(rank) for rank in self._late()]

    def _late(self) -> list[int]:
        if not self._to_take:
            return []
        segment, operation = self._segment, self._to_take[0]
        word = self.blocked_on[0]
        first = operation.first if operation.posted else self._next
        counters, step = segment.posted, first + operation.taken + 1
        ranks: Sequence[int] = range(segment.size)
        if segment.finished <= word < segment.left:
            counters, step = segment.finished, self._next - SLOTS + 1
        elif word >= segment.posted and operation.root is not None:
            ranks = (operation.root,)
        late = [rank for rank in ranks if not is_reached(self._words[counters + rank], step)]
        return late[:1] if operation.in_turn and counters == segment.posted else late

    def check(self, operation: Operation) -> None:
        with lock:
            if self.error is not None:
                raise self.error
            for rank in self._late():
                gone = self._segment.gone_how(rank)
                if gone and rank in self._late():  # it may have counted before it ended
                    who, waiting = self._segment.name(rank), self._segment.name()
                    self.error = CollectiveError(f"{who} {gone} while {waiting} waits for it in {operation.describe()}")
                    raise self.error


_LOOK_S = 0.0002
"""How often to look whether gloo has done its part."""


class GlooPart:
    """A work of gloo's, as a part."""

    def __init__(self, work: Any) -> None:
        self._work = work

    @property
    def is_done(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True


class Parts:
    """One operation.

    Args:
        text: what to call it.
        begin: per part the line where it takes place, None for gloo's, and what begins it; that returns the part,
            None where this rank has nothing to do.
    """

    def __init__(self, text: str, begin: Sequence[tuple[Line | None, Callable[[], Any]]]) -> None:
        self._text, self._begin = text, begin
        self.begun = 0
        self._part: Any = None

    def advance(self, most: int) -> None:
        while self.begun < most and (self._part is None or self._part.is_done):
            self._part = self._begin[self.begun][1]()
            self.begun += 1

    @property
    def count(self) -> int:
        return len(self._begin)

    @property
    def is_done(self) -> bool:
        return self.begun == self.count and (self._part is None or self._part.is_done)

    @property
    def place(self) -> tuple[Line | None, Operation | None]:
        line = self._begin[self.begun - 1][0] if self.begun else None
        return line, self._part

    def describe(self) -> str:
        return self._text


class PartsLine(Line):
    """The operations of one group, in the order in which all ranks call them.

    Args:
        lines: where parts take place; nobody else moves them on, so that a rank sleeps on one word alone.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        super().__init__()
        self._lines = lines
        self._operations: list[Parts] = []

    def add(self, operation: Parts) -> None:
        if self.error is not None:
            raise self.error
        self._operations.append(operation)

    def advance(self) -> bool:
        if self.error is not None:
            return False
        try:
            while self._begin_more():
                pass
        except (RuntimeError, ValueError) as error:
            self.error = CollectiveError(f"{self._operations[0].describe()}: {str(error).splitlines()[0]}")
            return False
        if self._operations:
            line = self._operations[0].place[0]
            self.blocked_on = line.blocked_on if line is not None else (0, 0)
        return bool(self._operations)

    def _begin_more(self) -> bool:
        for own in self._lines:
            own.advance()
        most, begun = 1 << 30, 0
        for operation in self._operations:
            begun -= operation.begun
            operation.advance(min(most, operation.count))
            begun, most = begun + operation.begun, operation.begun
        self._operations = [operation for operation in self._operations if not operation.is_done]
        return begun > 0

    def sleep(self, word: int, seen: int, most_s: float) -> None:
        line = self._operations[0].place[0] if self._operations else None
        if line is not None:
            line.sleep(word, seen, most_s)
        else:
            time.sleep(min(most_s, _LOOK_S))

    def late_ranks(self) -> list[str]:
        line = self._operations[0].place[0] if self._operations else None
        return line.late_ranks() if line is not None else ["another host"]

    def check(self, operation: Operation) -> None:  # noqa: ARG002
        if self.error is not None:
            raise self.error
        line, part = self._operations[0].place if self._operations else (None, None)
        if line is not None and part is not None:
            line.check(part)
