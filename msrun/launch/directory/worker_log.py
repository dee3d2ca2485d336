"""Logs of workers: read to the newest byte while they are written, attempt after attempt, their ends, and pieces to be
shown: lines, states of progress bars, bytes, or lines that all ranks write."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from msrun.agent.log_file import FREE, change, find_data
from msrun.agent.own_file import open_own_file, read_end
from msrun.agent.processes.progress_board import Progress
from msrun.planning.record import Record

GAP = b"\n[msrun: more was written than --log_max_bytes keeps before it could be shown; lines are missing here]\n"


class LogReader:
    """Follows the log of a name. Each attempt has a file of its own, which loses the name when it is over."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: deque[int] = deque()  # descriptors, oldest first; the first is being read
        self.attempt = 0  # of the bytes that were read last: how many files have been read to their end before

    def read(self, size_bytes: int) -> bytes:
        """Return the next bytes of one attempt, at most so many; empty when there are none now."""
        while self._files or self.hold():
            is_over = len(self._files) > 1 or self.hold()  # asked first: nothing is added to one that has a successor
            if data := self._read(size_bytes):
                return data
            if not is_over:
                return b""
            os.close(self._files.popleft())
            self.attempt += 1
        return b""

    def _read(self, size_bytes: int) -> bytes:
        data = os.read(self._files[0], size_bytes)
        if not data.startswith(b"\0"):
            return data
        place = os.lseek(self._files[0], 0, os.SEEK_CUR) - len(data)
        begin = find_data(self._files[0], place)
        os.lseek(self._files[0], begin if begin > place else place + len(data), os.SEEK_SET)
        return GAP if begin > place else data

    def hold(self) -> bool:
        """Open what has the name now, so that a new name does not take it away; False if it is open, or not there."""
        try:
            file = open_own_file(self._path, os.O_RDONLY)
        except OSError:  # it is just being renamed
            return False
        if self._files and os.path.sameopenfile(file, self._files[-1]):
            os.close(file)
            return False
        self._files.append(file)
        return True

    @property
    def newest_attempt(self) -> int:
        """That of the newest file that is open."""
        return self.attempt + max(0, len(self._files) - 1)

    def skip_to_last(self, size_bytes: int) -> bool:
        skipped = os.fstat(self._files[0]).st_size - size_bytes if self._files or self.hold() else 0
        if skipped > 0:
            os.lseek(self._files[0], skipped, os.SEEK_SET)
        return skipped > 0

    @property
    def place(self) -> int:
        """How many bytes of its attempt have been read."""
        return os.lseek(self._files[0], 0, os.SEEK_CUR) if self._files else 0

    def free(self, begin: int, end: int) -> None:
        """Free these bytes of the attempt that is read (OSError: it may not be, or its file system cannot do that)."""
        if self._files:
            writable = os.open(f"/proc/self/fd/{self._files[0]}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                change(writable, FREE, begin, end)
            finally:
                os.close(writable)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popleft())


EXCERPT_LINES = 20
MAX_LINE_CHARS = 400
TAIL_BYTES = 256 * 1024
LOSS_BYTES = 4096

_LOSS = rb"(?i)loss(?: is|[:=])\s*([-+0-9.eE]+|nan|inf)"
_STEP = rb"(?i)(?:\b|_)step(?: is|[:=#])?\s*(\d{1,18})"
_OWN_FRAME = r'  File "(.*/msrun/agent/processes/\w+\.py|<string>)", line \d+ in \S+\Z'
"""The frame below the script of a forked worker, and those of a thread of msrun's, as faulthandler writes them."""
_BEGIN = (
    r"\s*(\[rank\d+\]:\s*)?"
    r"(Traceback \(most recent call last\):|Fatal Python error: .*|uncaught \w+( at .*:\d+)?(: .*)?)\s*\Z"
)
"""First line of a traceback, of what `msrun.runtime` writes instead, of torch's copy of it with the rank before each
line, or of a crash in native code."""


def read_tail(path: Path, size_bytes: int) -> bytes:
    """Return the last bytes of a log, as far as they were not freed; empty when it cannot be read."""
    return read_end(path, size_bytes).lstrip(b"\0")


