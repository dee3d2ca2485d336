"""A pipe to an agent on a host, and the command line that starts one: the same whatever the job is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import IO, Protocol

from msrun.agent.processes.process_control import is_stopped, set_open_files
from msrun.errors import ClusterError, refused_as
from msrun.planning.record import Record

# Run by the agent's interpreter. It takes a line "<bytes> <sha256>", then that many bytes of Python, and runs them:
# whatever belongs to the job comes through the pipe, so that no shell ever reads it and no `ps` shows it.
_STEPS = """\
import sys,hashlib
sys.path[:1]==[""] and sys.path.pop(0)
f=open(0,"rb",0,closefd=False)
n,h=(f.readline().split()+[b"0",b""])[:2]
s=b""
while len(s)<int(n):
    d=f.read(int(n)-len(s))
    if not d: sys.exit("msrun agent: the launcher has gone")
    s+=d
if hashlib.sha256(s).hexdigest()==h.decode(): exec(s)
else: sys.exit("msrun agent: what came through the pipe is damaged")
"""
_BOOTSTRAP = f"exec({_STEPS!r})"  # on one line and without an exclamation mark, which a csh would read

MARKER = b"\x00msrun agent 1\x00\n"  # what an agent writes first; anything before it is noise of a login shell
MAX_NOISE_BYTES = 1 << 20


class AgentPipe(Protocol):
    """The way to a running agent, its stdin and stdout. Reading and writing never wait, and belong to one thread."""

    address: str  # numeric address of the host as it is reached from here; empty when that is not known

    def fileno(self) -> int:
        """Return a descriptor that a selector finds readable when `read` is to be called."""

    def read(self) -> bytes | None:
        """Return the next bytes that the agent wrote; empty at the end, None when there are none now."""

    def write(self, data: bytes | memoryview) -> int:
        """Send as many bytes as there is room for now, and return how many (OSError: the other side has gone)."""

    def close(self) -> None:
        """End the pipe, which no selector has any more; may wait a moment."""

    @property
    def exit_status(self) -> int | None:
        """After the end: the agent's exit status, 128 + N for signal N; None when the connection broke. May wait."""
        return None

    def stderr_text(self) -> str:
        """Return the last lines that the agent, or its shell, wrote to stderr."""
        return ""


def agent_argv(interpreter: str) -> list[str]:
    return [interpreter, "-c", _BOOTSTRAP]


LOGIN_LINE = b"msrun login\n"  # what says that the login shell runs; anything before it is noise of that shell
# The shell stays, so that an exit status comes that says by which signal the agent was ended: sshd tells its own client
# of a signal, and ssh passes no more on than that. A signal to all of a session is the agent's to act upon, and what
# the shell says of its end is not what the agent said.
_LOGIN = (
    f'trap : HUP INT TERM; echo "{LOGIN_LINE.decode().strip()}"; exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); exit $?'
)


def agent_command(interpreter: str) -> str:
    """Return the same for a login shell: a constant, but for the interpreter."""
    return f"exec {shlex.join(['/bin/sh', '-c', _LOGIN, 'sh', *agent_argv(interpreter)])}"


def opening(code: bytes) -> bytes:
    """Return what has to go through a new pipe first: the code that the interpreter is to run."""
    return f"{len(code)} {hashlib.sha256(code).hexdigest()}\n".encode() + code


READ_BYTES = 1 << 16
MAX_STDERR_BYTES = 16 * 1024
END_S = 2.0


