"""Who has come to a job of several hosts, who is refused, and who gets which ranks; and the connection of each.

One connection between a host and the scheduler: whole bodies over TCP, and nobody ever waits for the other side. And
how the two come to know each other, before anything else is said.

    both          hello with a nonce, in the clear
    host          register {request}                sealed (`proof`): it proves that it knows the token
    scheduler     accepted {silence_s}, sealed, or in the clear why the host is refused

After `accepted` the connection carries a stream of bytes in sealed records, by `read` and `write`.

Host and scheduler prove with every message that they know the job's token, without sending it. Each side begins with a
random nonce. Token and both nonces make two keys, one for each direction, and from then on every message carries an
HMAC-SHA256 of its number and its bytes. So nothing is looked at that was not proved first, and a message is good for
one connection, one direction and one place in the order. The token is the user's (`--token_file`, MSRUN_TOKEN), or a
random one that the scheduler's host leaves in the log directory for those that share it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from msrun.cluster.messages import (
    MAX_MESSAGE_BYTES,
    NO_TLS,
    SAME_EVERYWHERE,
    FrameBuffer,
    Message,
    NotUnderstood,
    decode_body,
    encode_body,
    frame,
)
from msrun.cluster.protocol import protocol
from msrun.planning.hosts import HostAssignment, count_workers, fold_ranks, name_ranks
from msrun.planning.record import Record, encode_record
from msrun.planning.spec import is_loopback

if TYPE_CHECKING:
    from msrun.cluster.tls import TlsIdentity, TlsSocket

MAX_NAME = 255
MAX_WORKERS = 1 << 24  # more than any job has; a number beyond it is a mistake or a trick
SHOWN_HOSTS = 8
Count = Annotated[int, msgspec.Meta(ge=-1, le=MAX_WORKERS)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Refused(Exception):
    """A host cannot take part. The message is for the refused host and for the record."""


class NoKey(Refused):
    """This host does not know the key by which those of the job know each other, or not yet."""


WRONG_KEY = "wrong token: give all hosts the same --token_file or MSRUN_TOKEN, or a --log_dir that they share"


def other_protocol(spoken: object, whose: str = "its") -> str:
    text = spoken if isinstance(spoken, int) else "?"
    return f"{whose} msrun speaks protocol {text}, this one {protocol()}: install the same version on all hosts"


class HostRequest(Record):
    """What a host says of itself when it registers."""

    protocol: int
    worker_num: Count
    local_worker_num: Count
    node_rank: Count  # -1 = by address
    name: Name
    address: Name  # numeric, towards the master
    max_restarts: Count
    table: Name = ""  # digest of the rank table that the host was given; empty without one

    @classmethod
    def from_json(cls, value: object) -> HostRequest:
        """Return the request in a message. Raises Refused: it is none."""
        if not isinstance(value, Mapping):
            raise Refused("it does not say who it is")
        if value.get("protocol") != protocol():
            raise Refused(other_protocol(value.get("protocol")))
        try:
            request = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise Refused(f"its request is none: {error}") from None
        if not (request.name + request.address + request.table).isprintable():
            raise Refused("its name or address is none")
        if request.local_worker_num < 1:
            raise Refused(f"--local_worker_num {request.local_worker_num}: must be 1 or more")
        try:
            ipaddress.ip_address(request.address)
        except ValueError:
            raise Refused(f"{request.address!r} is no address") from None
        return request

    def describe(self) -> str:
        node = f"node {self.node_rank} " if self.node_rank >= 0 else ""
        return f"{node}({self.name}, {self.address})"


class Registry:
    """The hosts that have come so far. Keys are the caller's: a connection, for example."""

    def __init__(
        self, worker_num: int, max_restarts: int, expected: Sequence[HostAssignment] = (), table: str = ""
    ) -> None:
        """`expected`: the hosts of a rank table; then nobody else may come. `table`: its digest."""
        self._asked_num = self._worker_num = worker_num
        self._max_restarts = max_restarts
        self._expected = {assignment.node_rank: assignment for assignment in expected}
        self._table = table
        self._requests: dict[Hashable, HostRequest] = {}
        self._by_node: dict[int, HostRequest] = {}
        self.registered = 0  # how many workers the hosts that came will run

    def add(self, key: Hashable, request: HostRequest) -> None:
        """Let a host in. Raises Refused: it does not fit this job."""
        self._check_settings(request)
        if self.is_complete:
            raise Refused(
                f"an extra host: the job is complete with {self._worker_num} workers on {len(self._requests)} hosts"
            )
        self._check_beside(request)
        node, count, missing = request.node_rank, request.local_worker_num, self._worker_num - self.registered
        assignment = self._expected.get(node)
        if self._expected and (assignment is None or len(assignment.ranks) != count):
            raise Refused(f"--node_rank {node} with {count_workers(count)}: not in the table")
        if count > missing:
            raise Refused(
                f"--local_worker_num {count}: only {missing} of {self._worker_num} workers are missing; the numbers of "
                "all hosts must add up to --worker_num"
            )
        nodes = sorted([node, *(other.node_rank for other in self._requests.values())])
        if node >= 0 and count == missing and nodes != list(range(len(nodes))):
            raise Refused(
                f"--node_rank {node}: with it all {self._worker_num} workers are there, but the hosts are "
                f"{fold_ranks(nodes)}; {len(nodes)} hosts have the node_ranks 0 to {len(nodes) - 1}"
            )
        self._requests[key] = self._by_node[node] = request
        self.registered += count

    def check_late(self, request: HostRequest) -> None:
        """Look at a host that comes while the job runs on others. Raises Refused: it does not fit this job."""
        self._check_settings(request)
        if request.local_worker_num > self._asked_num:
            raise Refused(f"--local_worker_num {request.local_worker_num}: the job has {self._asked_num} workers")

    def remove(self, key: Hashable) -> HostRequest | None:
        """Forget a host that has gone before everybody had come; it may come again."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._by_node.pop(request.node_rank, None)
            self.registered -= request.local_worker_num
        return request

    def _check_settings(self, request: HostRequest) -> None:
        for name, given, here in (
            ("worker_num", request.worker_num, self._asked_num),
            ("max_restarts", request.max_restarts, self._max_restarts),
        ):
            if given != here:
                raise Refused(f"--{name} {given}, but {here} at the scheduler: give all hosts the same")
        if request.table != self._table:
            what = "another" if request.table and self._table else "a" if request.table else "no"
            raise Refused(f"{what} --rank_table_file than the scheduler: give all hosts the same table, or none")

    def _check_beside(self, request: HostRequest) -> None:
        first = next(iter(self._requests.values()), request)
        if (request.node_rank < 0) != (first.node_rank < 0):
            has, has_not = (first, request) if request.node_rank < 0 else (request, first)
            raise Refused(
                f"{has_not.describe()} gave no --node_rank, {has.describe()} did: give it on all hosts or on none"
            )
        if request.node_rank >= 0 and request.node_rank in self._by_node:
            other = self._by_node[request.node_rank]
            raise Refused(f"--node_rank {request.node_rank} is taken by {other.describe()}: give each host its own")
        same = (other for other in self._requests.values() if other.address == request.address)
        if (beside := next(same, None)) is not None and request.node_rank < 0 and not is_loopback(request.address):
            raise Refused(
                f"address {request.address} is taken by {beside.describe()}: one msrun starts all workers of a host"
            )

    def can_do_with(self, min_hosts: int) -> bool:
        """Whether so many hosts have come, with the node ranks 0 to n - 1 where they have any."""
        nodes = sorted(request.node_rank for request in self._requests.values())
        return len(nodes) >= min_hosts and (nodes[0] < 0 or nodes == list(range(len(nodes))))

    def close(self) -> None:
        """Let no more hosts in: those that have come are the job's."""
        self._worker_num = self.registered

    @property
    def is_complete(self) -> bool:
        return self.registered == self._worker_num

    def assignments(self) -> dict[Hashable, HostAssignment]:
        """Return the assignment of every host, once all have come: by node_rank, or by numeric address without it.
        Source: MindSpore numbers nodes without a given rank by their address as a number."""
        order = sorted(self._requests.items(), key=lambda item: _place(item[1]))
        found: dict[Hashable, HostAssignment] = {}
        first = 0
        for index, (key, request) in enumerate(order):
            assignment = self._expected.get(index)
            count = request.local_worker_num
            ranks = assignment.ranks if assignment else tuple(range(first, first + count))
            devices = assignment.device_ids if assignment else tuple(range(count))
            found[key] = HostAssignment(index, request.name, request.address, ranks, devices)
            first += count
        return found

    def describe(self) -> str:
        """Return who has come and who is missing: "8 of 16 registered, missing: node 1 (10.0.0.7) ranks 8-15"."""
        return f"{self.registered} of {self._worker_num} registered, missing: {self._missing()}"

    def describe_present(self) -> str:
        requests = sorted(self._requests.values(), key=_place)
        words = [f"{request.describe()} with {request.local_worker_num}" for request in requests[:SHOWN_HOSTS]]
        return _shortened(words, len(requests))

    def _missing(self) -> str:
        nodes = {request.node_rank for request in self._requests.values()}
        if self._expected:
            absent = [assignment for node, assignment in sorted(self._expected.items()) if node not in nodes]
            words = [f"node {s.node_rank} ({s.address}) {name_ranks(s.ranks)}" for s in absent[:SHOWN_HOSTS]]
            return _shortened(words, len(absent))
        left = self._worker_num - self.registered
        if nodes and -1 not in nodes:
            gaps = sorted(set(range(max(nodes))) - nodes)
            if not gaps:
                return f"{name_ranks(range(self.registered, self._worker_num))}, from node {max(nodes) + 1} on"
            return f"{count_workers(left)}, among them those of node {fold_ranks(gaps)}"
        return count_workers(left)


