"""One connection between a host and the scheduler: whole bodies over TCP, and nobody ever waits for the other side. And
how the two come to know each other, before anything else is said.

    both          hello with a nonce, in the clear
    host          register {request}                sealed (`proof`): it proves that it knows the token
    scheduler     accepted {silence_s}, sealed, or in the clear why the host is refused

After `accepted` the connection carries a stream of bytes in sealed records, by `read` and `write`.

Host and scheduler prove with every message that they know the job's token, without sending it. Each side begins with a
random nonce. Token and both nonces make two keys, one for each direction, and from then on every message carries an
HMAC-SHA256 of its number and its bytes. So nothing is looked at that was not proved first, and a message is good for
one connection, one direction and one place in the order. The token is the user's (`--token_file`, MSRUN_TOKEN), or a
random one that the scheduler's host leaves in the log directory for those that share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from msrun.cluster.hosts import WRONG_KEY, HostRequest, NoKey, Refused
from msrun.cluster.messages import (
    MAX_MESSAGE_BYTES,
    FrameBuffer,
    Message,
    NotUnderstood,
    decode_body,
    encode_body,
    frame,
)
from msrun.cluster.protocol import protocol
from msrun.planning.record_json import encode_record

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls import TlsSession

MAX_GREETING_BYTES = 8 * 1024  # of what somebody says who has not proved anything
RECORD_BYTES = 1 << 17
MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES  # the other side reads nothing: it is given up
READ_BYTES = 1 << 16
TLS_RECORDS = range(20, 25)
"""First byte of what a side that speaks TLS says (RFC 8446, 5.1); a message of ours would be far too long."""
SAME_EVERYWHERE = "give --tls_config on all hosts, or on none"


PROOF_BYTES = hashlib.sha256().digest_size
_CLIENT, _SERVER = b"msrun host", b"msrun scheduler"
_NUMBER = struct.Struct("!Q")
_HELLO = re.compile(rb'\{"type":"hello","protocol":([0-9]{1,9}),"nonce":"([0-9a-f]{64})"\}')
"""JSON, which an older msrun reads; here it is not parsed, for it comes from anybody."""


class NotProved(ValueError):
    """A message is not from one who knows the token, or is not the next of this connection."""


def token_of_servers(token: str, job_id: str) -> str:
    """Return what the workers and parameter servers of one job know each other by, of the hosts' token."""
    return hmac.digest(token.encode(), f"msrun parameter servers {job_id}".encode(), "sha256").hex()


def new_nonce() -> str:
    """Return 32 random bytes as text."""
    return secrets.token_hex(32)


def hello(nonce: str) -> bytes:
    return f'{{"type":"hello","protocol":{protocol()},"nonce":"{nonce}"}}'.encode()


def read_hello(body: bytes) -> tuple[int, str] | None:
    """Return protocol and nonce of the other side's first words; None when they are something else."""
    match = _HELLO.fullmatch(body)
    return (int(match[1]), match[2].decode()) if match else None


class Seal:
    """Closes what one side of one connection says, and opens what it hears."""

    def __init__(self, token: bytes, scheduler_nonce: str, host_nonce: str, *, is_scheduler: bool) -> None:
        nonces = f"{scheduler_nonce}{host_nonce}".encode()
        keys = [hmac.digest(token, side + b"\0" + nonces, "sha256") for side in (_CLIENT, _SERVER)]
        self._in_key, self._out_key = keys if is_scheduler else reversed(keys)
        self._sent = self._received = 0

    def close(self, body: bytes) -> bytes:
        self._sent += 1
        return _proof(self._out_key, self._sent, body) + body

    def open(self, data: bytes) -> bytes:
        """Return the next message of the other side without its proof. Raises NotProved: it is not from there."""
        proof, body = data[:PROOF_BYTES], data[PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._in_key, self._received + 1, body)):
            raise NotProved("a message without the proof that it is the next of this connection")
        self._received += 1
        return body


def _proof(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + body, "sha256")


