"""SshPipe: an agent's stdin and stdout over a channel of an SSH connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from msrun.launch.transport.ssh.paramiko_names import paramiko

READ_BYTES = 1 << 16
MAX_STDERR_BYTES = 16 * 1024
END_S = 2.0
"""How long the status of an agent may take to come after the end of its output."""
SIGNALS = {"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "ABRT": 6, "FPE": 8, "KILL": 9, "USR1": 10, "SEGV": 11, "USR2": 12}
SIGNALS |= {"PIPE": 13, "ALRM": 14, "TERM": 15}
"""Names of RFC 4254, 6.10, with the numbers of Linux."""


class SshPipe:
    """A running agent; see `AgentPipe`. One thread reads, one writes, any may close."""

    def __init__(self, channel: Any, address: str, end: Callable[[], None]) -> None:
        """
        Args:
            end: ends the connection.
        """
        self.address = address
        self._channel = channel
        self._end = end
        self._lock = threading.Lock()
        self._stderr = b""
        # One event for both streams: what comes on stderr has to be taken, too, for they share one window.
        self._has_come = threading.Event()
        channel.in_buffer.set_event(self._has_come)
        channel.in_stderr_buffer.set_event(self._has_come)

    def read(self) -> bytes:
        """Return the next bytes; empty at the end."""
        while True:
            has_ended = self._channel.eof_received or self._channel.closed
            self._take_stderr()
            if self._channel.recv_ready():
                data: bytes = self._channel.recv(READ_BYTES)
                return data
            if has_ended:
                return b""
            self._has_come.wait()

    def write(self, data: bytes) -> None:
        """Send bytes; waits until they are on their way.

        Raises:
            OSError: the agent or the connection has gone.
        """
        try:
            self._channel.sendall(data)
        except (EOFError, paramiko.SSHException) as error:
            raise BrokenPipeError(str(error)) from None

    def close(self) -> None:
        """End the connection; on that, the agent ends."""
        self._end()

    @property
    def exit_status(self) -> int | None:
        """The agent's exit status, 128 + N for signal N; None while it runs, or when the connection broke."""
        self._channel.status_event.wait(END_S)
        name = getattr(self._channel, "exit_signal", "")
        if name:
            return 128 + SIGNALS[name] if name in SIGNALS else None
        status = int(self._channel.exit_status)
        return status if status >= 0 else None

    def stderr_text(self) -> str:
        """Return the end of what agent and shell wrote to stderr."""
        self._take_stderr()
        return self._stderr.decode("utf-8", "backslashreplace")

    def _take_stderr(self) -> None:
        with self._lock:
            while self._channel.recv_stderr_ready():
                self._stderr = (self._stderr + self._channel.recv_stderr(READ_BYTES))[-MAX_STDERR_BYTES:]
