"""The line of a group's collectives: every rank writes, reduces and takes them in the order in which all call them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from msrun.errors import CollectiveError
from msrun.runtime.shm.collectives import Collective, describe
from msrun.runtime.shm.segment import NOTE, SLOTS, Segment
from msrun.runtime.shm.work import Operation, lock


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
        self._error: CollectiveError | None = None

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
                self._error = CollectiveError(f"{self._to_take[0].describe()}: {error}")
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
                self._error = CollectiveError(
                    f"the ranks of a group have called different operations: {self._segment.name()} "
                    f"{operation.describe()}, {self._segment.name(rank)} {describe(note, size)} (step {step} of the "
                    "group); all must call the same ones in the same order"
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

    def late_ranks(self) -> list[str]:
        """Return whom the first operation waits for."""
        return [self._segment.name(rank) for rank in self._late()]

    def _late(self) -> list[int]:
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
            CollectiveError: ranks have called different operations, or one that is waited for has ended or left.
        """
        with lock:
            if self._error is not None:
                raise self._error
            for rank in self._late():
                gone = self._segment.gone_how(rank)
                if gone and rank in self._late():  # it may have counted before it ended
                    who, waiting = self._segment.name(rank), self._segment.name()
                    self._error = CollectiveError(
                        f"{who} {gone} while {waiting} waits for it in {operation.describe()}"
                    )
                    raise self._error

    @property
    def error(self) -> CollectiveError | None:
        """Why nothing moves any more."""
        return self._error
