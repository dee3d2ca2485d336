"""A job that starts from a warm server: it asks one that is like it for a fork server, or starts one for next time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.processes.job_mark import NO_JOB
from msrun.agent.processes.server_handle import BOOT, ROOT, SEND_S, ForkServerHandle, ServerProcess
from msrun.cluster.messages import Channel, Message, await_input
from msrun.errors import UsageError
from msrun.planning.environment import SET_LATE

_READ_AT_IMPORT = re.compile(
    r"(?:PYTHON|LD_|MALLOC|GLIBC|OMP_|GOMP_|KMP_|MKL_|OPENBLAS|BLIS_|NUMEXPR|TORCH|PYTORCH|ATEN|C10|CUDA|NVIDIA|NCCL|"
    r"ASCEND|HCCL|NPU|GLOO|TP_|XPU|TRITON|LC_)|(?:LANG|TZ|HOME|USER|LOGNAME|VIRTUAL_ENV|SOURCE_DATE_EPOCH)\Z"
)
"""Names, or their beginnings, of variables that the interpreter, the C library and torch read when they are loaded."""
_KEPT_STATUS = ("Umask:", "Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp:", "Mems_allowed:")
"""Lines of /proc/self/status that a child inherits."""


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that have their effect at import."""
    return {name: value for name, value in env.items() if _READ_AT_IMPORT.match(name) and name not in SET_LATE}


def likeness(env: Mapping[str, str], imports: Sequence[str], working_directory: str) -> str:
    """Return a short word that is equal for two jobs exactly when one warm server can serve both.

    It stands for interpreter, msrun's code, imported packages, variables that are read at import, user, capabilities,
    limits, cores, priority, control group and namespaces. `env`: that of the fork server. `imports`: what it imports
    before it has a job. Of packages that one job names, others may find more imported.
    """
    search = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    value = {
        "python": [sys.version, sys.executable, sys.prefix],
        "code": str(Path(__file__).parents[2]),
        "packages": sorted({name.partition(":")[0].partition(".")[0] for name in imports}),
        "environment": read_at_import(env),
        "directory": working_directory if any(not Path(part).is_absolute() for part in search) else "",
        "status": [line for line in _lines("/proc/self/status") if line.startswith(_KEPT_STATUS)],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _limits()},
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # the hard limit
        "cores": sorted(os.sched_getaffinity(0)),
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), *_lines("/proc/self/oom_score_adj")],
        "control groups": _lines("/proc/self/cgroup"),
        "namespaces": _namespaces(),
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _limits() -> list[str]:
    of_each_job = {"RLIMIT_NOFILE", "RLIMIT_OFILE"}
    return sorted({name for name in dir(resource) if name.startswith("RLIMIT_")} - of_each_job)


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def _namespaces() -> dict[str, str]:
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for entry in sorted(Path("/proc/self/ns").iterdir()):
            if not entry.name.endswith("_for_children"):
                found[entry.name] = str(entry.readlink())
    return found


