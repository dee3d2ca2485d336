"""The lock of a log directory: one job at a time, and a way from the directory to the launcher that uses it.

The launcher holds a POSIX record lock (fcntl(2), F_SETLK) on `job.lock` for as long as its job uses the directory: the
kernel takes it back when the launcher ends, however it ends, and F_GETLK names the holder. A fork does not inherit it,
so the process that lives on has to take it; closing *any* descriptor of the file gives it up, so who holds it must not
open the file again. The file's first line is a `LockRecord` as JSON, which stays when the lock is given up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import struct
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msrun import contract
from msrun.agent.own_file import open_own_file
from msrun.errors import UsageError

MAX_RECORD_BYTES = 64 * 1024
RECORD_WAIT_S = 0.2  # how long a reader waits for the record of a job that has just taken the lock
POLL_S = 0.005
MAX_TIME = 1e12  # no moment or span in seconds is beyond this; more is damage

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_ASKED = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True)
class LockRecord:
    """Who took the lock last."""

    job_id: str
    pid: int  # of its launcher, as the launcher's own host and container count it
    host: str
    started_at: float  # wall clock, seconds since 1970
    error: str = ""  # why the job ended before its first event; left out otherwise


@dataclass(frozen=True)
class LockState:
    """What can be seen of a lock at one moment."""

    record: LockRecord | None  # None when the file is missing or damaged
    holder_pid: int | None
    """None when nobody holds the lock; 0 or less when the holder is out of sight: on another host, in a container."""

    @property
    def is_held(self) -> bool:
        return self.holder_pid is not None

    def describe(self) -> str:
        """Return the job in words: "job 3f2a (pid 17 on host a)"."""
        if self.record is None:
            return f"a job that is just starting (pid {self.holder_pid})"
        return f"job {self.record.job_id} (pid {self.record.pid} on host {self.record.host})"


class JobLock:
    """The lock as its job holds it: `take` it when the job is known to be possible, leave the context to give it up."""

    def __init__(self, log_dir: Path, job_id: str) -> None:
        self._log_dir = log_dir
        self._given = log_dir.parent if log_dir.name == job_id else log_dir  # what the user has named
        self._record = LockRecord(job_id, os.getpid(), socket.gethostname(), round(time.time(), 3))
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._descriptor < 0:
            return
        if error is not None:
            with contextlib.suppress(OSError):
                self._write(replace(self._record, error=str(error) or type(error).__name__), self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1

    def take(self) -> None:
        """Create the directory (0700) and lock it (UsageError: another job uses it, or it cannot be written)."""
        path, verb = self._log_dir / contract.LOCK_FILE, "write"
        with contextlib.ExitStack() as stack:
            try:
                for folder in (self._given, self._log_dir):
                    folder.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
                descriptor, verb = open_own_file(path, os.O_RDWR | os.O_CREAT), "lock"
                stack.callback(os.close, descriptor)
                self._lock(descriptor)
                self._write(self._record, descriptor)
            except OSError as error:
                raise UsageError(
                    f"--log_dir {self._given}: cannot {verb} {error.filename or path} ({error.strerror}); give a "
                    "directory that you may write, on a file system with locks"
                ) from None
            stack.pop_all()
        self._descriptor = descriptor

    def _lock(self, descriptor: int) -> None:
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            state = read_lock(self._log_dir)
            if state.is_held:
                raise UsageError(
                    f"--log_dir {self._log_dir}: in use by {state.describe()}; give another --log_dir, "
                    f"or end that job with msrun --stop {shlex.quote(str(self._log_dir))}"
                )

    def _write(self, record: LockRecord, descriptor: int) -> None:
        fields = {name: value for name, value in asdict(record).items() if value != ""}
        data = json.dumps(fields).encode() + b"\n"
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))


def read_lock(log_dir: Path) -> LockState:
    """Return who holds the lock of a directory and what the holder, or the last one, has written (OSError: it cannot be
    read); never for a process that holds the lock itself, which would lose it."""
    path = log_dir / contract.LOCK_FILE
    try:
        descriptor = open_own_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return LockState(None, None)
    try:
        end = time.monotonic() + RECORD_WAIT_S
        while True:
            kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, _ASKED))
            pid = None if kind == fcntl.F_UNLCK else int(holder)
            record = parse_record(os.pread(descriptor, MAX_RECORD_BYTES, 0))
            # A holder in another container counts its pid otherwise, so a difference is no proof of an old record.
            is_settled = pid is None or pid <= 0 or (record is not None and record.pid == pid)
            if is_settled or time.monotonic() > end:
                return LockState(record, pid)
            time.sleep(POLL_S)
    finally:
        os.close(descriptor)


def parse_record(data: bytes) -> LockRecord | None:
    """Return the record in the first line of a lock file, or None when it is no record."""
    fields = parse_object(data.split(b"\n", 1)[0])
    job_id, host, error = (fields.get(name, "") for name in ("job_id", "host", "error"))
    pid, started_at = (parse_number(fields.get(name)) for name in ("pid", "started_at"))
    are_texts = isinstance(job_id, str) and isinstance(host, str) and isinstance(error, str)
    if not are_texts or not job_id or pid is None or started_at is None:
        return None
    return LockRecord(job_id, int(pid), host, started_at, error)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one when the bytes are none: damaged, half written, another value."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def parse_number(value: object) -> float | None:
    """Return a JSON number as a float; None when it is none, or not one that this program ever writes."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_TIME:
        return None
    return float(value)
