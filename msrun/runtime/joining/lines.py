"""Messages of the meeting: one JSON object in a line, of limited length, over a stream socket."""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_BYTES = 64 * 1024


class LineStream:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._bytes = b""

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; False when the other end has gone or does not read."""
        try:
            self.socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have become complete; None at the end of the stream. Waits for bytes.

        Raises:
            ValueError: this is no message, or one that is too long.
            TimeoutError: nothing has come within the time-out of the socket.
        """
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            data = b""  # with ETIMEDOUT the other host is silent, whatever the time-out of the socket
        if not data:
            return None
        *lines, self._bytes = (self._bytes + data).split(b"\n")
        if max(map(len, [*lines, self._bytes])) > MAX_BYTES:
            raise ValueError(f"a message of more than {MAX_BYTES} bytes")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError("no message of JSON") from None
            if not isinstance(message, dict):
                raise ValueError(f"a JSON {type(message).__name__}, not an object")
            messages.append(message)
        return messages

    def watch_for_silence(self, seconds: int) -> None:
        """Have the connection break when the other host is silent for so long: cut off, asleep or gone."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, max(1, seconds // 3)),
            (socket.TCP_KEEPINTVL, max(1, seconds // 6)),
            (socket.TCP_USER_TIMEOUT, seconds * 1000),  # counts for what the two above send, too
        ):
            self.socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
