"""Those who listen on a network or read what another host sends, with noise of strangers and of peers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

from failure_reports import failure_of
from tls_files import PASSWORDS, Authority, TlsFolder

from fuzz.mutation import change_bytes, change_value, encode_any
from msrun.cluster.connection import Connection
from msrun.cluster.coordinator_server import CoordinatorServer, MeetingTerms
from msrun.cluster.failure import FailureReport
from msrun.cluster.host_link import HostLink
from msrun.cluster.hosts import HostRequest, Registry
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.messages import FrameBuffer, NotUnderstood, decode_body, encode_body, frame
from msrun.cluster.own_thread import Inbox
from msrun.cluster.proof import PROTOCOL, Seal, hello, new_nonce, read_hello
from msrun.cluster.rendezvous import listen
from msrun.cluster.tls.identity import open_identity
from msrun.planning.record_json import encode_record
from msrun.planning.tls_spec import parse_tls_config
from msrun.runtime.joining.registrar import Registrar
from msrun.runtime.joining.registrar import Registry as JoiningRegistry

TOKEN = b"secret"
NONCE = "0" * 64
REPORT = encode_record(FailureReport(failure_of(1), 1, can_restart=True))


def request(node_rank: int, worker_num: int = 2) -> HostRequest:
    return HostRequest(PROTOCOL, worker_num, 1, node_rank, f"h{node_rank}", f"10.0.0.{node_rank}", 1)


class Meeting:
    """A coordinator on loopback; leaving the context proves that it has lived until then, and serves two good hosts."""

    def __init__(self, worker_num: int = 2) -> None:
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.notes: list[str] = []
        self.is_over = False
        """The job has ended, and with it the coordinator may."""
        terms = MeetingTerms(TOKEN, "JOB", 4711, 60.0, 30.0, RestartPolicy(1))
        self.coordinator = CoordinatorServer(listener, Registry(worker_num, 1), terms, self.notes.append)

    def __enter__(self) -> Self:
        self.coordinator.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        assert self.coordinator.is_alive() or self.is_over, "the coordinator has ended"
        self.coordinator.close()
        assert kind is not None or not self.coordinator.is_alive()

    def connect(self) -> socket.socket:
        stream = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no TIME_WAIT behind
        return stream


class Peer:
    """A host that knows the token and says what it likes."""

    def __init__(self, meeting: Meeting, node_rank: int) -> None:
        self.stream = meeting.connect()
        self._frames = FrameBuffer(1 << 20)
        self._bodies: list[bytes] = []
        said = read_hello(self.read())
        assert said is not None
        own = new_nonce()
        self.seal = Seal(TOKEN, said[1], own, is_scheduler=False)
        self.stream.sendall(frame(hello(own)))
        self.say(encode_body({"type": "register", "request": encode_record(request(node_rank))}))
        self.hear("accepted")

    def read(self) -> bytes:
        while not self._bodies:
            data = self.stream.recv(1 << 16)
            assert data, "the scheduler has hung up"
            self._bodies += self._frames.feed(data)
        return self._bodies.pop(0)

    def hear(self, kind: str) -> dict[str, Any]:
        while (message := decode_body(self.seal.open(self.read())))["type"] != kind:
            pass
        return message

    def end(self) -> None:
        """End its part of every attempt, until the job is over."""
        while (message := decode_body(self.seal.open(self.read())))["type"] != "over":
            if message["type"] in ("stop", "restart"):
                self.say(encode_body({"type": "ended", "attempt": message["attempt"], "can_continue": True}))

    def say(self, body: bytes) -> None:
        self.stream.sendall(frame(self.seal.close(body)))


def strangers(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """Noise at the coordinator's port before anything is proved: bytes, hellos, sealed and unsealed messages."""
    register = {"type": "register", "request": encode_record(request(0))}
    with Meeting() as meeting:
        for rng in rng_of:
            seal = Seal(b"guessed", NONCE, NONCE, is_scheduler=False)
            pieces = [
                frame(hello(new_nonce())),
                frame(encode_any(rng, change_value(rng, register))),
                frame(seal.close(encode_any(rng, register))),
                change_bytes(rng, frame(hello(NONCE))),
                b"\x16\x03\x01" + rng.randbytes(60),
            ]
            with contextlib.suppress(OSError), meeting.connect() as stream:
                stream.sendall(b"".join(rng.sample(pieces, rng.randint(1, len(pieces)))))
                if rng.random() < 0.3:
                    stream.recv(1 << 12)
            assert meeting.coordinator.is_alive()
            yield
        assert not [note for note in meeting.notes if "Error: " in note], meeting.notes
        good = [Peer(meeting, node_rank) for node_rank in range(2)]
        for peer in good:
            peer.hear("assigned")
        meeting.is_over = True
        for peer in good:
            peer.stream.close()


REPORTS = (
    {"type": "failed", "attempt": 0, "report": REPORT},
    {"type": "ended", "attempt": 0, "can_continue": True},
    {"type": "ready", "attempt": 1},
    {"type": "done", "attempt": 0, "rank": 1},
    {"type": "beat"},
)


