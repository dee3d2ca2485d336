"""The logs of hosts on their way to the launcher's log directory: read from their files as they grow, piece by piece,
and appended to files of the same names there.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msrun import contract
from msrun.agent.logs.own_file import create_own_file
from msrun.agent.logs.rotated_log import NO_ROTATION, LogRotation, RotatedLog, rename_log
from msrun.cluster.messages import Message
from msrun.errors import ClusterError, describe_limit
from msrun.launch.directory.log_directory import record_fault
from msrun.launch.directory.worker_log import LogReader

PIECE_BYTES = 1 << 17
KEPT_BYTES = 1 << 20  # of what the launcher has, so much of each log stays: reports of this host quote its end
STEP_BYTES = 1 << 20  # so much is freed at a time
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>
_PARTS = (contract.trace_file_name, contract.flight_recorder_name)
_OF_JOB = re.compile("|".join(re.escape(name(0)).replace("0", r"\d+") for name in _PARTS))
_FILLED_IN = r"[A-Za-z0-9._:-]+(?<!\.attempt)"
"""What a host may put in the place of {ip} or {hostname}; never the name of another rank's earlier attempt."""


def is_of_job(name: str) -> bool:
    """Return whether a file goes on when a new attempt begins, unlike a worker's log: the scheduler's, and a trace."""
    return name == contract.SCHEDULER_LOG or _OF_JOB.fullmatch(name) is not None


def pack_piece(name: str, attempt: int | None, data: bytes) -> Message:
    """Return a piece of a log as a message; `attempt` None = the newest that the launcher knows."""
    text = base64.b64encode(zlib.compress(data, 1)).decode("ascii")
    return {"type": "log", "name": name, "attempt": attempt, "data": text}


def unpack_piece(message: Message) -> bytes:
    """Return the bytes of a `log` message. Raises ValueError: they are damaged, or more than PIECE_BYTES."""
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(str(message["data"]), validate=True), PIECE_BYTES + 1)
    except (zlib.error, KeyError) as error:
        raise ValueError(f"a piece of a log is damaged: {error}") from None
    if len(data) > PIECE_BYTES or not inflate.eof:
        raise ValueError(f"a piece of a log is cut off, or has more than {PIECE_BYTES} bytes")
    return data


# -- on their host ----------------------------------------------------------------------------------------------------

