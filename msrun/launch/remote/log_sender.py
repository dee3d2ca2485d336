"""The logs of one host on their way to the launcher: read from their files as they grow, piece by piece."""

from __future__ import annotations

import base64
import ctypes
import functools
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from msrun import contract
from msrun.cluster.messages import Message
from msrun.launch.directory.worker_log import LogReader

KEPT_BYTES = 1 << 20
"""Of what the launcher has, so much of each log stays: reports of this host quote its end."""
STEP_BYTES = 1 << 20
"""So much is freed at a time."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>


class FreedSpace:
    """Frees the beginning of logs that are written meanwhile: their size, and where they are read, stays the same.

    That needs a file system that knows holes, as ext4, XFS, Btrfs and tmpfs do, and NFS from 4.2 on.
    """

    def __init__(self, on_refused: Callable[[str], None]) -> None:
        """`on_refused`: told once, in the system's words, that the file system frees nothing."""
        self._on_refused = on_refused
        self._can_free = True
        self._freed: dict[LogReader, int] = {}

    def free(self, file: LogReader, sent_bytes: int) -> None:
        """Free what is before a place of a log, which the launcher has up to there."""
        begin, end = self._freed.get(file, 0), (sent_bytes - KEPT_BYTES) // STEP_BYTES * STEP_BYTES
        if end > begin and self._can_free:
            try:
                file.edit(lambda descriptor: _punch(descriptor, begin, end - begin))
                self._freed[file] = end
            except OSError as error:
                self._can_free = False
                self._on_refused(error.strerror or type(error).__name__)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _punch(descriptor: int, offset: int, size: int) -> None:
    where, length = ctypes.c_int64(offset), ctypes.c_int64(size)
    if _libc().fallocate64(descriptor, _KEEP_SIZE | _PUNCH_HOLE, where, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


PIECE_BYTES = 1 << 17
_PARTS = (contract.trace_file_name, contract.flight_recorder_name)
_OF_JOB = re.compile("|".join(re.escape(name(0)).replace("0", r"\d+") for name in _PARTS))

_Entry = tuple[str, int, LogReader]
"""Path, attempt, and what reads it."""


class LogSender:
    """Gives the next piece of any of the logs, each in its turn. `next` belongs to the link's thread."""

    def __init__(self, paths: Sequence[str], *, keep: int, on_refused: Callable[[str], None] = lambda _: None) -> None:
        """
        Args:
            keep: how many older files stay of a log that is rotated, 0 when they are not.
            on_refused: told that what the launcher has of the logs stays on the disk here, too, and why.
        """
        self._keep = keep
        self._paths = list(paths)
        self._turn = 0
        self._attempt = 0
        self._lock = threading.Lock()
        self._readers = [(path, 0, LogReader(path, keep)) for path in self._paths]
        self._sent: deque[tuple[LogReader, int]] = deque()
        """Of each piece that the launcher may not have: what it was read from, and where it ends there."""
        self._space = FreedSpace(on_refused)
        self.unreadable: set[str] = set()
        """Names of logs that could not be read to their end."""
        self._old: list[_Entry] = []
        """Logs of attempts that are over and have not been read to their end."""

    def close(self) -> None:
        """Close what is open still, once all of it has been sent."""
        with self._lock:
            for _, _, reader in (*self._old, *self._readers):
                reader.close()
            self._old, self._readers = [], []

    @property
    def names(self) -> list[str]:
        """The files' names."""
        return [Path(path).name for path in self._paths]

    def end_attempt(self) -> None:
        """No worker runs any more, and their logs are about to be renamed."""
        with self._lock:
            for entry in [entry for entry in self._readers if not is_of_job(Path(entry[0]).name)]:
                entry[2].hold()
                self._old.append(entry)
                self._readers.remove(entry)

    def begin_attempt(self) -> None:
        """New workers write new logs under the old names."""
        with self._lock:
            self._attempt += 1
            self._readers += [
                (p, self._attempt, LogReader(p, self._keep)) for p in self._paths if not is_of_job(Path(p).name)
            ]

    def next(self) -> Message | None:
        """Return the next piece as a message, or None when all that is there was sent.

        `log {name, attempt, data}`: data is deflated, then base64.

        Raises:
            OSError: a log cannot be read; it is left out from now on, see `unreadable`.
        """
        with self._lock:
            for entry in list(self._old):
                if piece := self._read(entry, self._old):
                    return piece
                entry[2].close()
                self._old.remove(entry)
            for _ in range(len(self._readers)):
                self._turn = (self._turn + 1) % len(self._readers)
                if piece := self._read(self._readers[self._turn], self._readers):
                    return piece
        return None

    def _read(self, entry: _Entry, entries: list[_Entry]) -> Message | None:
        path, attempt, reader = entry
        try:
            data = reader.read(PIECE_BYTES)
        except OSError as error:
            entries.remove(entry)
            self.unreadable.add(Path(path).name)
            error.add_note(f"while it read {Path(path).name}")
            raise
        if not data:
            return None
        self._sent.append((reader, reader.place))
        return pack_piece(Path(path).name, attempt, data)

    def acknowledge(self, count: int) -> None:
        """The launcher has so many more of the pieces that `next` gave: a log that grows on takes no disk for them."""
        with self._lock:
            pieces = [self._sent.popleft() for _ in range(min(count, len(self._sent)))]
            for reader, place in dict(pieces).items():
                self._space.free(reader, place)


def is_of_job(name: str) -> bool:
    """Return whether a file goes on when a new attempt begins, unlike a worker's log: the scheduler's, and a trace."""
    return name == contract.SCHEDULER_LOG or _OF_JOB.fullmatch(name) is not None


def pack_piece(name: str, attempt: int | None, data: bytes) -> Message:
    """Return a piece of a log as a message; `attempt` None = the newest that the launcher knows."""
    text = base64.b64encode(zlib.compress(data, 1)).decode("ascii")
    return {"type": "log", "name": name, "attempt": attempt, "data": text}


def unpack_piece(message: Message) -> bytes:
    """Return the bytes of a `log` message.

    Raises:
        ValueError: they are damaged, or more than PIECE_BYTES.
    """
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(str(message["data"]), validate=True), PIECE_BYTES + 1)
    except (zlib.error, KeyError) as error:
        raise ValueError(f"a piece of a log is damaged: {error}") from None
    if len(data) > PIECE_BYTES or not inflate.eof:
        raise ValueError(f"a piece of a log is cut off, or has more than {PIECE_BYTES} bytes")
    return data