class FilePipe(AgentPipe):
    """What is read and written as a file, or two: pipes, or a socket."""

    address = ""
    _held = b""  # what was read before

    def __init__(self, reader: IO[bytes] | socket.socket, writer: IO[bytes] | socket.socket) -> None:
        self._reader, self.writer = reader, writer
        for file in (reader, writer):
            os.set_blocking(file.fileno(), False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> bytes | None:
        held, self._held = self._held, b""
        try:
            return held or os.read(self.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def write(self, data: bytes | memoryview) -> int:
        with contextlib.suppress(BlockingIOError):
            return os.write(self.writer.fileno(), data)
        return 0

    def close(self) -> None:
        self._reader.close()
        self.writer.close()


class SocketPipe(FilePipe):
    """One end of a socket pair, or of a connection on this host."""

    def __init__(self, ours: socket.socket | None = None) -> None:
        """Open a pair, of which `_theirs` is for the other side, unless there is a connection: `ours`."""
        if ours is None:
            ours, self._theirs = socket.socketpair()  # who waits for one is woken by its end; not so with pipes
        self._socket = ours
        super().__init__(ours, ours)

    def close(self) -> None:
        self._socket.close()

    def wait_for_login(self, time_left: Callable[[], float], end: int | None = None) -> bool | None:
        """Wait for the line of a login shell, and drop it and what came before; any noise without it is kept.
        `time_left`: seconds. `end`: a descriptor that is readable when nobody is left who would close the other side.
        Returns whether it, or too much noise, has come; False when nothing more will; None when the time was over
        before."""
        watch = select.poll()
        for source in (self._socket, end):
            if source is not None:
                watch.register(source, select.POLLIN)
        noise = b""
        while (left := time_left()) > 0:
            events = watch.poll(left * 1000)
            data = self.read()
            noise += data or b""
            before, line, after = noise.partition(LOGIN_LINE)
            is_noise = len(before) > MAX_NOISE_BYTES
            if line or is_noise or data == b"" or (data is None and events):
                self._held = after if line else noise
                return bool(line) or is_noise
        return None


class ChildPipe(SocketPipe):
    """A child process as an agent, or as what leads to one."""

    def __init__(
        self, argv: list[str], environment: Mapping[str, str] | None = None, folder: str | None = None
    ) -> None:
        """Start it, in a session of its own. Raises OSError: that cannot be done."""
        super().__init__()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - goes with this object: its end is read later
        end, err = self._theirs.fileno(), self._stderr
        try:
            self.process = subprocess.Popen(
                argv, stdin=end, stdout=end, stderr=err, start_new_session=True, env=environment, cwd=folder
            )
        except OSError:
            self._socket.close()
            self._stderr.close()
            raise
        finally:
            self._theirs.close()

    def stderr_text(self) -> str:
        try:
            size = os.fstat(self._stderr.fileno()).st_size
            data = os.pread(self._stderr.fileno(), MAX_STDERR_BYTES, max(0, size - MAX_STDERR_BYTES))
        except (OSError, ValueError):
            return ""
        return data.decode("utf-8", "backslashreplace")


class HostShare(Record):
    """One rehearsed host's part of this machine."""

    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()  # processors of its agent and all that it starts; empty = all

    @property
    def home(self) -> str:
        home = self.environment.get("HOME", "")
        return home if home and Path(home).is_dir() else "/"


class LocalPipe(ChildPipe):
    """An agent on this host."""

    def __init__(self, argv: list[str], address: str, share: HostShare | None = None, open_files: int = 0) -> None:
        """`address`: this host's, for the other hosts. `open_files`: how many files the agent may open, as after a
        login; 0 = as many as this process. `share`: what the agent of a rehearsal may use; None = it has the launcher's
        environment and processors. Raises ClusterError: the interpreter cannot be started."""
        self._is_rehearsed, self._is_closed = share is not None, False
        with refused_as(f"this host: cannot start {argv[0]}", "see --python", ClusterError):
            super().__init__(argv, share.environment if share else None, share.home if share else None)
            if open_files:  # it waits for what to run, and has started nothing
                set_open_files(open_files, self.process.pid)
            if share and share.cpus:
                os.sched_setaffinity(self.process.pid, share.cpus)
        self.address = address

    def close(self) -> None:
        """End the connection and wait for the agent's end; a stopped one is killed, but not that of a rehearsal."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            if not self._is_rehearsed and is_stopped(self.process.pid):
                self.process.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def exit_status(self) -> int | None:
        """None, too, as long as it runs, and for a rehearsal whose connection was ended here, as over SSH."""
        if self._is_rehearsed and self._is_closed:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(END_S)
            return code if code >= 0 else 128 - code
        return None
