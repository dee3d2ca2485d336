"""Logs of workers: read to the newest byte while they are written and rotated, their ends, and pieces to be shown:
lines, states of progress bars, bytes, or lines that all ranks write.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msrun.agent.logs.own_file import open_own_file
from msrun.agent.logs.rotated_log import rotated_path
from msrun.agent.watch.progress_board import Progress

GAP = b"[msrun: the log was rotated faster than it could be shown; lines may be missing here]\n"
LOOKS = 5
"""How often newer files are looked for at a time, when they are rotated meanwhile."""


class LogReader:
    """Follows one log while it is written, renamed and rotated. `keep`: how many older files stay; 0: it is not
    rotated. `after`: inode of the log that had the name before and may have it still.
    """

    def __init__(self, path: str, keep: int = 0, after: int | None = None) -> None:
        self._path = path
        self._keep = keep
        self._after = after
        self._files: deque[int] = deque()
        """Descriptors, oldest first; the first is being read."""
        self._has_gap = False
        """Between the first file and the next, one may have come and gone."""
        self._is_held = False
        """A file of this name that does not follow those that are held is another log."""

    def read(self, size_bytes: int) -> bytes:
        """Return the next bytes, at most so many; empty when there are none now."""
        if not self._files and not self._find_newer():
            return b""
        while not (data := os.read(self._files[0], size_bytes)):
            if len(self._files) == 1 and not (self._keep and self._find_newer()):
                return b""
            # It has a successor, so nothing is added to it any more; but that may have happened since it was read.
            data = os.read(self._files[0], size_bytes)
            if data:
                return data
            os.close(self._files.popleft())
            if self._has_gap:
                self._has_gap = False
                return GAP
        return data

    def hold(self) -> None:
        """Open what has been written until now, so that new names do not take it away, nor add another log."""
        if self._keep or not self._files:
            self._find_newer()
        self._is_held = True

    def skip_to_last(self, size_bytes: int) -> bool:
        skipped = os.fstat(self._files[0]).st_size - size_bytes if self._files or self._find_newer() else 0
        if skipped > 0:
            os.lseek(self._files[0], skipped, os.SEEK_SET)
        return skipped > 0

    @property
    def place(self) -> int:
        """How many bytes have been read of a log that is not rotated."""
        return os.lseek(self._files[0], 0, os.SEEK_CUR) if self._files and not self._keep else 0

    def edit(self, change: Callable[[int], None]) -> None:
        """Call a function with a descriptor of the log, as it is named now, to be written (OSError: it may not be)."""
        if self._files:
            writable = os.open(f"/proc/self/fd/{self._files[-1]}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                change(writable)
            finally:
                os.close(writable)

    @property
    def inode(self) -> int | None:
        return os.fstat(self._files[-1]).st_ino if self._files else None

    def is_renamed(self) -> bool:
        """Return whether the newest file that is held has lost the log's name; so has one that never came."""
        return not self._files or self.inode not in map(_inode_of_path, self._paths)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popleft())

    @property
    def _paths(self) -> list[str]:
        return [rotated_path(self._path, number) for number in range(self._keep + 1)]

    def _find_newer(self) -> bool:
        """Open what is newer than the newest file that is held; False if nothing is, or files change in every look."""
        known = self.inode if self._files else self._after
        for _ in range(LOOKS):
            newest = _inode_of_path(self._path)
            if newest is None or newest == known:
                return False
            found, is_known_found = self._open_newer(known)
            is_other_log = self._is_held and not is_known_found
            if found and not is_other_log and newest == os.fstat(found[0]).st_ino == _inode_of_path(self._path):
                self._has_gap = self._has_gap or (bool(self._files) and not is_known_found)
                self._files.extend(reversed(found))
                return True
            for file in found:
                os.close(file)
        return False

    def _open_newer(self, known: int | None) -> tuple[list[int], bool]:
        """Return descriptors from the newest file to the one after `known`, and whether that was met."""
        found: dict[int, int] = {}
        for path in self._paths:
            try:
                file = open_own_file(path, os.O_RDONLY)
            except OSError:  # it is just being renamed, or there are no more
                continue
            inode = os.fstat(file).st_ino
            if inode != known and inode not in found:
                found[inode] = file
                continue
            os.close(file)
            if inode == known:
                return list(found.values()), True
        return list(found.values()), False


def _inode_of_path(path: str) -> int | None:
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - half the cost of Path.stat, many times a second
    except OSError:
        return None


EXCERPT_LINES = 20
MAX_LINE_CHARS = 400
TAIL_BYTES = 256 * 1024
LOSS_BYTES = 4096

_LOSS = re.compile(rb"loss(?: is|[:=])\s*([-+0-9.eE]+|nan|inf)", re.IGNORECASE)
_STEP = re.compile(rb"(?:\b|_)step(?: is|[:=#])?\s*(\d{1,18})", re.IGNORECASE)
_OWN_FRAME = re.compile(r'  File "(.*/msrun/agent/processes/\w+\.py|<string>)", line \d+ in \S+\Z')
"""The frame below the script of a forked worker, and those of a thread of msrun's, as faulthandler writes them."""
_BEGIN = re.compile(
    r"\s*(\[rank\d+\]:\s*)?"
    r"(Traceback \(most recent call last\):|Fatal Python error: .*|uncaught \w+( at .*:\d+)?(: .*)?)\s*\Z"
)
"""First line of a traceback, of what `msrun.runtime` writes instead, of torch's copy of it with the rank before each
line, or of a crash in native code."""


def read_tail(path: Path, size_bytes: int) -> bytes:
    """Return the last bytes of a log, of its older files too when it was rotated; empty when it cannot be read."""
    data, number = b"", 0
    while len(data) < size_bytes:
        older = b""
        with (
            contextlib.suppress(OSError),
            os.fdopen(open_own_file(rotated_path(str(path), number), os.O_RDONLY), "rb") as file,
        ):
            file.seek(max(0, file.seek(0, 2) - size_bytes + len(data)))
            older = file.read()
        if number and not older:
            break
        data, number = older + data, number + 1
    return data


@dataclass(frozen=True)
class LogEnd:
    """How far a worker is, by the end of its log, and by what it reports itself where it does."""

    written_at: float | None = None
    """When it last wrote there, wall clock; None when it has written nothing."""
    step: int | None = None
    loss_text: str = ""
    """The newest loss as it stands there; empty when there is none."""
    last_line: str = ""
    """Of a progress bar its last state; as the worker wrote it, so not for a terminal."""

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
    was_rotated = not found.st_size and Path(rotated_path(str(path), 1)).exists()
    if not path.is_file() or not (found.st_size or was_rotated):
        return LogEnd()
    tail = read_tail(path, LOSS_BYTES)
    steps, losses = _STEP.findall(tail), _LOSS.findall(tail)
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
    lines = [line for line in text.splitlines() if not _OWN_FRAME.match(line)]
    begin = next((i for i in range(len(lines) - 1, -1, -1) if _BEGIN.match(lines[i])), None)
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
MAX_HELD_BYTES = 1 << 20
"""A line longer than this is shown in pieces."""
STATE_S = 3.0
"""How often a progress bar that cannot be drawn in place becomes a line of its own."""


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
    """Gives pieces of one worker's log. `rotated`, `after`: see `LogReader`; `new_cutter`: makes who cuts them."""

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
        self._reader.hold()
        self.is_over, self._is_kept = True, False

    def begin_anew(self) -> LogTail:
        """End with this attempt's log, once it is renamed; return what follows the next one's."""
        self.end()
        self._is_kept = True
        return self._next(self._reader.inode)

    def is_complete(self) -> bool:
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
