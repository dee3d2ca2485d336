"""Point to point: a mailbox for every pair of ranks, a ring of bytes that one fills and the other empties.

A message is a head of two numbers, tag and bytes, and its bytes. A send is over when all of it is in the mailbox; what
arrives before anybody asks for it is kept aside.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from msrun.errors import CollectiveError
from msrun.shm.segment import Segment
from msrun.shm.work import Line, lock

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