_Entry = tuple[str, int, LogReader]  # path, attempt, and what reads it


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _punch(descriptor: int, offset: int, size: int) -> None:
    where, length = ctypes.c_int64(offset), ctypes.c_int64(size)
    if _libc().fallocate64(descriptor, _KEEP_SIZE | _PUNCH_HOLE, where, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class LogSender:
    """Gives the next piece of any of the logs, each in its turn. `next` belongs to the link's thread. What the launcher
    has of a log that is written meanwhile is freed: its size, and where it is read, stays the same. That needs a file
    system that knows holes, as ext4, XFS, Btrfs and tmpfs do, and NFS from 4.2 on."""

    def __init__(self, paths: Sequence[str], *, keep: int, on_refused: Callable[[str], None] = lambda _: None) -> None:
        """`keep`: how many older files stay of a log that is rotated, 0 when they are not. `on_refused`: told once, in
        the system's words, that what the launcher has stays on the disk here, too."""
        self._keep, self._paths, self._on_refused = keep, list(paths), on_refused
        self._turn = self._attempt = 0
        self._lock = threading.Lock()
        self._readers = [(path, 0, LogReader(path, self._keep)) for path in self._paths]
        self._sent: deque[tuple[LogReader, int]] = deque()
        """Of each piece that the launcher may not have: what it was read from, and where it ends there."""
        self._freed: dict[LogReader, int] = {}
        self._can_free = True
        self.unreadable: set[str] = set()  # names of logs that could not be read to their end
        self._old: list[_Entry] = []  # logs of attempts that are over and have not been read to their end

    def close(self) -> None:
        """Close what is open still, once all of it has been sent."""
        with self._lock:
            for _, _, reader in (*self._old, *self._readers):
                reader.close()
            self._old, self._readers = [], []

    @property
    def names(self) -> list[str]:
        return [Path(path).name for path in self._paths]

    def end_attempt(self) -> None:
        """No worker runs any more, and their logs are about to be renamed."""
        with self._lock:
            for entry in [entry for entry in self._readers if not is_of_job(Path(entry[0]).name)]:
                entry[2].hold()
                self._old.append(entry)
                self._readers.remove(entry)

    def begin_attempt(self) -> None:
        with self._lock:
            self._attempt += 1
            self._readers += [
                (p, self._attempt, LogReader(p, self._keep)) for p in self._paths if not is_of_job(Path(p).name)
            ]

    def next(self) -> Message | None:
        """Return the next piece as a message, or None when all that is there was sent. `log {name, attempt, data}`:
        data is deflated, then base64. Raises OSError: a log cannot be read; it is left out from now on, see
        `unreadable`."""
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
            for file, place in dict(pieces).items():
                if self._can_free:
                    self._free(file, (place - KEPT_BYTES) // STEP_BYTES * STEP_BYTES)

    def _free(self, file: LogReader, end: int) -> None:
        begin = self._freed.get(file, 0)
        if end > begin:
            try:
                file.edit(lambda descriptor: _punch(descriptor, begin, end - begin))
                self._freed[file] = end
            except OSError as error:
                self._can_free = False
                self._on_refused(error.strerror or type(error).__name__)


# -- at home ----------------------------------------------------------------------------------------------------------


def own_logs(
    stem: str, ranks: Mapping[int, Collection[int]], servers: int = 0, home: int = 0
) -> dict[int, re.Pattern[str]]:
    """Return what logs each host may write are called. `stem`: of --worker_log_name. `ranks`: node_rank -> global ranks
    there. `servers`: parameter servers of the job; the hosts take turns. `home`: the node rank of the host with the
    scheduler."""
    start = _FILLED_IN.join(re.escape(word) for word in re.split(r"\{ip\}|\{hostname\}", stem))
    found = {}
    for node_rank, own in ranks.items():
        names = [f"{start}_(?:{'|'.join(map(str, own))})(?:\\.stderr)?\\.log"]
        names += [re.escape(name(rank)) for rank in own for name in _PARTS]
        names += [re.escape(f"{contract.server_name(i)}.log") for i in range(node_rank, servers, len(ranks))]
        names += [re.escape(contract.SCHEDULER_LOG)] if node_rank == home else []
        found[node_rank] = re.compile("|".join(names))
    return found


class LogCollector:
    """Of one thread; each log comes from one host."""

    def __init__(
        self,
        folder: Path,
        rotation: LogRotation | None,
        own: Mapping[int, re.Pattern[str]],
        max_restarts: int = 0,
        first_attempt: int = 0,
    ) -> None:
        """`rotation`: None = logs are not rotated; `own`: from `own_logs`."""
        self._folder, self._rotation, self._own = folder, rotation, own
        self._max_attempt, self._first_attempt = max_restarts, first_attempt
        self._logs: dict[str, tuple[int, RotatedLog]] = {}  # name -> attempt and file
        self._sizes: dict[str, int] = {}
        self._names: dict[int, frozenset[str]] = {}
        """`scheduler.log` holds a fault already, which may come before its host has said what it will run."""
        self.fault = ""  # why logs are not complete: the first error of the disk; empty when they are

    def take(self, node_rank: int, host: str, message: Message) -> bool:
        """Take what a message of a host has for the log directory; whether that is all of it. `host`: its name, for
        errors. Raises ClusterError: its logs cannot be opened here."""
        if message.get("traceback"):
            self.record_fault(f"{host}: {message.get('text')}", str(message["traceback"]))
        if message["type"] == "log":
            self.write(node_rank, message)
            return True
        if message["type"] == "planned":
            try:
                self.expect(node_rank, [str(name) for name in message["logs"]])
            except OSError as error:
                raise ClusterError(f"cannot open the logs of {host} here: {describe_limit(error)}") from None
        return False

    def is_own(self, node_rank: int, name: str) -> bool:
        """Return whether a host may write, and speak of, a log of this name."""
        return self._own[node_rank].fullmatch(name) is not None

    def expect(self, node_rank: int, names: Collection[str]) -> None:
        """Make empty logs of these names, as far as they are of this host; what it names later does not count. Raises
        OSError: a file cannot be made."""
        if node_rank not in self._names:
            self._names[node_rank] = frozenset(name for name in names if self.is_own(node_rank, name))
            for name in self._names[node_rank]:
                self._logs[name], self._sizes[name] = (0, self._open(name)), 0

    def sizes(self, node_rank: int) -> dict[str, int]:
        """Return how many bytes of the newest log of each name have come from a host."""
        return {name: self._sizes[name] for name in self._names.get(node_rank, ())}

    def _open(self, name: str) -> RotatedLog:
        path = self._folder / name
        if name != contract.SCHEDULER_LOG:  # where a fault of msrun itself may stand already
            os.close(create_own_file(path))
        return RotatedLog(str(path), NO_ROTATION if self._rotation is None or is_of_job(name) else self._rotation)

    def write(self, node_rank: int, message: Message) -> None:
        """Append a piece. A full disk loses what does not fit, is remembered in `fault`, and stops nobody."""
        name, attempt = str(message.get("name")), message.get("attempt")
        if name not in self._names.get(node_rank, ()):
            return
        attempt = self._logs[name][0] if attempt is None else attempt
        if type(attempt) is not int or not 0 <= attempt <= self._max_attempt:
            return
        try:
            data, log = bytearray(unpack_piece(message)), self._log(name, attempt)
            log.write(data, len(data))
            self._sizes[name] += len(data)
            why: str | ValueError | None = log.fault
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
        if why:
            self.fault = self.fault or f"{self._folder / name}: {why}"

    def _log(self, name: str, attempt: int) -> RotatedLog:
        """Return the file of an attempt; the logs of the one before are renamed as on the host."""
        current, log = self._logs[name]
        if attempt > current and not is_of_job(name):
            path = self._folder / name
            log.close()
            rename_log(str(path), str(path.with_name(contract.attempt_log_name(name, self._first_attempt + current))))
            log = self._open(name)
            self._logs[name], self._sizes[name] = (attempt, log), 0
        return log

    def record_fault(self, what: str, trace: str) -> None:
        """Keep the traceback of a fault of msrun itself, here or on a host; `what` is one line. For any thread."""
        record_fault(self._folder, what, trace)

    def close(self) -> None:
        for _, log in self._logs.values():
            log.close()
        self._logs.clear()
        self._names.clear()
