"""The logs of hosts on their way to the launcher's log directory: read from their files as they grow, piece by piece,
and appended to files of the same names there. And an agent's own folder on its host: logs on their way, the job's
records there, its socket. Who comes to that host again runs `attach` where the agent lives, and `salvage` where it is
lost."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msrun import contract
from msrun.agent.attempt import keep_logs
from msrun.agent.log_file import LogFile, LogLimit
from msrun.agent.own_file import create_own_file, open_own_file, socket_address
from msrun.agent.processes.process_control import (
    SERVER_END_S,
    Pid,
    marked_processes,
    signal_processes,
    start_time,
    wait_until,
)
from msrun.cluster.messages import Message, encode_message
from msrun.errors import ClusterError, describe_limit, refused_as
from msrun.launch.directory.log_directory import record_fault, write_private
from msrun.launch.directory.worker_log import LogReader
from msrun.launch.transport.pipe import MARKER, READ_BYTES

PIECE_BYTES = 1 << 17
KEPT_BYTES = 1 << 20  # of what the launcher has, so much of each log stays: reports of this host quote its end
STEP_BYTES = 1 << 20  # so much is freed at a time
_PARTS = (contract.trace_file_name, contract.flight_recorder_name)
_OF_JOB = re.compile("|".join(re.escape(name(0)).replace("0", r"\d+") for name in _PARTS))
_FILLED_IN = r"[A-Za-z0-9._:-]+(?<!\.attempt)"  # for {ip} or {hostname}, never an earlier attempt


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
    """Gives the next piece of any log, each in its turn; what the launcher has is freed, where that can be."""

    def __init__(self, paths: Sequence[str], *, on_refused: Callable[[str], None] = lambda _: None) -> None:
        """`on_refused`: told once, in the system's words, that what the launcher has stays on the disk here, too."""
        self._readers = [(Path(path).name, LogReader(path)) for path in paths]
        self._on_refused = on_refused
        self._turn = 0
        self._lock = threading.Lock()
        self._sent: deque[tuple[LogReader, int, int]] = deque()  # pieces: reader, attempt, where it ends
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
        self.folder, self._limit, self._own = folder, limit, own
        self._max_attempt, self._first_attempt = max_restarts, first_attempt
        self._logs: dict[str, tuple[int, LogFile]] = {}  # name -> attempt and file
        self._sizes: dict[str, int] = {}
        self._names: dict[int, frozenset[str]] = {}  # of the logs that each host writes here
        self.fault = ""  # why logs are not complete: the first error of the disk; empty when they are

    def take(self, node_rank: int, host: str, message: Message) -> bool:
        """Take what a host's message has for the log directory; whether that is all of it (ClusterError)."""
        if message.get("traceback"):
            record_fault(self.folder, f"{host}: {message.get('text')}", str(message["traceback"]))
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
        """Make empty logs of these names, as far as they are of this host, once (OSError: one cannot be made)."""
        if node_rank not in self._names:
            self._names[node_rank] = frozenset(name for name in names if self.is_own(node_rank, name))
            for name in self._names[node_rank]:
                self._logs[name], self._sizes[name] = (0, self._open(name)), 0

    def sizes(self, node_rank: int) -> dict[str, int]:
        """Return how many bytes of the newest log of each name have come from a host."""
        return {name: self._sizes[name] for name in self._names.get(node_rank, ())}

    def _open(self, name: str) -> LogFile:
        path = self.folder / name
        if name != contract.SCHEDULER_LOG:  # where a fault of msrun itself may stand already
            os.close(create_own_file(path))
        return LogFile(str(path), None if is_of_job(name) else self._limit)

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
            why: str | None = log.fault
        except (OSError, ValueError, ClusterError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
        if why:
            self.fault = self.fault or f"{self.folder / name}: {why}"

    def _log(self, name: str, attempt: int) -> LogFile:
        """Return the file of an attempt; the logs of the one before are renamed as on the host."""
        current, log = self._logs[name]
        if attempt > current and not is_of_job(name):
            log.close()
            keep_logs([str(self.folder / name)], self._first_attempt + current)
            log = self._open(name)
            self._logs[name], self._sizes[name] = (attempt, log), 0
        return log

    def close(self) -> None:
        for _, log in self._logs.values():
            log.close()
        self._logs.clear()
        self._names.clear()


SOCKET = "agent.sock"
AGENT = "agent.pid"  # process id and start time of the agent, so that nobody else is taken for it
GIVEN_TABLE = "given_rank_table.json"
KEEP_S = 86400.0  # how long logs that nobody has fetched stay after the end of their agent
_NAME = re.compile(r"msrun-spool-[0-9a-f-]+-\d+")


def spool_path(job_id: str, number: int) -> Path:
    """Return where the folder is; another process of the same user and host finds it by the job alone."""
    return Path(tempfile.gettempdir(), f"msrun-spool-{job_id}-{number}")


def make_spool(job_id: str, number: int) -> tuple[Path, int]:
    """Make the folder, for its owner alone, and return it with a descriptor that marks it as in use, in all PID
    namespaces, until that or its process ends. Raises ClusterError: it cannot be made, or is there already, which a
    stranger may have done."""
    path = spool_path(job_id, number)
    with refused_as(f"cannot make {path}", "set TMPDIR there to another folder", ClusterError):
        path.mkdir(mode=contract.DIRECTORY_MODE)
        write_private(path / AGENT, f"{os.getpid()} {start_time(os.getpid())}\n")
        folder = _open_folder(path)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return path, folder


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def remove_old_spools(now_s: float) -> None:
    """Remove the user's own spools that agents left behind, once nothing in them has changed for KEEP_S."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for path in [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                if _is_left_behind(path, now_s):
                    remove_spool(path)


def _is_left_behind(path: Path, now_s: float) -> bool:
    folder = _open_folder(path)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return False
        changed = [os.fstat(folder), *(entry.stat(follow_symlinks=False) for entry in os.scandir(folder))]
        if now_s - max(found.st_mtime for found in changed) < KEEP_S:
            return False
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(folder)


def listen_in(spool: Path) -> socket.socket:
    """Return the listening socket of a folder. Raises ClusterError: it cannot be made."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(0.0)
    try:
        with contextlib.suppress(FileNotFoundError):
            (spool / SOCKET).unlink()
        with socket_address(spool / SOCKET) as name:
            listener.bind(name)
        listener.listen(4)
    except OSError as error:
        listener.close()
        raise ClusterError(f"cannot listen in {spool} ({error.strerror}); set TMPDIR there to another folder") from None
    return listener


def connect_in(spool: Path) -> socket.socket:
    """Return a connection to whoever listens in a folder. Raises OSError: nobody does."""
    stream = socket.socket(socket.AF_UNIX)
    try:
        with socket_address(spool / SOCKET) as name:
            stream.connect(name)
    except OSError:
        stream.close()
        raise
    return stream


def kill_agent(spool: Path) -> bool:
    """Kill the agent of a folder, which may be stopped, or hang; whether it ran. What was below it ends itself."""
    try:
        pid, started = (int(word) for word in (spool / AGENT).read_text().split())
    except (OSError, ValueError):
        return False
    if not started or start_time(pid) != started:
        return False
    signal_processes([Pid(pid, started)], signal.SIGKILL)
    return True


def remove_spool(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


NO_AGENT = 69  # exit status when there is nothing to connect to; EX_UNAVAILABLE of sysexits.h


def attach(job_id: str, number: int) -> None:
    """Pass bytes between stdin and stdout and the socket of an agent that runs, until one side closes."""
    try:
        agent = connect_in(spool_path(job_id, number))
    except OSError as error:
        sys.stderr.write(f"msrun agent: no agent of this job runs here any more ({error.strerror})\n")
        os._exit(NO_AGENT)
    with selectors.PollSelector() as selector:  # epoll refuses a stdin that is a plain file
        for source in (0, agent):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = agent.recv(READ_BYTES) if key.fileobj is agent else os.read(0, READ_BYTES)
                if not data:
                    os._exit(0)
                _write(data) if key.fileobj is agent else agent.sendall(data)


def salvage(job_id: str, number: int, offsets: Mapping[str, int]) -> None:
    """End a lost agent, write what is missing of its logs, from `offsets` on, to stdout, and remove its folder."""
    spool = spool_path(job_id, number)
    if kill_agent(spool):  # its fork server ends what is below it
        wait_until(lambda: not marked_processes(job_id), SERVER_END_S)
    with contextlib.suppress(BrokenPipeError):  # the launcher has gone: the logs stay for another one
        _write(MARKER)
        for name, offset in offsets.items():
            _send_log(spool / name, offset)
        remove_spool(spool)
    os._exit(0)


def _send_log(path: Path, offset: int) -> None:
    try:
        file = os.fdopen(open_own_file(path, os.O_RDONLY), "rb")
    except OSError:  # it was never made
        return
    with file:
        file.seek(offset)
        while data := file.read(PIECE_BYTES):
            _write(encode_message(pack_piece(path.name, None, data)))


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
