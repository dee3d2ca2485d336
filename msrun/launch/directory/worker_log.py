"""Read a worker's log: to its newest byte while it is written and rotated, its newest loss, traceback or last lines."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from msrun.agent.logs.own_file import open_own_file
from msrun.agent.logs.rotated_log import rotated_path
from msrun.agent.watch.progress_board import Progress

GAP = b"[msrun: the log was rotated faster than it could be shown; lines may be missing here]\n"
LOOKS = 5
"""How often newer files are looked for at a time, when they are rotated meanwhile."""


class LogReader:
    """Follows one log while it is written, over its rotations. What it holds stays the same when it is renamed.

    `keep`: how many older files stay of a log that is rotated, 0 when it is not. `after`: inode of the log that had the
    name before and may have it still; None: there was none.
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
        """Leave out what comes before the last bytes; return whether that is anything."""
        skipped = os.fstat(self._files[0]).st_size - size_bytes if self._files or self._find_newer() else 0
        if skipped > 0:
            os.lseek(self._files[0], skipped, os.SEEK_SET)
        return skipped > 0

    @property
    def place(self) -> int:
        """How many bytes have been read of a log that is not rotated."""
        return os.lseek(self._files[0], 0, os.SEEK_CUR) if self._files and not self._keep else 0

    def edit(self, change: Callable[[int], None]) -> None:
        """Call a function with a descriptor of the log, whatever its name is now, that may be written.

        OSError: it may not be, or what `change` raises. A file that is closed is left.
        """
        if self._files:
            writable = os.open(f"/proc/self/fd/{self._files[-1]}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                change(writable)
            finally:
                os.close(writable)

    @property
    def inode(self) -> int | None:
        """Of the newest file that is held; None while there is none."""
        return os.fstat(self._files[-1]).st_ino if self._files else None

    def is_renamed(self) -> bool:
        """Return whether the newest file that is held has lost the log's name; so has one that never came."""
        return not self._files or self.inode not in map(_inode_of_path, self._paths)

    def close(self) -> None:
        """Let go of all files."""
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
    data = _read_end(path, size_bytes)
    number = 1
    while len(data) < size_bytes and (
        older := _read_end(Path(rotated_path(str(path), number)), size_bytes - len(data))
    ):
        data = older + data
        number += 1
    return data


def _read_end(path: Path, size_bytes: int) -> bytes:
    try:
        with os.fdopen(open_own_file(path, os.O_RDONLY), "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size_bytes))
            return file.read()
    except OSError:
        return b""


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
        """The newest loss."""
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
