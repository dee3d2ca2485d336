"""The port at which hosts come in, over real sockets, with TLS too: who proves nothing gets and costs nothing."""

import contextlib
import socket
import ssl

import pytest
from job_runner import wait_until
from open_gate import TOKEN, OpenGate, host_request
from tls_files import PASSWORDS, Authority, TlsFolder, as_pem

from msrun.cluster import tls as tls_module
from msrun.cluster.connection import Seal, hello, new_nonce, read_hello
from msrun.cluster.messages import HEADER, FrameBuffer, decode_body, encode_body, encode_message, frame
from msrun.cluster.protocol import protocol
from msrun.cluster.tls import open_identity
from msrun.launch.fleet import joined_hosts as module
from msrun.planning.record import encode_record
from msrun.planning.settings import parse_tls_config


@pytest.fixture
def gate():
    with OpenGate() as found:
        yield found


class Peer:
    """One who speaks to the gate byte by byte: a stranger, or a host that means harm."""

    def __init__(self, stream):
        self.stream = stream
        self._frames = FrameBuffer(1 << 20)
        self._bodies = []
        greeting = read_hello(self.read())
        assert greeting is not None and greeting[0] == protocol()
        own = new_nonce()
        self.seal = Seal(TOKEN, greeting[1], own, is_scheduler=False)
        self.hello = frame(hello(own))

    def read(self):
        """Return the next body; empty at the end of the stream."""
        while not self._bodies:
            try:
                data = self.stream.recv(4096)
            except ConnectionResetError:  # what it sent was not read to the end
                data = b""
            if not data:
                return b""
            self._bodies += self._frames.feed(data)
        return self._bodies.pop(0)

    def register(self, node_rank):
        """Become a host."""
        body = encode_body({"type": "register", "request": encode_record(host_request(node_rank))})
        self.stream.sendall(self.hello + frame(self.seal.close(body)))
        assert decode_body(self.seal.open(self.read()))["type"] == "accepted"


NESTED = b'{"type":"register","request":' + b"[" * 980 + b"]" * 980 + b"}"
HELLO = frame(hello("0" * 64))
REGISTER = encode_body({"type": "register", "request": encode_record(host_request(0))})


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(1 << 31) + b"x",
        HEADER.pack(0),
        encode_message({"type": "ended", "attempt": 0}),
        encode_message({"type": "hello", "protocol": 2, "nonce": "0" * 64}),
        HELLO + HEADER.pack(0),
        HELLO + frame(REGISTER),
        HELLO + frame(b"0" * 32 + REGISTER),
        HELLO + frame(NESTED),
        HELLO + HELLO,
        HEADER.pack(8000) + b"[" * 8000,
        HEADER.pack(2) + b"\xff\xfe",
    ],
)
def test_stranger_is_refused_and_hosts_come_in(gate, said):
    with gate.stranger() as stream:
        peer = Peer(stream)
        stream.sendall(said)
        assert peer.read()[:8] in (b"refused ", b"")
    wait_until(lambda: any(note.startswith("refused 127.0.0.1:") for note in gate.notes), "the refusal is told")
    gate.let_in_both()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        NESTED,
        b'{"type":"register"}',
        b'{"type":"register","request":{"protocol":%d,"name":%s}}' % (protocol(), b"[" * 20 + b"]" * 20),
        b'{"type":"register","request":{"protocol":%s}}' % (b"9" * 4000),
        b'{"type":"register","request":{"protocol":%d,"worker_num":true}}' % protocol(),
    ],
)
def test_one_who_knows_the_token_and_registers_as_nothing_is_refused(gate, said):
    with gate.stranger() as stream:
        peer = Peer(stream)
        stream.sendall(peer.hello + frame(peer.seal.close(said)))
        assert peer.read().startswith(b"refused ")
    gate.let_in_both()


def test_host_of_another_version_is_told_so(gate):
    with gate.stranger() as stream:
        peer = Peer(stream)
        stream.sendall(encode_message({"type": "hello", "protocol": 2, "nonce": "0" * 64}))
        assert peer.read().startswith(b"refused its msrun speaks protocol 2, this one ")


@pytest.mark.parametrize("token", [b"left", b""])
def test_host_with_a_wrong_token_is_refused_on_both_sides(gate, token):
    assert "the scheduler has refused this host: wrong token" in gate.refusal(0, token=token)
    assert "wrong token" in gate.notes[-1]