class Connection:
    """Owned by one thread. What cannot be sent at once is kept and sent by `flush`. Past its greeting it is a pipe to
    an agent, or to the launcher: see `launch.transport.pipe.AgentPipe`."""

    address = ""  # numeric, of the other side
    exit_status = None
    fault = ""  # why what has come cannot be read; empty while it can

    def __init__(self, stream: socket.socket, tls: TlsSession | None = None) -> None:
        """`tls`: what everything goes through; None = as it is."""
        stream.settimeout(0.0)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._tls = stream, tls
        self._buffer = FrameBuffer(MAX_GREETING_BYTES)
        self._seal: Seal | None = None
        self._unsent = bytearray()
        self._is_first = True  # nothing has come yet
        self._most = 1  # so many bodies are read at a time
        self.is_closed = False  # the other side is gone, or `close` was called
        self._in_flight = 0  # so many bytes that were given to `write` are in a record that is not all sent

    def fileno(self) -> int:
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
        self._seal = seal

    def trust(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Take long messages from now on: the other side has proved who it is."""
        self._buffer.max_bytes = max_bytes + PROOF_BYTES
        self._most = sys.maxsize

    def send(self, message: Message) -> None:
        """Send a message with its proof, or as much of it as can be sent now."""
        self.send_body(encode_body(message))

    def send_body(self, body: bytes) -> None:
        assert self._seal is not None, "nothing is said before the other side's nonce is known"
        self.send_plain(self._seal.close(body))

    def send_plain(self, body: bytes) -> None:
        if self._tls is None:
            self._unsent += frame(body)
        else:
            self._tls.send(frame(body))
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.is_closed = True

    def flush(self) -> None:
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
        """Return whole bodies that have come; sets `is_closed` at the end of the stream. Until the other side is
        trusted it is one at a time: what that one leads to decides who reads the next, and how long that may be. Raises
        ValueError: what came is too long. Raises NotUnderstood: the other side speaks TLS and this one does not, the
        reverse, or it is not let in."""
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
        speaks_tls = data[0] in TLS_RECORDS if self._is_first else self._tls is not None
        self._is_first = False
        if speaks_tls and self._tls is None:
            raise NotUnderstood(f"it speaks TLS; {SAME_EVERYWHERE}")
        if not speaks_tls and self._tls is not None:
            self._tls = None  # so that it understands the refusal
            raise NotUnderstood(f"it does not speak TLS; {SAME_EVERYWHERE}")
        if self._tls is not None:
            try:
                data = self._tls.receive(data)
            finally:  # an answer, or why it was refused
                self.flush()
        return self._buffer.feed(data, self._most)

    def unseal(self, body: bytes) -> bytes:
        """Return what is in a body that has come. Raises NotProved: it is not from one who knows the token."""
        assert self._seal is not None, "nothing can be proved before the other side's nonce is known"
        return self._seal.open(body)

    def open(self, body: bytes) -> Message:
        """Return the message in a body that has come, as `unseal`. Raises ValueError: it is no message."""
        return decode_body(self.unseal(body))

    def read(self) -> bytes | None:
        try:
            data = b"".join(self.unseal(body) for body in self.receive())
        except ValueError as error:
            self.fault = str(error)
            return b""
        return data or (b"" if self.is_closed else None)

    def write(self, data: bytes | memoryview) -> int:
        """See `AgentPipe`. What was held up has to be given again, as TLS has it."""
        if self._in_flight:
            self.flush()
        else:
            piece = bytes(data[:RECORD_BYTES])
            self.send_body(piece)
            self._in_flight = len(piece)
        if self.is_closed:
            raise BrokenPipeError("the other side has gone")
        if self.has_unsent:
            return 0
        count, self._in_flight = self._in_flight, 0
        return count

    def stderr_text(self) -> str:
        return self.fault

    def close(self) -> None:
        """Close the connection; what was not sent is lost."""
        if self._tls is not None and not self.is_closed:
            self._tls.end()
            self.flush()
        self.is_closed = True
        self._socket.close()


REFUSED = b"refused "  # before the reason; sent in the clear
MAX_REASON = 1000


class Caller:
    """The host's side of one connection."""

    def __init__(self, connection: Connection, token: bytes, place: str, request: Callable[[], HostRequest]) -> None:
        """Say the first words. `place`: the scheduler's address and port, for errors. `request`: what this host asks
        for, once the scheduler has said hello."""
        self.connection, self._token, self.place, self._request = connection, token, place, request
        self.nonce = new_nonce()
        self._is_greeted = False
        connection.send_plain(hello(self.nonce))

    def take(self, body: bytes) -> float | None:
        """Take what the scheduler has said; how long it may be silent, once it has let this host in. Raises Refused:
        this host is not let in, or what answers is no scheduler."""
        if body.startswith(REFUSED):
            reason = body.removeprefix(REFUSED).decode("utf-8", "replace")
            printable = "".join(letter if letter.isprintable() else "?" for letter in reason[:MAX_REASON])
            kind = NoKey if reason == WRONG_KEY else Refused
            raise kind(f"the scheduler has refused this host: {printable}")
        try:
            if self._is_greeted:
                silence_s = float(self.connection.open(body)["silence_s"])
                self.connection.trust()
                return silence_s
            said = read_hello(body)
            if said is None:
                raise ValueError("it does not say hello")
        except NotProved:
            raise NoKey("the scheduler does not know this job's token: is it another job's?") from None
        except (ValueError, TypeError, KeyError) as error:
            raise self._stranger(error) from None
        spoken, nonce = said
        if spoken != protocol():
            remedy = "install the same version on all hosts"
            raise Refused(f"the scheduler's msrun speaks protocol {spoken}, this one {protocol()}: {remedy}")
        self._is_greeted = True
        self.connection.agree(Seal(self._token, nonce, self.nonce, is_scheduler=False))
        self.connection.send({"type": "register", "request": encode_record(self._request())})
        return None

    def receive(self) -> list[bytes]:
        """Return what has come. Raises Refused: the two sides cannot speak with each other."""
        try:
            return self.connection.receive()
        except NotUnderstood as error:
            raise Refused(f"no connection with the scheduler at {self.place}: {error}") from None
        except ValueError as error:
            raise self._stranger(error) from None

    def _stranger(self, error: Exception) -> Refused:
        return Refused(f"what answers at {self.place} is no msrun scheduler: {error}")
