"""A pipe to an agent on this host: a child process, and a socket that is its stdin and stdout."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile

from msrun.agent.open_files import set_open_files
from msrun.agent.processes.process_control import is_stopped
from msrun.errors import ClusterError
from msrun.launch.rehearsal import HostShare

READ_BYTES = 1 << 16
MAX_STDERR_BYTES = 16 * 1024
END_S = 2.0


class LocalPipe:
    """A child process as an agent; see `AgentPipe`."""

    tells_room = True

    def __init__(self, argv: list[str], address: str, share: HostShare | None = None, open_files: int = 0) -> None:
        """
        Args:
            address: this host's, for the other hosts.
            open_files: how many files the agent may open, as after a login; 0 = as many as this process.
            share: what the agent of a rehearsal may use; None = it has the launcher's environment and processors.

        Raises:
            ClusterError: the interpreter cannot be started.
        """
        self.address = address
        self._is_rehearsed = share is not None
        self._is_closed = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - goes with this object: its end is read later
        self._socket, theirs = socket.socketpair()  # not pipes: who waits for one of those is not woken by its end
        self._socket.settimeout(0.0)
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                start_new_session=True,
                env=share.environment if share else None,
                cwd=share.home if share else None,
            )
            if open_files:  # it waits for what to run, and has started nothing
                set_open_files(open_files, self._process.pid)
            if share and share.cpus:
                os.sched_setaffinity(self._process.pid, share.cpus)
        except OSError as error:
            self._socket.close()
            self._stderr.close()
            raise ClusterError(f"this host: cannot start {argv[0]} ({error.strerror}); see --python") from None
        finally:
            theirs.close()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def read(self) -> bytes | None:
        """Return the next bytes; empty at the end, None when there are none now."""
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def write(self, data: bytes | memoryview) -> int:
        """Send as many bytes as there is room for.

        Raises:
            OSError: the agent has gone.
        """
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """End the connection, on which the agent ends, and wait a moment for that; one that is stopped is killed.

        Not in a rehearsal, in which it may have another connection: closing one over SSH ends no agent either.
        """
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            if not self._is_rehearsed and is_stopped(self._process.pid):
                self._process.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def exit_status(self) -> int | None:
        """The agent's exit status, 128 + N for signal N; None as long as it runs.

        Of a rehearsal None, too, when the connection was ended here, as over SSH.
        """
        if self._is_rehearsed and self._is_closed:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_S)
            return code if code >= 0 else 128 - code
        return None

    def stderr_text(self) -> str:
        """Return the end of its stderr."""
        try:
            size = os.fstat(self._stderr.fileno()).st_size
            data = os.pread(self._stderr.fileno(), MAX_STDERR_BYTES, max(0, size - MAX_STDERR_BYTES))
        except (OSError, ValueError):
            return ""
        return data.decode("utf-8", "backslashreplace")
