"""The logs of hosts on their way to the launcher's log directory: read from their files as they grow, piece by piece,
and appended to files of the same names there."""

from __future__ import annotations

import base64
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msrun import contract
from msrun.agent.attempt import keep_logs
from msrun.agent.logs.log_file import BoundedLog, LogFile, LogLimit
from msrun.agent.own_file import create_own_file
from msrun.cluster.messages import Message
from msrun.errors import ClusterError, describe_limit
from msrun.launch.directory.log_directory import record_fault
from msrun.launch.directory.worker_log import LogReader

PIECE_BYTES = 1 << 17
KEPT_BYTES = 1 << 20  # of what the launcher has, so much of each log stays: reports of this host quote its end
STEP_BYTES = 1 << 20  # so much is freed at a time
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


class LogSender:
    """Gives the next piece of any of the logs, each in its turn. `next` belongs to the link's thread. What the launcher
    has of a log that is written meanwhile is freed, where the file system can do that: see `log_file`."""

    def __init__(self, paths: Sequence[str], *, on_refused: Callable[[str], None] = lambda _: None) -> None:
        """`on_refused`: told once, in the system's words, that what the launcher has stays on the disk here, too."""
        self._readers = [(Path(path).name, LogReader(path)) for path in paths]
        self._on_refused = on_refused
        self._turn = 0
        self._lock = threading.Lock()
        self._sent: deque[tuple[LogReader, int, int]] = deque()
        """Of each piece that the launcher may not have: what it was read from, its attempt, where it ends there."""
        self._freed: dict[LogReader, tuple[int, int]] = {}
        self._can_free = True
        self.names = [name for name, _ in self._readers]
        self.unreadable: set[str] = set()  # names of logs that could not be read to their end

    def close(self) -> None:
        """Close what is open still, once all of it has been sent."""
        with self._lock:
            for _, reader in self._readers:
                reader.close()
            self._readers = []

    def hold(self) -> None:
        """No worker runs any more, and their logs are about to be renamed."""
        with self._lock:
            for _, reader in self._readers:
                reader.hold()

    def next(self) -> Message | None:
        """Return the next piece as a message, or None when all that is there was sent. `log {name, attempt, data}`:
        data is deflated, then base64. Raises OSError: a log cannot be read; it is left out from now on, see
        `unreadable`."""
        with self._lock:
            for _ in range(len(self._readers)):
                self._turn = (self._turn + 1) % len(self._readers)
                name, reader = self._readers[self._turn]
                try:
                    data = reader.read(PIECE_BYTES)
                except OSError as error:
                    del self._readers[self._turn]
                    self.unreadable.add(name)
                    error.add_note(f"while it read {name}")
                    raise
                if data:
                    self._sent.append((reader, reader.attempt, reader.place))
                    return pack_piece(name, reader.attempt, data)
        return None

    def acknowledge(self, count: int) -> None:
        """The launcher has so many more of the pieces that `next` gave: a log that grows on takes no disk for them."""
        with self._lock:
            pieces = [self._sent.popleft() for _ in range(min(count, len(self._sent)))]
            for reader, (attempt, place) in {reader: (attempt, place) for reader, attempt, place in pieces}.items():
                if self._can_free and attempt == reader.attempt:
                    self._free(reader, attempt, (place - KEPT_BYTES) // STEP_BYTES * STEP_BYTES)

    def _free(self, reader: LogReader, attempt: int, end: int) -> None:
        of_attempt, begin = self._freed.get(reader, (attempt, 0))
        begin = begin if of_attempt == attempt else 0
        if end > begin:
            try:
                reader.free(begin, end)
                self._freed[reader] = attempt, end
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
        limit: LogLimit | None,
        own: Mapping[int, re.Pattern[str]],
        max_restarts: int = 0,
        first_attempt: int = 0,
    ) -> None:
        """`limit`: None = logs stay whole; `own`: from `own_logs`."""
        self._folder, self._limit, self._own = folder, limit, own
        self._max_attempt, self._first_attempt = max_restarts, first_attempt
        self._logs: dict[str, tuple[int, LogFile]] = {}  # name -> attempt and file
        self._bounded: dict[str, BoundedLog] = {}
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

    def _open(self, name: str) -> LogFile:
        path = self._folder / name
        if name != contract.SCHEDULER_LOG:  # where a fault of msrun itself may stand already
            os.close(create_own_file(path))
        if self._limit is not None and not is_of_job(name):
            self._bounded[name] = BoundedLog(str(path), self._limit, lambda _: None)
        return LogFile(str(path))

    def write(self, node_rank: int, message: Message) -> None:
        """Append a piece. A full disk loses what does not fit, is remembered in `fault`, and stops nobody."""
        name, attempt = str(message.get("name")), message.get("attempt")
        if name not in self._names.get(node_rank, ()):
            return
        attempt = self._logs[name][0] if attempt is None else attempt
        if type(attempt) is not int or not 0 <= attempt <= self._max_attempt:
            return
        try:
            data, log = unpack_piece(message), self._log(name, attempt)
            log.write(data)
            self._sizes[name] += len(data)
            if name in self._bounded:
                self._bounded[name].look()
            why: str | None = log.fault
        except (OSError, ValueError, ClusterError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
        if why:
            self.fault = self.fault or f"{self._folder / name}: {why}"

    def _log(self, name: str, attempt: int) -> LogFile:
        """Return the file of an attempt; the logs of the one before are renamed as on the host."""
        current, log = self._logs[name]
        if attempt > current and not is_of_job(name):
            log.close()
            keep_logs([str(self._folder / name)], self._first_attempt + current)
            if name in self._bounded:
                self._bounded[name].end(self._first_attempt + current)
            log = self._open(name)
            self._logs[name], self._sizes[name] = (attempt, log), 0
        return log

    def record_fault(self, what: str, trace: str) -> None:
        """Keep the traceback of a fault of msrun itself, here or on a host; `what` is one line. For any thread."""
        record_fault(self._folder, what, trace)

    def close(self) -> None:
        for _, log in self._logs.values():
            log.close()
        for bounded in self._bounded.values():
            bounded.end()
        self._logs.clear()
        self._bounded.clear()
        self._names.clear()