class LogEnd(Record):
    """How far a worker is, by the end of its log, and by what it reports itself where it does."""

    written_at: float | None = None  # when it last wrote there, wall clock; None when it has written nothing
    step: int | None = None
    loss_text: str = ""  # the newest loss as it stands there; empty when there is none
    last_line: str = ""  # of a progress bar its last state; as the worker wrote it, so not for a terminal

    @property
    def loss(self) -> float | None:
        try:
            return float(self.loss_text)
        except ValueError:
            return None

    def with_reported(self, told: Progress) -> LogEnd:
        """Return the same with the step and the loss that the worker reports, which go before those of its log."""
        loss_text = repr(told.loss) if math.isfinite(told.loss) else self.loss_text
        return replace(self, step=told.steps, loss_text=loss_text) if told.steps else self


def read_log_end(path: Path) -> LogEnd:
    """Return what the last lines of a log tell; nothing of one that is empty, or that cannot be read."""
    try:
        found = path.lstat()
    except OSError:
        return LogEnd()
    if not path.is_file() or not found.st_size:
        return LogEnd()
    tail = read_tail(path, LOSS_BYTES)
    steps, losses = re.findall(_STEP, tail), re.findall(_LOSS, tail)
    lines = (line.rstrip(b"\r\t ").rpartition(b"\r")[2] for line in reversed(tail.split(b"\n")))
    last_line = next((line for line in lines if line.strip()), b"")
    return LogEnd(
        found.st_mtime,
        int(steps[-1]) if steps else None,
        losses[-1].decode("ascii") if losses else "",
        last_line.decode("utf-8", "backslashreplace"),
    )


def read_excerpt(path: Path) -> list[str]:
    """Return the last traceback in the end of a log, else its last lines; long lines are cut."""
    text = read_tail(path, TAIL_BYTES).decode("utf-8", "backslashreplace")
    lines = [line for line in text.splitlines() if not re.match(_OWN_FRAME, line)]
    begin = next((i for i in range(len(lines) - 1, -1, -1) if re.match(_BEGIN, lines[i])), None)
    if begin is None:
        lines = lines[-EXCERPT_LINES:]
    else:
        lines = lines[begin:]
        if len(lines) > 2 * EXCERPT_LINES:
            lines = [
                *lines[:2],
                f"  ... {len(lines) - 2 * EXCERPT_LINES} lines left out ...",
                *lines[-2 * EXCERPT_LINES + 2 :],
            ]
    return [line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + " ..." for line in lines]


READ_BYTES = 1 << 20
MAX_HELD_BYTES = 1 << 20  # a line longer than this is shown in pieces
STATE_S = 3.0  # how often a progress bar that cannot be drawn in place becomes a line of its own


class Cutter:
    """Cuts what a worker writes into pieces that are shown whole; this one gives the bytes as they come."""

    state = b""  # the newest state of the line that a progress bar writes again and again; empty when there is none

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
        self._taken = b""  # the state of the unfinished line that was shown last
        self._due: float | None = None

    def feed(self, data: bytes) -> list[bytes]:
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
        held, self._held = self._held, b""
        return [held] if held else []


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class LogTail:
    """Gives pieces of one worker's log, of one attempt after the other. `new_cutter`: makes who cuts them."""

    def __init__(self, global_rank: int, path: str, new_cutter: Callable[[], Cutter]) -> None:
        self.global_rank = global_rank
        self.path = path
        self.cutter = new_cutter()
        self.has_more = False  # the last `read` has left something
        self._over = -1  # the newest attempt that is over
        self._reader = LogReader(path)
        self.close, self.skip_to_last = self._reader.close, self._reader.skip_to_last

    def end(self) -> None:
        """An attempt is over: its log may be renamed, and what comes of it still is given as it comes."""
        self._reader.hold()
        self._over = self._reader.newest_attempt

    def read(self, max_bytes: int | None = None) -> list[bytes]:
        """Return the pieces that are complete now, all of an attempt that is over; `has_more` after `max_bytes`."""
        pieces: list[bytes] = []
        size_bytes = 0
        while True:
            self.has_more = max_bytes is not None and size_bytes >= max_bytes
            if self.has_more:
                return pieces
            attempt = self._reader.attempt
            data = self._reader.read(max_bytes or READ_BYTES)
            if self._reader.attempt != attempt:
                pieces += self.cutter.end()
            if not data:
                return pieces + (self.cutter.end() if self._reader.attempt <= self._over else [])
            size_bytes += len(data)
            pieces += self.cutter.feed(data)
