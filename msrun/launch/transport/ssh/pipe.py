"""SshPipe: an agent's stdin and stdout over a channel of an SSH connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from msrun.launch.transport.pipe import ReadyFlag
from msrun.launch.transport.ssh.paramiko_names import paramiko

READ_BYTES = 1 << 16
PIECE_BYTES = 1 << 14
"""Written at once after a look whether there is room: what a socket takes then without waiting."""
MAX_STDERR_BYTES = 16 * 1024
END_S = 2.0
"""How long the status of an agent may take to come after the end of its output."""
SIGNALS = {"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "ABRT": 6, "FPE": 8, "KILL": 9, "USR1": 10, "SEGV": 11, "USR2": 12}
SIGNALS |= {"PIPE": 13, "ALRM": 14, "TERM": 15}
"""Names of RFC 4254, 6.10, with the numbers of Linux."""


class SshPipe:
    """A running agent; see `AgentPipe`."""

    tells_room = False
    """paramiko tells nobody when a window opens."""

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
        self._flag = ReadyFlag()
        # One flag for both streams: what comes on stderr has to be taken, too, for they share one window. paramiko
        # would take it back when one of them is empty.
        arrivals = SimpleNamespace(set=self._flag.set, clear=lambda: None)
        channel.in_buffer.set_event(arrivals)
        channel.in_stderr_buffer.set_event(arrivals)

    def fileno(self) -> int:
        """Return the descriptor of a flag."""
        return self._flag.fileno()

    def read(self) -> bytes | None:
        """Return the next bytes; empty at the end, None when there are none now."""
        self._flag.clear()
        has_ended = self._channel.eof_received or self._channel.closed
        if not has_ended and not self._channel.transport.has_room():  # to say that there is room for more
            self._flag.set()
            return None
        self._take_stderr()
        if self._channel.recv_ready():
            data: bytes = self._channel.recv(READ_BYTES)
            if has_ended or self._channel.recv_ready():
                self._flag.set()
            return data
        return b"" if has_ended else None

    def write(self, data: bytes | memoryview) -> int:
        """Send as many bytes as the window and the connection have room for.

        Raises:
            OSError: the agent or the connection has gone.
        """
        count = 0
        try:
            while count < len(data) and self._channel.send_ready() and self._channel.transport.has_room():
                sent = self._channel.send(bytes(data[count : count + PIECE_BYTES]))
                if not sent:
                    raise BrokenPipeError("the agent takes no more")
                count += sent
        except (EOFError, paramiko.SSHException) as error:
            raise BrokenPipeError(str(error)) from None
        return count

    def close(self) -> None:
        """End the connection; on that, the agent ends."""
        self._end()
        self._flag.close()

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
