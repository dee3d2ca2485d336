"""Workers' logs as they grow, in pieces that can be shown: lines, states of progress bars, bytes, lines of all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from msrun.launch.directory.worker_log import LogReader

READ_BYTES = 1 << 20
MAX_HELD_BYTES = 1 << 20
"""A line longer than this is shown in pieces."""
STATE_S = 3.0
"""How often a progress bar that cannot be drawn in place becomes a line of its own."""
WAIT_S = 0.5
"""How long a line waits for the same line of other ranks."""
MAX_WAITING = 1000
"""Lines of a rank; with more the first one waits no longer."""


class Cutter:
    """Cuts what a worker writes into pieces that are shown whole; this one gives the bytes as they come."""

    state = b""
    """The newest state of the line that a progress bar writes again and again; empty when there is none."""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the pieces that are complete now, with their line ends."""
        return [data]

    def end(self) -> list[bytes]:
        """Return what is left; nothing more will come."""
        return []

    def take_state(self, now: float) -> list[bytes]:  # noqa: ARG002
        """Return that state as a line of its own, when it is time for one; `now`: monotonic seconds."""
        return []


class LineCutter(Cutter):
    """Lines. Of one that carriage returns write again and again, as a progress bar does, only the newest state."""

    def __init__(self) -> None:
        self._held = b""
        self._taken = b""
        """The state of the unfinished line that was shown last."""
        self._due: float | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the lines that are complete now."""
        *whole, self._held = (self._held + data).split(b"\n")
        lines = [_last_state(line) for line in whole]
        if b"\r" in self._held:  # older states are not kept
            self._held = b"\r" + _last_state(self._held) + (b"\r" if self._held.endswith(b"\r") else b"")
        if lines:
            if self._taken and lines[0] == self._taken:
                del lines[0]
            self._taken, self._due = b"", None
        if len(self._held) > MAX_HELD_BYTES:
            lines.append(self._held)
            self._held = b""
        state = _last_state(self._held) if b"\r" in self._held else b""
        self.state = state if state.strip() else b""
        return [line + b"\n" for line in lines]

    def end(self) -> list[bytes]:
        """Return a last unfinished line."""
        return self.feed(b"\n") if self._held else []

    def take_state(self, now: float) -> list[bytes]:
        """Return the state when STATE_S have passed since the bar began or was shown last, and it has changed."""
        if not self.state or self.state == self._taken:
            return []
        if self._due is None:
            self._due = now + STATE_S
        if now < self._due:
            return []
        self._taken, self._due = self.state, now + STATE_S
        return [self.state + b"\n"]


class RawLineCutter(Cutter):
    """The bytes, in pieces that end with a line feed or a carriage return: those of other ranks may stand between."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the pieces that are complete now; a carriage return waits, as a line feed may follow."""
        data = self._held + data
        end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1))
        if len(data) - end > MAX_HELD_BYTES:
            end = len(data)
        self._held = data[end:]
        return data[:end].splitlines(keepends=True)

    def end(self) -> list[bytes]:
        """Return a last piece without an end."""
        held, self._held = self._held, b""
        return [held] if held else []


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class LogTail:
    """Follows one worker's log and gives back pieces of it.

    `rotated`: how many older files stay of a log that is rotated, 0 when it is not; `after`: inode of the log of the
    attempt before, which has the name until it is moved away; `new_cutter`: makes what decides on the pieces.
    """

    def __init__(
        self, global_rank: int, path: str, rotated: int, new_cutter: Callable[[], Cutter], after: int | None = None
    ) -> None:
        self.global_rank = global_rank
        self.path = path
        self.cutter = new_cutter()
        self.has_more = False
        """The last `read` has left something."""
        self.is_over = False
        """Nothing of a next attempt is read."""
        self._is_kept = False
        """It is about to be renamed, and may grow until then."""
        self._reader = LogReader(path, rotated, after)
        self._next = partial(LogTail, global_rank, path, rotated, new_cutter)
        self.close = self._reader.close

    def end(self) -> None:
        """Nobody writes there any more."""
        self._reader.hold()
        self.is_over, self._is_kept = True, False

    def begin_anew(self) -> LogTail:
        """End with this attempt's log, once it is renamed; return what follows the next one's."""
        self.end()
        self._is_kept = True
        return self._next(self._reader.inode)

    def is_complete(self) -> bool:
        """Return whether all that will be there is there."""
        return self.is_over and (not self._is_kept or self._reader.is_renamed())

    def read(self, max_bytes: int | None = None) -> list[bytes]:
        """Return the pieces that are complete now, all of a log that is over; after `max_bytes` sets `has_more`."""
        pieces: list[bytes] = []
        size_bytes = 0
        while True:
            self.has_more = max_bytes is not None and size_bytes >= max_bytes
            if self.has_more:
                return pieces
            data = self._reader.read(max_bytes or READ_BYTES)
            if not data:
                return pieces + self.cutter.end() if self.is_over else pieces
            size_bytes += len(data)
            pieces += self.cutter.feed(data)


class MergedLines:
    """Of the lines that several workers write, those that all of them write, once.

    Holds each rank's lines in their order until the others have written them, too, or have not in WAIT_S.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._waiting: dict[int, deque[tuple[bytes, float]]] = {rank: deque() for rank in ranks}

    def add(self, global_rank: int, lines: Collection[bytes], now: float) -> None:
        """Add lines that a rank has written; `now`: monotonic seconds."""
        self._waiting[global_rank] += [(line, now) for line in lines]

    def take(self, now: float, *, at_end: bool = False) -> list[tuple[int | None, bytes]]:
        """Return what is to be shown now: a rank and its line, or None and a line of all; `at_end`: no more come."""
        shown: list[tuple[int | None, bytes]] = []
        queues = self._waiting
        while True:
            heads = {rank: queue[0] for rank, queue in queues.items() if queue}
            lines = {line for line, _ in heads.values()}
            if len(heads) == len(queues) and len(lines) == 1:
                shown.append((None, lines.pop()))
                for queue in queues.values():
                    queue.popleft()
                continue
            ready = [
                rank
                for rank, (_, since) in heads.items()
                if at_end or now - since >= WAIT_S or len(queues[rank]) > MAX_WAITING
            ]
            if not ready:
                return shown
            # one that others have, too, further on, comes after what stands before it there
            rank = next((rank for rank in ready if not self._is_common(heads[rank][0])), ready[0])
            shown.append((rank, queues[rank].popleft()[0]))

    def _is_common(self, line: bytes) -> bool:
        return all(any(line == other for other, _ in queue) for queue in self._waiting.values())
