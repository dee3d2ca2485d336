"""Warm servers: processes that have imported already, kept between jobs, and fork the fork server of the next one.

A job asks one that is like it for a fork server, or starts one for next time. A warm server holds nothing of a job.
Where what it has forked is killed, the agent ends what that has left, by the job's mark.

Protocol, over its socket, one connection a job, which stays as the channel to the fork server that was forked:
    agent -> warm server   one byte, with the descriptor of the fork server's passing socket; then
                           start {job_id, agent_pid, environment, imports, directory}, or stop {}
    warm server -> agent   started {pid};   stale {path};   stopping {}"""

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
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msrun import contract
from msrun.agent.own_file import socket_address, text_of
from msrun.agent.processes.process_control import NO_JOB, end_job
from msrun.agent.processes.server_handle import BOOT, ROOT, SEND_S, ForkServerHandle, ServerProcess
from msrun.cluster.messages import Channel, Message, await_input
from msrun.errors import UsageError
from msrun.planning.environment import SET_LATE
from msrun.planning.record import Record

if TYPE_CHECKING:
    from msrun.agent.processes.main_module import Main

_READ_AT_IMPORT = re.compile(
    r"(?:PYTHON|LD_|MALLOC|GLIBC|OMP_|GOMP_|KMP_|MKL_|OPENBLAS|BLIS_|NUMEXPR|TORCH|PYTORCH|ATEN|C10|CUDA|NVIDIA|NCCL|"
    r"ASCEND|HCCL|NPU|GLOO|TP_|XPU|TRITON|LC_)|(?:LANG|TZ|HOME|USER|LOGNAME|VIRTUAL_ENV|SOURCE_DATE_EPOCH)\Z"
)  # names, or their beginnings, of variables that the interpreter, the C library and torch read when they are loaded
_KEPT_STATUS = ("Umask:", "Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp:", "Mems_allowed:")
"""Lines of /proc/self/status that a child inherits."""


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that have their effect at import."""
    return {name: value for name, value in env.items() if _READ_AT_IMPORT.match(name) and name not in SET_LATE}


def likeness(env: Mapping[str, str], imports: Sequence[str], working_directory: str) -> str:
    """Return a word that is equal for two jobs, by the fork server's `env`, when one warm server can serve both."""
    search = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    limits = {name for name in dir(resource) if name.startswith("RLIMIT_")} - {"RLIMIT_NOFILE", "RLIMIT_OFILE"}
    namespaces = sorted(Path("/proc/self/ns").iterdir()) if Path("/proc/self/ns").is_dir() else []
    value = {
        "python": [sys.version, sys.executable, sys.prefix],
        "code": str(Path(__file__).parents[1]),
        "packages": sorted({name.partition(":")[0].partition(".")[0] for name in imports}),
        "environment": read_at_import(env),
        "directory": working_directory if any(not Path(part).is_absolute() for part in search) else "",
        "status": [line for line in text_of("/proc/self/status").splitlines() if line.startswith(_KEPT_STATUS)],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in sorted(limits)},
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # the hard limit; the soft one is each job's own
        "cores": sorted(os.sched_getaffinity(0)),
        "priority": [
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getscheduler(0),
            *text_of("/proc/self/oom_score_adj").splitlines(),
        ],
        "control groups": text_of("/proc/self/cgroup").splitlines(),
        "namespaces": [str(one.readlink()) for one in namespaces if not one.name.endswith("_for_children")],
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:16]


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
    """Return the folder, made where it was not there (UsageError: others may look into it, or it is another's)."""
    runtime = caller.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"msrun-warm-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(f"--warm: {folder} is not a folder that only you can open; remove it, or set XDG_RUNTIME_DIR")
    return folder


def _importing(path: Path) -> Path:
    return path.with_suffix(".new")


@contextlib.contextmanager
def locked(path: Path, *, waits: bool) -> Iterator[bool]:
    """Hold the lock of one warm server; gives whether it is held, which without waiting it may not be."""
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_held = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)


# -- a job that asks --------------------------------------------------------------------------------------------------

ANSWER_S = 5.0  # how long a warm server may take to answer; it may import what an earlier job named
_START = "import os; os.fork() and os._exit(0); "  # it must be nobody's child: the job ends everything below itself


class WarmStart(Record):
    """What `--warm` asks for."""

    imports: tuple[str, ...]  # what a warm server imports before it has a job
    idle_s: float  # how long it waits for the next job