def _place(request: HostRequest) -> tuple[int, int, int]:
    address = ipaddress.ip_address(request.address)
    return request.node_rank, address.version, int(address)


def _shortened(words: list[str], count: int) -> str:
    return ", ".join([*words, *([f"{count - len(words)} more hosts"] if count > len(words) else [])])


MAX_GREETING_BYTES = 8 * 1024  # of what somebody says who has not proved anything
RECORD_BYTES = 1 << 17
MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES  # the other side reads nothing: it is given up
READ_BYTES = 1 << 16
TLS_RECORDS = range(20, 25)  # first byte of TLS (RFC 8446, 5.1); a message of ours would be far too long


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
    """Past its greeting a pipe to an agent, or the launcher: `AgentPipe` of launch.transport. Of one thread."""

    address = ""  # numeric, of the other side
    exit_status = None
    fault = ""  # why what has come cannot be read; empty while it can

    def __init__(self, stream: socket.socket, tls: TlsIdentity | None = None) -> None:
        """`tls`: what everything goes through; None = as it is. Raises OSError: the other side has gone."""
        stream.settimeout(0.0)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._tls = stream, tls
        self._secure: TlsSocket | None = None
        if tls is not None and tls.side == "client":  # which speaks first
            self._socket = self._secure = tls.wrap(stream)
        self._buffer = FrameBuffer(MAX_GREETING_BYTES)
        self.seal: Seal | None = None
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
        return (self._secure.version() or "") if self._secure else ""

    def trust(self) -> None:
        """Take long messages from now on: the other side has proved who it is."""
        self._buffer.max_bytes = MAX_MESSAGE_BYTES + PROOF_BYTES
        self._most = sys.maxsize

    def send(self, message: Message) -> None:
        """Send a message with its proof, or as much of it as can be sent now."""
        self.send_body(encode_body(message))

    def send_body(self, body: bytes) -> None:
        assert self.seal is not None, "nothing is said before the other side's nonce is known"
        self.send_plain(self.seal.close(body))

    def send_plain(self, body: bytes) -> None:
        self._unsent += frame(body)
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.is_closed = True

    def flush(self) -> None:
        while self._unsent and not self.is_closed and (self._secure or not self._tls):
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
            if self._is_first and not self._secure and (first := self._socket.recv(1, socket.MSG_PEEK)):
                self._is_first = False
                self._agree(speaks_tls=first[0] in TLS_RECORDS)
            data: bytes | None = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            data = None
        except OSError:
            data = b""
        self.flush()  # what has waited for the other side's part of a handshake
        self.is_closed |= data == b""
        return self._buffer.feed(data, self._most) if data else []

    def _agree(self, *, speaks_tls: bool) -> None:
        tls = self._tls
        if speaks_tls != (tls is not None):
            self._tls = None  # so that it understands the refusal
            raise NotUnderstood(NO_TLS if tls else f"it speaks TLS; {SAME_EVERYWHERE}")
        if tls is not None:
            self._socket = self._secure = tls.wrap(self._socket)

    def unseal(self, body: bytes) -> bytes:
        """Return what is in a body that has come. Raises NotProved: it is not from one who knows the token."""
        assert self.seal is not None, "nothing can be proved before the other side's nonce is known"
        return self.seal.open(body)

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
        self.is_closed = True
        self._socket.close()


