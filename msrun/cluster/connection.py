"""One connection between a host and the scheduler: messages over TCP, and nobody ever waits for the other side."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

from msrun.cluster.messages import MAX_MESSAGE_BYTES, Message, MessageBuffer, NotUnderstood, encode_message

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls.session import TlsSession

MAX_GREETING_BYTES = 16 * 1024
"""Of a message from somebody who has not proved anything."""
READ_BYTES = 1 << 16
TLS_RECORDS = range(20, 25)
"""First byte of what a side that speaks TLS says (RFC 8446, 5.1); a message of ours would be far too long."""
SAME_EVERYWHERE = "give --tls_config on all hosts, or on none"


class Connection:
    """Owned by one thread. What cannot be sent at once is kept and sent by `flush`."""

    def __init__(
        self, stream: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES, tls: TlsSession | None = None
    ) -> None:
        """
        Args:
            max_bytes: of a message from the other side, as long as it is not trusted.
            tls: what everything goes through; None = as it is.
        """
        stream.settimeout(0.0)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = stream
        self._buffer = MessageBuffer(max_bytes)
        self._unsent = bytearray()
        self._tls = tls
        self._is_first = True
        """Nothing has come yet."""
        self.is_closed = False
        """The other side is gone, or `close` was called."""
        self.heard_at = time.monotonic()
        """When the other side last gave a sign of life."""

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when the socket can be written."""
        return bool(self._unsent) and not self.is_closed

    @property
    def tls_version(self) -> str:
        """What protects the connection, e.g. TLSv1.3; empty for nothing."""
        return self._tls.version if self._tls else ""

    def trust(self) -> None:
        """Take long messages from now on: the other side has proved who it is."""
        self._buffer.max_bytes = MAX_MESSAGE_BYTES

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as can be sent now."""
        self.send_bytes(encode_message(message))

    def send_bytes(self, data: bytes) -> None:
        """Send a message that was encoded before, for many."""
        if self._tls is None:
            self._unsent += data
        else:
            self._tls.send(data)
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as it goes."""
        if self._tls is not None:
            self._unsent += self._tls.take()
        while self._unsent and not self.is_closed:
            try:
                count = self._socket.send(self._unsent[: 1 << 20])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.is_closed = True
                return
            del self._unsent[:count]

    def receive(self) -> list[Message]:
        """Return whole messages that have come; sets `is_closed` at the end of the stream.

        Raises:
            ValueError: what came is no message, or too long.
            NotUnderstood: the other side speaks TLS and this one does not, the reverse, or it is not let in.
        """
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return []
        self.heard_at = time.monotonic()
        return self._buffer.feed(self._plain(data))

    def _plain(self, data: bytes) -> bytes:
        if self._is_first:
            self._is_first = False
            self._check_speech(speaks_tls=data[0] in TLS_RECORDS)
        if self._tls is None:
            return data
        try:
            return self._tls.receive(data)
        finally:  # an answer, or why it was refused
            self.flush()

    def _check_speech(self, *, speaks_tls: bool) -> None:
        if speaks_tls and self._tls is None:
            raise NotUnderstood(f"it speaks TLS; {SAME_EVERYWHERE}")
        if not speaks_tls and self._tls is not None:
            self._tls = None  # so that it understands the refusal
            raise NotUnderstood(f"it does not speak TLS; {SAME_EVERYWHERE}")

    def close(self) -> None:
        """Close the connection; what was not sent is lost."""
        if self._tls is not None and not self.is_closed:
            self._tls.end()
            self.flush()
        self.is_closed = True
        self._socket.close()