class WarmProcess(ServerProcess):
    """A fork server that a warm server has forked: no child of this process, and how it has ended it does not learn."""

    wait_status = None

    def __init__(self, pid: int, job_id: str) -> None:
        self.pid, self._job_id, self._was_killed = pid, job_id, False
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it at once, also one that has ended: then what it has left ends, too."""
        self._was_killed = True
        for signum in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._descriptor, signum)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, and end what it left where it was killed; False when it has not ended in time."""
        if not await_input(self._descriptor, timeout_s):
            return False
        if self._was_killed:  # an orderly end leaves nothing, and other hosts of a rehearsal have the same mark
            end_job(self._job_id)
        return True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def start_warm(
    warm: WarmStart, *, env: Mapping[str, str], working_directory: str, job_id: str, caller: Mapping[str, str]
) -> ForkServerHandle | None:
    """Return a fork server that has imported already; else None, and one is started for next time (UsageError)."""
    path = warm_folder(caller) / f"{likeness(env, warm.imports, working_directory)}.sock"
    with contextlib.suppress(OSError), locked(path, waits=True), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        if not _connect(connection, path):  # none, or one that was killed
            with socket.socket(socket.AF_UNIX) as other:  # somebody may have started one a moment ago
                if not _connect(other, _importing(path)):
                    _start_server(path, warm, env, working_directory)
            return None
        return _ask(connection, warm, env, working_directory, job_id)
    return None


def _ask(
    connection: socket.socket, warm: WarmStart, env: Mapping[str, str], working_directory: str, job_id: str
) -> ForkServerHandle | None:
    """Raises OSError: it has ended, or still imports."""
    passing, taking = socket.socketpair()
    with taking, contextlib.ExitStack() as stack:
        stack.enter_context(passing)
        socket.send_fds(connection, [b"f"], [taking.fileno()])
        talking = stack.enter_context(connection.dup())
        channel = Channel(talking)
        job = {"job_id": job_id, "agent_pid": os.getpid(), "environment": dict(env), "imports": list(warm.imports)}
        channel.send({"type": "start", "directory": working_directory, **job})
        answer = _answer(channel)
        if answer["type"] != "started":
            return None
        talking.settimeout(SEND_S)
        server = ForkServerHandle(WarmProcess(answer["pid"], job_id), channel, passing, env, working_directory)
        stack.pop_all()
        return server


def _answer(channel: Channel) -> Message:
    while not channel.is_closed:
        for message in channel.receive():
            return message
    return {"type": "gone"}


def _connect(connection: socket.socket, path: Path) -> bool:
    with contextlib.suppress(OSError), socket_address(path) as name:
        connection.connect(name)
        return True
    return False


def _start_server(path: Path, warm: WarmStart, env: Mapping[str, str], working_directory: str) -> None:
    """Start a warm server that will be found under `path` when it has imported; meanwhile the job runs."""
    _importing(path).unlink(missing_ok=True)
    old = os.umask(0o077)
    try:
        listener = socket.socket(socket.AF_UNIX)
        with socket_address(_importing(path)) as name:
            listener.bind(name)
    finally:
        os.umask(old)
    listener.listen(64)
    boot = _START + BOOT.format(module="msrun.agent.warm")
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
    """Let every warm server of this user end once its jobs are over; returns how many (UsageError)."""
    count = 0
    folder = warm_folder(caller)
    for path in sorted([*folder.glob("*.sock"), *folder.glob("*.new")]):
        with contextlib.suppress(OSError), locked(path, waits=True), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60.0)  # it may still import
            if not _connect(connection, path):  # it was killed
                path.unlink(missing_ok=True)
                continue
            connection.sendall(b"f")
            channel = Channel(connection)
            channel.send({"type": "stop"})
            count += _answer(channel)["type"] == "stopping"
    return count


# -- the server -------------------------------------------------------------------------------------------------------

ASK_S = 5.0  # how long who has connected may take to say what it wants
_CREDENTIALS = struct.Struct("3i")


Become = Callable[[], "Main"]


def become_server(job: Message, channel: Channel, passing_fd: int) -> Main:
    """Turn this freshly forked process into a job's fork server, and serve; returns in a worker."""
    from msrun.agent.processes.child import name_process, set_environment
    from msrun.agent.processes.fork_server import serve_job

    os.setsid()
    os.chdir(job["directory"])
    set_environment({**dict.fromkeys(os.environ), **job["environment"]})
    tempfile.tempdir = None  # may be another one for this job
    name_process("msrun: fork server")
    return serve_job(channel, job["agent_pid"], socket.socket(fileno=passing_fd))