REFUSED = b"refused "  # before the reason; sent in the clear
MAX_REASON = 1000


class Greeting:
    """One side's part of how the two come to know each other: hello, and from then on what is proved."""

    def __init__(self, connection: Connection, token: bytes, *, is_scheduler: bool) -> None:
        """Say the first words."""
        self.connection, self._token, self._is_scheduler = connection, token, is_scheduler
        self.nonce = new_nonce()
        self._is_greeted = False
        connection.send_plain(hello(self.nonce))

    def open(self, body: bytes) -> Message | None:
        """Return what the other side says with its proof; None after its hello (NotProved, ValueError, Refused)."""
        if self._is_greeted:
            return self.connection.open(body)
        said = read_hello(body)
        if said is None:
            raise ValueError("it does not say hello")
        spoken, nonce = said
        if spoken != protocol():
            raise Refused(other_protocol(spoken, "its" if self._is_scheduler else "the scheduler's"))
        nonces = (self.nonce, nonce) if self._is_scheduler else (nonce, self.nonce)
        self.connection.seal = Seal(self._token, *nonces, is_scheduler=self._is_scheduler)
        self._is_greeted = True
        return None


class Caller(Greeting):
    """The host's side of one connection."""

    def __init__(self, connection: Connection, token: bytes, place: str, request: Callable[[], HostRequest]) -> None:
        """`place`: of the scheduler, for errors. `request`: what this host asks for, once that has said hello."""
        super().__init__(connection, token, is_scheduler=False)
        self.place, self._request = place, request

    def take(self, body: bytes) -> float | None:
        """Take what the scheduler has said; how long it may be silent, once this host is in (Refused: it is not)."""
        if body.startswith(REFUSED):
            reason = body.removeprefix(REFUSED).decode("utf-8", "replace")
            printable = "".join(letter if letter.isprintable() else "?" for letter in reason[:MAX_REASON])
            kind = NoKey if reason == WRONG_KEY else Refused
            raise kind(f"the scheduler has refused this host: {printable}")
        try:
            message = self.open(body)
            if message is not None:
                silence_s = float(message["silence_s"])
                self.connection.trust()
                return silence_s
        except NotProved:
            raise NoKey("the scheduler does not know this job's token: is it another job's?") from None
        except (ValueError, TypeError, KeyError) as error:
            raise self._stranger(error) from None
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
