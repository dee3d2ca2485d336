"""One connection between a host and the scheduler: whole bodies over TCP, and nobody ever waits for the other side.

The first words of each side, and a refusal, are plain; everything else comes after them and is sealed (`proof`).
"""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import TYPE_CHECKING

from msrun.cluster.messages import (
    MAX_MESSAGE_BYTES,
    FrameBuffer,
    Message,
    NotUnderstood,
    decode_body,
    encode_body,
    frame,
)
from msrun.cluster.proof import PROOF_BYTES, Seal

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls import TlsSession

MAX_GREETING_BYTES = 8 * 1024
"""Of what somebody says who has not proved anything."""
MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES
"""The other side reads nothing: it is given up."""
READ_BYTES = 1 << 16
TLS_RECORDS = range(20, 25)
"""First byte of what a side that speaks TLS says (RFC 8446, 5.1); a message of ours would be far too long."""
SAME_EVERYWHERE = "give --tls_config on all hosts, or on none"


class Connection:
    """Owned by one thread. What cannot be sent at once is kept and sent by `flush`."""

    def __init__(self, stream: socket.socket, tls: TlsSession | None = None) -> None:
        """`tls`: what everything goes through; None = as it is."""
        stream.settimeout(0.0)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = stream
        self._buffer = FrameBuffer(MAX_GREETING_BYTES)
        self._seal: Seal | None = None
        self._unsent = bytearray()
        self._tls = tls
        self._is_first = True
        """Nothing has come yet."""
        self._most = 1
        """So many bodies are read at a time."""
        self.is_closed = False
        """The other side is gone, or `close` was called."""

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

    def agree(self, seal: Seal) -> None:
        """Prove every message from now on, and open no other."""
        self._seal = seal

    def trust(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Take long messages from now on: the other side has proved who it is."""
        self._buffer.max_bytes = max_bytes + PROOF_BYTES
        self._most = sys.maxsize

    def send_plain(self, body: bytes) -> None:
        """Send words that prove nothing."""
        self._send(frame(body))

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as can be sent now."""
        self.send_body(encode_body(message))

    def send_body(self, body: bytes) -> None:
        """Send bytes with their proof."""
        assert self._seal is not None, "nothing is said before the other side's nonce is known"
        self._send(frame(self._seal.close(body)))

    def open(self, body: bytes) -> Message:
        """Return the message in a body that has come; it is looked at once its proof holds. Raises NotProved: it is not
        from one who knows the token. Raises ValueError: it is no message.
        """
        return decode_body(self.unseal(body))

    def unseal(self, body: bytes) -> bytes:
        """Return what is in a body that has come, once its proof holds. Raises NotProved: it is not from one who knows
        the token.
        """
        assert self._seal is not None, "nothing can be proved before the other side's nonce is known"
        return self._seal.open(body)

    def _send(self, data: bytes) -> None:
        if self._tls is None:
            self._unsent += data
        else:
            self._tls.send(data)
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.is_closed = True

    def flush(self) -> None:
        """Send what is left, as far as it goes."""
        if self._tls is not None:
            self._unsent += self._tls.take()
        while self._unsent and not self.is_closed:
            try:
                count = self._socket.send(self._unsent[: 1 << 20])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # it has gone; what it has said before is still to be read, and then the end
                count = len(self._unsent)
            del self._unsent[:count]

    def receive(self) -> list[bytes]:
        """Return whole bodies that have come; sets `is_closed` at the end of the stream.

        Until the other side is trusted it is one at a time: what that one leads to decides who reads the next, and how
        long that may be. Raises ValueError: what came is too long. Raises NotUnderstood: the other side speaks TLS and
        this one does not, the reverse, or it is not let in.
        """
        if waiting := self._buffer.feed(b"", self._most):
            return waiting
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return []
        return self._buffer.feed(self._plain(data), self._most)

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