def registrations(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """Hosts with the token that register as something odd, or end at once, for a job that is never complete."""
    with Meeting(1000) as meeting:
        for rng in rng_of:
            with contextlib.suppress(OSError), meeting.connect() as stream:
                (greeting,) = FrameBuffer(1 << 10).feed(stream.recv(1 << 10))
                said, own = read_hello(greeting), new_nonce()
                assert said is not None
                seal = Seal(TOKEN, said[1], own, is_scheduler=False)
                asked = {
                    "type": "register",
                    "request": encode_record(request(rng.randint(-1, 3), rng.choice([1000, 1000, 2]))),
                }
                body = encode_any(rng, change_value(rng, asked))
                stream.sendall(frame(hello(own)) + frame(seal.close(body)))
                stream.recv(1 << 12)
            assert meeting.coordinator.is_alive()
            yield
        assert not [note for note in meeting.notes if "Error: " in note], meeting.notes


def hosts(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """A assigned host that says anything; the other one hears of it, or the job goes on."""
    rng = next(rng_of, None)
    while rng is not None:
        with Meeting() as meeting, contextlib.ExitStack() as stack:
            good, bad = (Peer(meeting, node_rank) for node_rank in range(2))
            stack.callback(good.stream.close)
            stack.callback(bad.stream.close)
            good.hear("assigned")
            with contextlib.suppress(OSError):
                for _ in range(20):
                    if rng is None:
                        break
                    bad.say(encode_any(rng, change_value(rng, rng.choice(REPORTS))))
                    yield
                    rng = next(rng_of, None)
            bad.stream.close()
            good.end()
            meeting.is_over = True
            assert not [note for note in meeting.notes if "Error: " in note], meeting.notes


ORDERS = (
    {"type": "accepted", "beat_s": 1.0, "silence_s": 15.0},
    {"type": "waiting", "text": "1 of 2"},
    {"type": "fleet", "hosts": [{"node_rank": 0, "name": "h0", "address": "10.0.0.1", "ranks": [[0, 1]]}]},
    {"type": "assigned", "job_id": "JOB", "store_port": 1, "node_rank": 0},
    {"type": "stop", "attempt": 0, "report": REPORT},
    {"type": "over", "report": None},
    {"type": "beat"},
)


def schedulers(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """What answers a host: noise before it has proved anything, and odd orders after it has."""
    inbox = Inbox()
    with contextlib.closing(inbox):
        for rng in rng_of:
            ours, theirs = socket.socketpair()
            link = HostLink(("127.0.0.1", 1), TOKEN, lambda _: request(0), inbox, limit_s=0)
            link._nonce = NONCE
            seal = Seal(TOKEN, NONCE, NONCE, is_scheduler=True)
            orders = [encode_body(order) for order in ORDERS[:1]]
            orders += [encode_any(rng, change_value(rng, rng.choice(ORDERS))) for _ in range(3)]
            data = frame(hello(NONCE)) + b"".join(frame(seal.close(body)) for body in orders)
            theirs.sendall(change_bytes(rng, data) if rng.random() < 0.4 else data)
            theirs.shutdown(socket.SHUT_WR)
            connection = Connection(ours)
            link._serve(connection, "10.0.0.1")
            connection.close()
            theirs.close()
            link._outbox.close()
            inbox.take()
            yield


def handshakes(rng_of: Iterator[Random], folder: Path) -> Iterator[None]:
    """Both sides of a TLS handshake, with what the other has said changed on the way."""
    tls = TlsFolder(folder, Authority())
    spec = parse_tls_config(tls.config().read_text(), "tls.json", str(tls.folder), PASSWORDS)
    server, client = open_identity(spec, "server"), open_identity(spec, "client")
    for rng in rng_of:
        one, other = client.open_session(), server.open_session()
        with contextlib.suppress(NotUnderstood):
            for _ in range(4):
                for here, there in ((one, other), (other, one)):
                    data = here.take()
                    if data:
                        there.receive(change_bytes(rng, data) if rng.random() < 0.4 else data)
            one.send(b"x")
        yield


def joiners(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """Noise at the port of the runtime's own meeting (MS_SCHED_PORT)."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    registrar = Registrar(listener, JoiningRegistry("job", 1000), "scheduler", 30)
    registrar._refusals_left = 0
    failed: list[BaseException] = []
    over = threading.Event()

    def gather() -> None:
        try:
            while not over.is_set():
                registrar.gather(0.05)
        except BaseException as error:  # told below
            failed.append(error)

    thread = threading.Thread(target=gather)
    thread.start()
    asked = {"key": "job", "world_size": 1000, "global_rank": -1, "name": "n", "protocol": 1}
    try:
        for rng in rng_of:
            body = encode_any(rng, change_value(rng, asked))
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stream.sendall(body + b"\n" + change_bytes(rng, body))
            assert not failed, failed
            yield
    finally:
        over.set()
        thread.join()
        registrar.close()
    assert not failed, failed