def loaded_files() -> dict[str, tuple[int, int]]:
    """Return the file of every imported module, with its time of change in ns and its size in bytes."""
    files = {str(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    return {path: stamp for path in sorted(files) if (stamp := _stamp(path)) is not None}


def changed_file(files: Mapping[str, tuple[int, int]]) -> str:
    """Return one of the files that is not as it was; empty when all are."""
    return next((path for path, stamp in files.items() if _stamp(path) != stamp), "")


def _stamp(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(path)  # noqa: PTH116 - thousands of them, before a job starts
        return found.st_mtime_ns, found.st_size
    return None


def warm_folder(caller: Mapping[str, str]) -> Path:
    """Return the folder, made where it was not there: below XDG_RUNTIME_DIR, else in the temporary folder. Raises
    UsageError: it belongs to another user, or others may look into it.
    """
    runtime = caller.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"msrun-warm-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(f"--warm: {folder} is not a folder that only you can open; remove it, or set XDG_RUNTIME_DIR")
    return folder


def importing(socket_path: Path) -> Path:
    """Return the name of a warm server's socket until the server has imported."""
    return socket_path.with_suffix(".new")


@contextlib.contextmanager
def address(socket_path: Path) -> Iterator[str]:
    """Give a name to bind or connect to: the path itself may be longer than the 107 bytes that unix(7) takes."""
    folder = os.open(socket_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{socket_path.name}"
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(socket_path: Path, *, waits: bool) -> Iterator[bool]:
    """Hold the lock of one warm server; gives whether it is held, which without waiting it may not be."""
    descriptor = os.open(socket_path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)


ANSWER_S = 5.0  # how long a warm server may take to answer; it may import what an earlier job named
_START = "import os; os.fork() and os._exit(0); "  # it must be nobody's child: the job ends everything below itself


@dataclass(frozen=True)
class WarmStart:
    """What `--warm` asks for."""

    imports: tuple[str, ...]
    """What a warm server imports before it has a job."""
    idle_s: float
    """How long it waits for the next job."""


class WarmProcess(ServerProcess):
    """A fork server that a warm server has forked: no child of this process, and how it has ended it does not learn."""

    wait_status = None

    def __init__(self, pid: int, connection: Channel) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._connection = connection

    def kill(self) -> None:
        """End it at once."""
        for signum in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._descriptor, signum)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, and, where it was killed, what it left; False when that takes longer."""
        end = time.monotonic() + timeout_s
        while not self._connection.is_closed:
            if not await_input(self._connection, end - time.monotonic()):
                return False
            if any(message["type"] == "ended" for message in self._connection.receive()):
                break
        return await_input(self._descriptor, end - time.monotonic())

    def close(self) -> None:
        """Give up the hold on it, once it has ended."""
        self._connection.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def start_warm(
    warm: WarmStart, *, env: Mapping[str, str], working_directory: str, job_id: str, caller: Mapping[str, str]
) -> ForkServerHandle | None:
    """Return a fork server that has imported already, for `begin`; None where no warm server is ready.

    Then one is started beside the job, for the next. Raises UsageError: others could reach the user's warm servers.
    """
    path = warm_folder(caller) / f"{likeness(env, warm.imports, working_directory)}.sock"
    with contextlib.suppress(OSError), locked(path, waits=True):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_S)
        try:
            _connect(connection, path)
        except OSError:  # none, or one that was killed
            connection.close()
            if not _is_importing(path):
                _start_server(path, warm, env, working_directory)
            return None
        return _ask(connection, warm, env, working_directory, job_id)
    return None


def _ask(
    connection: socket.socket, warm: WarmStart, env: Mapping[str, str], working_directory: str, job_id: str
) -> ForkServerHandle | None:
    ours, theirs = socket.socketpair()
    passing, taking = socket.socketpair()
    channel = Channel(connection)
    directory = os.open(working_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        socket.send_fds(connection, [b"f"], [theirs.fileno(), taking.fileno(), directory])
        job = {"job_id": job_id, "agent_pid": os.getpid(), "environment": dict(env), "imports": list(warm.imports)}
        channel.send({"type": "start", **job})
        answer = _answer(channel)
        if answer["type"] == "started":
            ours.settimeout(SEND_S)
            process = WarmProcess(answer["pid"], channel)
            return ForkServerHandle(process, Channel(ours), passing, env, working_directory)
    except OSError:  # it has ended, or still imports; what it forks for us later finds a closed channel
        pass
    finally:
        theirs.close()
        taking.close()
        os.close(directory)
    for one in (ours, passing, channel):
        one.close()
    return None


def _answer(channel: Channel) -> Message:
    while not channel.is_closed:
        for message in channel.receive():
            return message
    return {"type": "gone"}


def _connect(connection: socket.socket, path: Path) -> None:
    with address(path) as name:
        connection.connect(name)


def _is_importing(path: Path) -> bool:
    """Return whether somebody has started this warm server a moment ago."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        _connect(connection, importing(path))
        return True
    return False


def _start_server(path: Path, warm: WarmStart, env: Mapping[str, str], working_directory: str) -> None:
    """Start a warm server that will be found under `path` when it has imported; meanwhile the job runs."""
    importing(path).unlink(missing_ok=True)
    old = os.umask(0o077)
    try:
        listener = socket.socket(socket.AF_UNIX)
        with address(importing(path)) as name:
            listener.bind(name)
    finally:
        os.umask(old)
    listener.listen(64)
    boot = _START + BOOT.format(module="msrun.agent.warm.warm_server")
    words = [ROOT, str(listener.fileno()), str(path), str(warm.idle_s), *warm.imports]
    with listener, path.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", boot, *words],
            env={"PATH": env.get("PATH", os.defpath), **read_at_import(env), contract.MSRUN_JOB_ID: NO_JOB},
            cwd=working_directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    process.wait()


def stop_warm_servers(caller: Mapping[str, str]) -> int:
    """Let every warm server of this user end once its jobs are over; returns how many there were. Raises UsageError:
    others could reach the user's warm servers.
    """
    count = 0
    folder = warm_folder(caller)
    for path in sorted([*folder.glob("*.sock"), *folder.glob("*.new")]):
        with contextlib.suppress(OSError), locked(path, waits=True), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60.0)  # it may still import
            try:
                _connect(connection, path)
            except OSError:  # it was killed
                path.unlink(missing_ok=True)
                continue
            connection.sendall(b"f")
            channel = Channel(connection)
            channel.send({"type": "stop"})
            count += _answer(channel)["type"] == "stopping"
    return count
