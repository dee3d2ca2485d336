"""Those who listen on a network or read what another host sends, with noise of strangers and of peers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

from open_gate import TOKEN, OpenGate, host_request
from tls_files import PASSWORDS, Authority, TlsFolder

from fuzz.mutation import change_bytes, change_value, encode_any
from msrun.cluster.connection import Caller, Connection, Seal, hello, new_nonce, read_hello
from msrun.cluster.hosts import Refused
from msrun.cluster.messages import FrameBuffer, NotUnderstood, frame
from msrun.cluster.tls import open_identity
from msrun.planning.record_json import encode_record
from msrun.planning.tls_spec import parse_tls_config
from msrun.runtime.joining.meet import Keeper
from msrun.runtime.joining.spec import Meeting

NONCE = "0" * 64


def connect(gate: OpenGate) -> socket.socket:
    stream = gate.stranger()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no TIME_WAIT behind
    return stream


def strangers(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """Noise at the coordinator's port before anything is proved: bytes, hellos, sealed and unsealed messages."""
    register = {"type": "register", "request": encode_record(host_request(0))}
    with OpenGate() as gate:
        for rng in rng_of:
            seal = Seal(b"guessed", NONCE, NONCE, is_scheduler=False)
            pieces = [
                frame(hello(new_nonce())),
                frame(encode_any(rng, change_value(rng, register))),
                frame(seal.close(encode_any(rng, register))),
                change_bytes(rng, frame(hello(NONCE))),
                b"\x16\x03\x01" + rng.randbytes(60),
            ]
            with contextlib.suppress(OSError), connect(gate) as stream:
                stream.sendall(b"".join(rng.sample(pieces, rng.randint(1, len(pieces)))))
                if rng.random() < 0.3:
                    stream.recv(1 << 12)
            yield
        assert not [note for note in gate.notes if "Error: " in note], gate.notes
        gate.let_in_both()


def registrations(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """Hosts with the token that register as something odd, or end at once, for a job that is never complete."""
    with OpenGate(worker_num=1000) as gate:
        for rng in rng_of:
            with contextlib.suppress(OSError), connect(gate) as stream:
                (greeting,) = FrameBuffer(1 << 10).feed(stream.recv(1 << 10))
                said, own = read_hello(greeting), new_nonce()
                assert said is not None
                seal = Seal(TOKEN, said[1], own, is_scheduler=False)
                asked = {
                    "type": "register",
                    "request": encode_record(host_request(rng.randint(-1, 3), rng.choice([1000, 1000, 2]))),
                }
                body = encode_any(rng, change_value(rng, asked))
                stream.sendall(frame(hello(own)) + frame(seal.close(body)))
                stream.recv(1 << 12)
            yield
        assert not [note for note in gate.notes if "Error: " in note], gate.notes


ORDERS = (
    {"type": "accepted", "silence_s": 15.0},
    {"type": "accepted", "silence_s": None},
    {"type": "waiting", "text": "1 of 2"},
)


def schedulers(rng_of: Iterator[Random], _: Path) -> Iterator[None]:
    """What answers a host that dials, before and after it has proved that it knows the token."""
    for rng in rng_of:
        ours, theirs = socket.socketpair()
        caller = Caller(Connection(ours), TOKEN, "here", lambda: host_request(0))
        seal = Seal(TOKEN, NONCE, caller.nonce, is_scheduler=True)
        orders = [encode_any(rng, change_value(rng, rng.choice(ORDERS))) for _ in range(3)]
        data = frame(hello(NONCE)) + b"".join(frame(seal.close(body)) for body in orders)
        theirs.sendall(change_bytes(rng, data) if rng.random() < 0.4 else data)
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(Refused):
            while not caller.connection.is_closed:
                for body in caller.receive():
                    caller.take(body)
        caller.connection.close()
        theirs.close()
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
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    keeper = Keeper(Meeting(("127.0.0.1",), port, "job", "MS_SCHED_HOST"), 1000, 0, "scheduler", 30)
    keeper._notes.update({False: 1 << 20, True: 1 << 20})
    failed: list[BaseException] = []
    over = threading.Event()

    def gather() -> None:
        try:
            while not over.is_set():
                keeper.gather(0.05)
        except BaseException as error:  # told below
            failed.append(error)

    thread = threading.Thread(target=gather)
    thread.start()
    words = [keeper._greeting.encode(), b"worker/0", b"worker/+1", b"refused x", b"left"]
    try:
        for rng in rng_of:
            body = b"\n".join(rng.choices(words, k=rng.randint(1, 4)))
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stream.sendall(body + b"\n" + change_bytes(rng, body))
            assert not failed, failed
            yield
    finally:
        over.set()
        thread.join()
        keeper.close()
    assert not failed, failed
