"""The line of a group's collectives: every rank writes and takes them in the order in which all call them."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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


_HEAD = struct.Struct("<qq")


@dataclass(eq=False)
class Send:
    """A message on its way out."""

    segment: Segment
    to: int
    tag: int
    data: Tensor
    """Bytes."""
    done: int = 0
    """Bytes in the mailbox."""
    has_head: bool = False

    @property
    def is_done(self) -> bool:
        return self.has_head and self.done == len(self.data)

    def describe(self) -> str:
        return f"send of {len(self.data)} bytes to {self.segment.name(self.to)}, tag {self.tag}"


@dataclass(eq=False)
class Receive:
    """A message that is asked for."""

    segment: Segment
    source: int | None
    """None: from anybody, until it is known."""
    tag: int
    data: Tensor
    """Bytes to be written."""
    is_done: bool = False

    def describe(self) -> str:
        source = "any rank" if self.source is None else self.segment.name(self.source)
        return f"receive of {len(self.data)} bytes from {source}, tag {self.tag}"


@dataclass(eq=False)
class _Arriving:
    """A message on its way in."""

    tag: int
    data: Tensor
    receive: Receive | None
    done: int = 0


@dataclass
class _Box:
    """What comes from one rank."""

    arriving: _Arriving | None = None
    kept: list[_Arriving] = field(default_factory=list)
    """Complete messages that nobody has asked for yet, oldest first."""


class Mail(Line):
    """The messages of one rank of a group."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self._segment, self._words = segment, segment.words
        self._sends: dict[int, deque[Send]] = {}
        self._receives: list[Receive] = []
        self._boxes = [_Box() for _ in range(segment.size)]

    def add(self, operation: Send | Receive) -> None:
        if isinstance(operation, Send):
            self._sends.setdefault(operation.to, deque()).append(operation)
        else:
            self._receives.append(operation)

    def advance(self) -> bool:
        word = self._segment.bell + self._segment.rank
        self.blocked_on = word, self._words[word]
        for to in list(self._sends):
            self._fill(to)
        for receive in list(self._receives):
            self._give_kept(receive)
        for source in self._sources():
            self._empty(source)
        return bool(self._sends or self._sources()) and self.error is None

    def _sources(self) -> list[int]:
        wanted = {receive.source for receive in self._receives}
        others = (rank for rank in range(self._segment.size) if rank != self._segment.rank)
        return [r for r in others if r in wanted or None in wanted or self._boxes[r].arriving is not None]

    def _count(self, source: int, to: int, *, read: bool) -> int:
        return 2 * (source * self._segment.size + to) + read

    # -- sending ------------------------------------------------------------------------------------------------

    def _fill(self, to: int) -> None:
        segment, counts, ring = self._segment, self._segment.mail_counts, self._segment.mail_bytes
        at, read_at = self._count(segment.rank, to, read=False), self._count(segment.rank, to, read=True)
        before = written = counts[at]
        free = ring - (written - counts[read_at])
        self._words.fence()
        box, sends = segment.mail[segment.rank][to], self._sends[to]
        while sends:
            send = sends[0]
            if not send.has_head:
                if free < _HEAD.size:
                    break
                head = torch.frombuffer(bytearray(_HEAD.pack(send.tag, len(send.data))), dtype=torch.uint8)
                _write(box, written, head)
                written, free, send.has_head = written + _HEAD.size, free - _HEAD.size, True
            count = min(free, len(send.data) - send.done)
            _write(box, written, send.data[send.done : send.done + count])
            written, free, send.done = written + count, free - count, send.done + count
            if send.done < len(send.data):
                break
            sends.popleft()
        if not sends:
            del self._sends[to]
        if written != before:
            self._words.fence()
            counts[at] = written
            self._ring(to)

    def _ring(self, rank: int) -> None:
        self._words.add(self._segment.bell + rank)
        self._words.wake(self._segment.bell + rank)

    # -- receiving ----------------------------------------------------------------------------------------------

    def _give_kept(self, receive: Receive) -> None:
        sources = range(self._segment.size) if receive.source is None else [receive.source]
        for source in sources:
            for message in self._boxes[source].kept:
                if message.tag == receive.tag:
                    self._boxes[source].kept.remove(message)
                    self._finish(receive, source, message.data)
                    return

    def _finish(self, receive: Receive, source: int, data: Tensor | None) -> None:
        self._receives.remove(receive)
        receive.source = source
        if data is not None:
            if not self._fits(receive, source, len(data)):
                return
            receive.data.copy_(data)
        receive.is_done = True

    def _fits(self, receive: Receive, source: int, count: int) -> bool:
        if count != len(receive.data):
            self.error = CollectiveError(
                f"{self._segment.name(source)} has sent {count} bytes with tag {receive.tag}, and "
                f"{self._segment.name()} waits for {len(receive.data)}: both ends need tensors of one size"
            )
        return self.error is None

    def _empty(self, source: int) -> None:
        segment, counts = self._segment, self._segment.mail_counts
        at, read_at = self._count(source, segment.rank, read=False), self._count(source, segment.rank, read=True)
        written, before = counts[at], counts[read_at]
        if written == before:
            return
        self._words.fence()
        read, mailbox, box = before, segment.mail[source][segment.rank], self._boxes[source]
        while self.error is None:
            message = box.arriving
            if message is None:
                is_wanted = any(receive.source in (None, source) for receive in self._receives)
                if written - read < _HEAD.size or not is_wanted:
                    break
                head = torch.empty(_HEAD.size, dtype=torch.uint8)
                _read(mailbox, read, head)
                read += _HEAD.size
                message = box.arriving = self._begin(source, *_HEAD.unpack(bytes(head.tolist())))
                if message is None:
                    break
            count = min(written - read, len(message.data) - message.done)
            _read(mailbox, read, message.data[message.done : message.done + count])
            read, message.done = read + count, message.done + count
            if message.done < len(message.data):
                break
            box.arriving = None
            if message.receive is None:
                box.kept.append(message)
                for receive in list(self._receives):
                    self._give_kept(receive)
            else:
                message.receive.is_done = True
        if read != before:
            self._words.fence()
            counts[read_at] = read
            self._ring(source)

    def _begin(self, source: int, tag: int, count: int) -> _Arriving | None:
        for receive in self._receives:
            if receive.tag == tag and receive.source in (None, source):
                self._receives.remove(receive)
                receive.source = source
                return _Arriving(tag, receive.data, receive) if self._fits(receive, source, count) else None
        with torch.inference_mode(mode=False):  # the message may end outside it
            return _Arriving(tag, torch.empty(count, dtype=torch.uint8), None)

    # -- waiting ------------------------------------------------------------------------------------------------

    def sleep(self, word: int, seen: int, most_s: float) -> None:
        self._segment.sleep(word, seen, most_s)

    def late_ranks(self) -> list[str]:
        return [self._segment.name(rank) for rank in (*self._sends, *self._sources())]

    def check(self, operation: Any) -> None:
        if self.error is not None:
            raise self.error
        segment = self._segment
        if isinstance(operation, Send):
            others = [operation.to]
        elif operation.source is not None:
            others = [operation.source]
        else:
            others = [rank for rank in range(segment.size) if rank != segment.rank]
        gone = [segment.gone_how(rank) for rank in others]
        if not all(gone):
            return
        with lock:
            self.advance()
        if not operation.is_done:
            whom = segment.name(others[0]) if len(others) == 1 else "every other rank of the group"
            raise CollectiveError(f"{whom} {gone[0]} while {segment.name()} waits for it in {operation.describe()}")


def _write(ring: Tensor, at: int, data: Tensor) -> None:
    """Copy bytes into a ring."""
    begin = at % len(ring)
    first = min(len(data), len(ring) - begin)
    ring[begin : begin + first].copy_(data[:first])
    if first < len(data):
        ring[: len(data) - first].copy_(data[first:])


def _read(ring: Tensor, at: int, data: Tensor) -> None:
    """Copy bytes out of a ring."""
    begin = at % len(ring)
    first = min(len(data), len(ring) - begin)
    data[:first].copy_(ring[begin : begin + first])
    if first < len(data):
        data[first:].copy_(ring[: len(data) - first])