def test_what_a_host_has_said_before_is_not_heard_again(gate):
    """Nobody in between can send it again, on the same connection or on another."""
    with gate.stranger() as stream:
        peer = Peer(stream)
        peer.register(1)
        once = frame(peer.seal.close(b"hello"))
        stream.sendall(once)
        pipe = gate.let_in[0]
        assert wait_until(pipe.read, "it is heard") == b"hello"
        stream.sendall(once)
        wait_until(lambda: pipe.read() == b"", "the connection is over")
        assert "without the proof that it is the next of this connection" in pipe.stderr_text()


def test_one_address_cannot_hold_more_than_a_few_connections(gate):
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(gate.stranger()) for _ in range(3 * module.MAX_STRANGERS_OF_ONE)]
        oldest = Peer(streams[0])
        while oldest.read():  # until it is closed: it made room
            pass
        gate.let_in_both()


def greets(stream):
    """Return whether the gate has taken a connection."""
    stream.settimeout(0.0)
    try:
        return bool(stream.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@contextlib.contextmanager
def full_house(gate, monkeypatch):
    """Yield two strangers for whom there is room, and one who waits."""
    monkeypatch.setattr(module, "MAX_STRANGERS", 2)
    with gate.stranger() as first, gate.stranger() as second:
        wait_until(lambda: greets(first) and greets(second), "two have been taken")
        with gate.stranger() as third:
            for stream in (first, second, third):
                stream.settimeout(10)
            yield first, second, third


@pytest.mark.parametrize("leaves", [False, True], ids=["becomes a host", "leaves"])
def test_stranger_who_is_none_any_more_makes_room_for_another(gate, monkeypatch, leaves):
    monkeypatch.setattr(module, "PRESSED_S", 1e9)
    with full_house(gate, monkeypatch) as (first, second, third):
        assert not greets(third)
        third.settimeout(10)
        if leaves:
            second.close()
        else:
            Peer(first).register(1)
        wait_until(lambda: greets(third), "the next one is taken")


def test_stranger_who_has_said_nothing_for_a_moment_makes_room(gate, monkeypatch):
    monkeypatch.setattr(module, "PRESSED_S", 0.0)
    with full_house(gate, monkeypatch) as (first, _, third):
        wait_until(lambda: greets(third), "the third is taken")
        oldest = Peer(first)
        while oldest.read():
            pass


def test_those_who_say_nothing_are_sent_away(gate, monkeypatch):
    monkeypatch.setattr(module, "GREETING_S", 0.0)
    with gate.stranger() as stream:
        assert Peer(stream).read() == b""
    said = "nothing that makes it a host of this job"
    wait_until(lambda: any(said in note for note in gate.notes), "the refusal is told")


def flood(gate, source="127.0.0.1"):
    """Be refused from an address, four times."""
    for _ in range(4):
        with gate.stranger(source) as stream:
            stream.sendall(b"garbage!")
            while stream.recv(4096):
                pass


def test_flood_of_strangers_fills_no_record_and_hides_no_host(gate, monkeypatch):
    monkeypatch.setattr(module, "MAX_NOTES_OF_ONE", 2)
    monkeypatch.setattr(module, "MAX_NOTED", 2)
    flood(gate)
    assert [note.partition(" ")[0] for note in gate.notes] == ["refused", "refused", "127.0.0.1"]
    flood(gate, "127.0.0.2")
    flood(gate, "127.0.0.3")
    assert len(gate.notes) == 6 and not any("127.0.0.3" in note for note in gate.notes)
    gate.dial(0)
    assert "--node_rank 0 is taken" in gate.refusal(0)  # it has the node_rank of the first, and knows the token
    assert "--node_rank 0 is taken" in gate.notes[-1]


def open_unproved(tls, side, **changes):
    """Return a side as it is, though `open_identity` might refuse it: its certificate expired after its start, say."""
    spec = parse_tls_config(tls.config(**changes).read_text(), "tls.json", str(tls.folder), PASSWORDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls_module, "_shake_hands", lambda *_, **__: {"notAfter": "Jan  1 00:00:00 2099 GMT"})
        return open_identity(spec, side)


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def tls(tmp_path, authority):
    return TlsFolder(tmp_path, authority)


def open_both(tls, **changes):
    spec = parse_tls_config(tls.config(**changes).read_text(), "tls.json", str(tls.folder), PASSWORDS)
    return open_identity(spec, "server"), open_identity(spec, "client")


@pytest.fixture
def client(tls):
    return open_both(tls)[1]


@pytest.fixture
def secure_gate(tls):
    with OpenGate(open_both(tls)[0]) as found:
        yield found


def test_what_a_host_says_arrives_as_it_was_said_and_no_other_way(secure_gate, client):
    connection = secure_gate.dial(0, client)
    assert connection.tls_version == "TLSv1.3"
    host, here = connection, secure_gate.let_in[0]
    data, sent, came = bytes(range(256)) * (1 << 14), 0, b""
    while len(came) < len(data):
        sent += host.write(data[sent:]) if sent < len(data) else 0
        came += here.read() or b""
    assert came == data
    with socket.socket(fileno=socket.dup(connection.fileno())) as wire:
        wire.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    wait_until(lambda: here.read() == b"", "the connection is over")
    assert here.stderr_text().startswith("TLS: decryption failed")


NO_TLS = "it does not speak TLS; give --tls_config on all hosts, or on none"


def test_host_or_scheduler_without_tls_is_refused_at_once_on_both_sides(secure_gate, client):
    assert secure_gate.refusal(0, None) == f"the scheduler has refused this host: {NO_TLS}"
    assert secure_gate.notes[-1].endswith(f": {NO_TLS}")
    secure_gate.let_in_both(client)
    with OpenGate(None) as plain:
        reason = plain.refusal(0, client)
        assert f"no connection with the scheduler at 127.0.0.1:{plain.place[1]}: it does not speak TLS; give" in reason
        assert plain.notes[-1].endswith(": it speaks TLS; give --tls_config on all hosts, or on none")
        plain.let_in_both()


def test_bad_certificate_of_a_host_is_refused_with_its_reason_and_the_job_goes_on(tls, client, authority, tmp_path):
    key = tls.keys["client"]
    stranger = TlsFolder(tmp_path / "stranger", Authority("another CA"))
    stranger.write("own.pem", as_pem(stranger.keys["client"], stranger.certificates["client"]))
    revoked = authority.issue(key)
    for name, certificate in (
        ("late.pem", authority.issue(key, days=-1)),
        ("early.pem", authority.issue(key, begin_days=1)),
        ("server.pem", authority.issue(key, side="server")),
        ("revoked.pem", revoked),
    ):
        tls.write(name, as_pem(key, certificate))
    tls.write("crl", authority.revoke([revoked]))
    with OpenGate(open_both(tls, crl_path="crl")[0]) as gate:
        for name, there, here in (
            ("late", "expired", "it has expired, or a clock is wrong"),
            ("early", "not valid", "it is not valid yet, or a clock is wrong"),
            ("server", "not made for", "it is not made for this side"),
            ("stranger/own", "another CA has signed it", "another CA has signed it"),
            ("revoked", "it was revoked", "it was revoked"),
        ):
            reason = gate.refusal(0, open_unproved(tls, "client", client_cert_path=f"{name}.pem"))
            assert "TLS: it refuses our certificate: " in reason and there in reason
            assert gate.notes[-1].endswith(f": TLS: its certificate is refused: {here}")
        gate.let_in_both(client)


def test_host_does_not_talk_to_a_scheduler_that_is_not_the_right_one(tls, authority, client, tmp_path):
    """Not even one with a certificate of the same CA that is a host's, or that is not for the name asked for."""
    key = tls.keys["server"]
    for name, certificate in (
        ("late", authority.issue(key, days=-1)),
        ("host", authority.issue(key, side="client")),
        ("named", authority.issue(key, ip="127.0.0.1")),
    ):
        tls.write(name, as_pem(key, certificate))
    other = open_both(TlsFolder(tmp_path / "other", Authority("another CA")))[0]
    picky = open_unproved(tls, "client", server_name="10.1.2.3")
    for server, host, reason in (
        (open_unproved(tls, "server", server_cert_path="late"), client, "it has expired"),
        (open_unproved(tls, "server", server_cert_path="host"), client, "it is not made for this side"),
        (open_unproved(tls, "server", server_cert_path="named"), picky, "it is not for server_name"),
        (other, client, "another CA has signed it"),
    ):
        with OpenGate(server) as gate:
            told = gate.refusal(0, host)
            assert f"scheduler at 127.0.0.1:{gate.place[1]}: TLS: its certificate is" in told and reason in told
            assert "TLS: it refuses our certificate: " in gate.notes[-1]


def test_strangers_hold_up_nobody(secure_gate, client, monkeypatch):
    """One says nothing, one begins a handshake and stops, one speaks HTTP."""
    first_words = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client.context.wrap_bio(ssl.MemoryBIO(), first_words).do_handshake()
    streams = [socket.create_connection(secure_gate.place, timeout=10) for _ in range(3)]
    streams[1].sendall(first_words.read(100))
    streams[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
    wait_until(lambda: any("does not speak TLS" in note for note in secure_gate.notes), "HTTP is refused")
    secure_gate.let_in_both(client)
    monkeypatch.setattr(module, "GREETING_S", 0.0)
    wait_until(
        lambda: sum("nothing that makes it a host" in note for note in secure_gate.notes) == 2, "they are sent away"
    )
    for stream in streams:
        stream.close()
