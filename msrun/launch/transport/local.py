"""A pipe to an agent on this host: a child process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile

from msrun.agent.processes.process_control import is_stopped
from msrun.errors import ClusterError
from msrun.launch.rehearsal import HostShare

READ_BYTES = 1 << 16
MAX_STDERR_BYTES = 16 * 1024
END_S = 2.0


class LocalPipe:
    """A child process as an agent; see `AgentPipe`."""

    def __init__(self, argv: list[str], address: str, share: HostShare | None = None) -> None:
        """
        Args:
            address: this host's, for the other hosts.
            share: what the agent of a rehearsal may use; None = it has the launcher's environment and processors.

        Raises:
            ClusterError: the interpreter cannot be started.
        """
        self.address = address
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
                env=share.environment if share else None,
                cwd=share.home if share else None,
            )
            if share and share.cpus:  # it waits for what to run, and has started nothing
                os.sched_setaffinity(self._process.pid, share.cpus)
        except OSError as error:
            self._stderr.close()
            raise ClusterError(f"this host: cannot start {argv[0]} ({error.strerror}); see --python") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def read(self) -> bytes:
        """Return the next bytes; empty at the end."""
        try:
            return os.read(self._stdout.fileno(), READ_BYTES)
        except (OSError, ValueError):
            return b""

    def write(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            OSError: the agent has gone.
        """
        try:
            self._stdin.write(data)
            self._stdin.flush()
        except ValueError:  # closed by another thread
            raise BrokenPipeError from None

    def close(self) -> None:
        """Close its stdin, on which the agent ends, and wait a moment for that; one that is stopped is killed."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            if is_stopped(self._process.pid):
                self._process.kill()

    @property
    def exit_status(self) -> int | None:
        """The agent's exit status, 128 + N for signal N; None as long as it runs."""
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