class WarmServer:
    """Loop of a warm server: imports once, then forks the fork server of every job that asks, until nobody has for a
    while. `serve` returns in a forked child, with what that is to become, and ends as None in the server."""

    def __init__(self, listener: socket.socket, path: Path, idle_s: float, imports: Sequence[str]) -> None:
        """`imports`: what it has imported already."""
        self._listener, self._path, self._idle_s = listener, path, idle_s
        self._imported = set(imports)
        self._files = loaded_files()
        self._ends_at = time.monotonic() + idle_s
        self.is_ending = False  # it takes no more jobs: whoever asks next starts another one

    def serve(self) -> Become | None:
        """Work through requests until stopped, stale or idle for long; a job that runs holds it."""
        signal.signal(signal.SIGCHLD, self._on_child)
        while not self.is_ending:
            self._listener.settimeout(max(0.0, self._ends_at - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except (TimeoutError, BlockingIOError):
                self.end_when_idle(has_jobs=_has_children())
                continue
            if (become := self._take(connection)) is not None:
                return become
        self._listener.close()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        return None

    def _on_child(self, _signum: int, _frame: object) -> None:
        self.end_when_idle(has_jobs=True)  # it is idle from this moment on
        _has_children()

    def end_when_idle(self, *, has_jobs: bool) -> None:
        if has_jobs:
            self._ends_at = time.monotonic() + self._idle_s
        elif time.monotonic() >= self._ends_at and not self.is_ending:
            with locked(self._path, waits=False) as is_held:  # else somebody is about to ask
                if is_held:
                    self._leave()

    def _leave(self) -> None:
        self.is_ending = True
        self._path.unlink(missing_ok=True)

    def _take(self, connection: socket.socket) -> Become | None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        channel = Channel(connection)
        descriptors: list[int] = []
        become: Become | None = None
        try:
            if _CREDENTIALS.unpack(credentials)[1] == os.geteuid():
                connection.settimeout(ASK_S)
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
                become = self._serve_one(_answer(channel), connection, channel, descriptors)
        except (OSError, ValueError, LookupError) as error:  # it has gone, or is no msrun
            print(f"a request was not understood: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
        if become is None:  # in the child they are in use
            channel.close()
            for descriptor in descriptors:
                os.close(descriptor)
        return become

    def _serve_one(
        self, message: Message, connection: socket.socket, channel: Channel, descriptors: list[int]
    ) -> Become | None:
        if message["type"] == "stop":
            self._leave()
            channel.send({"type": "stopping"})
        elif message["type"] == "start" and ((changed := changed_file(self._files)) or self.is_ending):
            channel.send({"type": "stale", "path": changed})
            self._leave()
        elif message["type"] == "start":
            become = partial(become_server, message, channel, *descriptors)
            more = [name for name in message["imports"] if name not in self._imported]
            pid = os.fork()
            if pid == 0:
                self._listener.close()
                connection.settimeout(None)
                return become
            channel.send({"type": "started", "pid": pid})
            if more:  # for the next one, what this job has to import itself
                self._imported.update(more)
                if not import_all(more):
                    self._leave()
                self._files = loaded_files()
        return None


def _has_children() -> bool:
    """Collect children that have ended; returns whether others live."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def import_all(names: Sequence[str]) -> bool:
    from msrun.agent.processes.fork_server import collection_paused, forget_finalizers, fork_safety, preload

    with collection_paused():
        preload([*names])
    forget_finalizers()
    method, reason = fork_safety()
    if method != "fork":
        print(f"no warm server: {reason}", file=sys.stderr, flush=True)  # noqa: T201 - the log
    return method == "fork"


def main() -> Main:
    """Entry point, which returns in a worker. argv: listening descriptor, path of the socket, idle seconds, imports."""
    from msrun.agent.processes.child import name_process
    from msrun.agent.processes.process_control import adopt_orphans

    listener_fd, path, idle_s, imports = int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]
    os.setsid()
    name_process("msrun: warm server")
    adopt_orphans()
    if not import_all(imports):
        _importing(path).unlink(missing_ok=True)
        sys.exit(1)
    os.chdir("/")
    _importing(path).rename(path)
    become = WarmServer(socket.socket(fileno=listener_fd), path, idle_s, imports).serve()
    if become is None:
        os._exit(0)
    return become()
