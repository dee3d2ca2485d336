"""The place where hosts meet, over real sockets: who proves nothing gets nothing, and costs the job nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from failure_reports import failed, fault_of, reason_of
from job_runner import wait_until

from msrun.cluster import coordinator_server as module
from msrun.cluster.coordinator_server import CoordinatorServer, MeetingTerms
from msrun.cluster.host_link import HostLink
from msrun.cluster.hosts import HostRequest, Registry
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.messages import HEADER, FrameBuffer, decode_body, encode_body, encode_message, frame
from msrun.cluster.own_thread import Inbox
from msrun.cluster.proof import PROTOCOL, Seal, derived_token, hello, new_nonce, read_hello
from msrun.cluster.rendezvous import listen
from msrun.planning.record_json import encode_record

TOKEN = b"secret"


def request(node_rank: int) -> HostRequest:
    return HostRequest(PROTOCOL, 2, 1, node_rank, f"h{node_rank}", f"10.0.0.{node_rank}", 0)


class Meeting:
    """A coordinator for two hosts of a worker each."""

    def __init__(self, silence_s: float = 30.0, cluster_time_out_s: float = 60.0) -> None:
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.notes: list[str] = []
        self.inboxes: list[Inbox] = []
        self.links: list[HostLink] = []
        terms = MeetingTerms(TOKEN, "JOB", 4711, cluster_time_out_s, silence_s, RestartPolicy(0))
        self.coordinator = CoordinatorServer(listener, Registry(2, 0), terms, self.notes.append)
        self.coordinator.start()

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.coordinator.close()
        for inbox in self.inboxes:
            inbox.close()
        assert not self.coordinator.is_alive() and not any(link.is_alive() for link in self.links)

    def join(self, node_rank: int, token: bytes = TOKEN) -> tuple[HostLink, Callable[[str], dict[str, Any]]]:
        """Start a link; the second value waits for a message of a kind."""
        inbox = Inbox()
        link = HostLink(("127.0.0.1", self.port), token, lambda _: request(node_rank), inbox, limit_s=20)
        self.inboxes.append(inbox)
        self.links.append(link)
        link.start()
        seen: list[dict[str, Any]] = []

        def await_kind(kind: str) -> dict[str, Any]:
            def find() -> dict[str, Any] | None:
                seen.extend(inbox.take())
                return next((message for message in seen if message["type"] == kind), None)

            return dict(wait_until(find, f"message {kind}"))

        return link, await_kind

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    found = Meeting()
    yield found
    found.close()


class Peer:
    """One who speaks to the scheduler byte by byte: a stranger, or a host that means harm."""

    def __init__(self, stream: socket.socket, token: bytes = TOKEN) -> None:
        self._stream = stream
        self._frames = FrameBuffer(1 << 20)
        self._read: list[bytes] = []
        greeting = read_hello(self.read())
        assert greeting is not None and greeting[0] == PROTOCOL
        own = new_nonce()
        self.seal = Seal(token, greeting[1], own, is_scheduler=False)
        self.hello = frame(hello(own))

    def read(self) -> bytes:
        """Return the next body; empty at the end of the stream."""
        while not self._read:
            try:
                data = self._stream.recv(4096)
            except ConnectionResetError:  # what it sent was not read to the end
                data = b""
            if not data:
                return b""
            self._read += self._frames.feed(data)
        return self._read.pop(0)

    def say(self, body: bytes) -> None:
        """Send a body with its proof."""
        with contextlib.suppress(OSError):
            self._stream.sendall(frame(self.seal.close(body)))

    def register(self, node_rank: int) -> None:
        """Become a host."""
        self._stream.sendall(self.hello)
        self.say(encode_body({"type": "register", "request": encode_record(request(node_rank))}))
        accepted = decode_body(self.seal.open(self.read()))
        assert accepted["type"] == "accepted"

    def read_to_end(self) -> None:
        """Wait until the scheduler hangs up."""
        while self.read():
            pass


def test_hosts_are_assigned_hear_of_a_failure_and_of_the_end(meeting: Meeting) -> None:
    (first, hear_first), (second, hear_second) = meeting.join(0), meeting.join(1)
    assigned = [hear("assigned") for hear in (hear_first, hear_second)]
    assert [message["node_rank"] for message in assigned] == [0, 1]
    assert {(message["job_id"], message["store_port"]) for message in assigned} == {("JOB", 4711)}
    for hear in (hear_first, hear_second):
        assert [host["ranks"] for host in hear("fleet")["hosts"]] == [[[0, 1]], [[1, 1]]]
    second.send(failed(0, fault_of(1, "r", 9)))
    assert hear_first("stop")["report"]["failure"]["exit_code"] == 9
    for link in (first, second):
        link.send({"type": "ended", "attempt": 0, "can_continue": True})
    assert [reason_of(hear("over")) for hear in (hear_first, hear_second)] == ["r", "r"]


def test_host_that_waits_hears_now_and_then_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_LINE_S", 0.1)
    with contextlib.closing(Meeting()) as meeting:
        assert "1 of 2" in meeting.join(0)[1]("waiting")["text"]


def test_who_comes_at_once_hears_nothing_of_waiting(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    tell_all = meeting.coordinator._tell_all
    monkeypatch.setattr(meeting.coordinator, "_tell_all", lambda m: (said.append(m["type"]), tell_all(m)))
    (_, hear_first), (_, hear_second) = meeting.join(0), meeting.join(1)
    assert hear_first("assigned") and hear_second("assigned")
    assert "waiting" not in said


def test_host_that_goes_is_told_to_the_others(meeting: Meeting) -> None:
    (_, hear_first), (second, hear_second) = meeting.join(0), meeting.join(1)
    hear_second("assigned")
    second.close()
    meeting.links.remove(second)
    assert "lost node 1 (h1, 10.0.0.1), which has closed" in reason_of(hear_first("stop"))


NESTED = b'{"type":"register","request":' + b"[" * 980 + b"]" * 980 + b"}"
HELLO = frame(hello("0" * 64))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(1 << 31) + b"x",
        HEADER.pack(0),
        encode_message({"type": "ended", "attempt": 0}),
        encode_message({"type": "hello", "protocol": 2, "nonce": "0" * 64}),
        HELLO + HEADER.pack(0),
        HELLO + encode_message({"type": "register", "request": encode_record(request(0))}),
        HELLO + frame(b"0" * 32 + encode_body({"type": "register", "request": encode_record(request(0))})),
        HELLO + frame(NESTED),
        HELLO + HELLO,
        HEADER.pack(8000) + b"[" * 8000,
        HEADER.pack(2) + b"\xff\xfe",
    ],
)
def test_stranger_is_refused_and_the_job_goes_on(meeting: Meeting, said: bytes) -> None:
    with meeting.stranger() as stream:
        peer = Peer(stream)
        stream.sendall(said)
        assert peer.read()[:8] in (b"refused ", b"")
    wait_until(lambda: any(note.startswith("refused 127.0.0.1:") for note in meeting.notes), "the refusal is told")
    (_, hear), _ = meeting.join(0), meeting.join(1)
    hear("assigned")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        NESTED,
        b'{"type":"register"}',
        b'{"type":"register","request":{"protocol":4,"name":%s}}' % (b"[" * 20 + b"]" * 20),
        b'{"type":"register","request":{"protocol":%s}}' % (b"9" * 4000),
        b'{"type":"register","request":{"protocol":4,"worker_num":true}}',
    ],
)
def test_one_who_knows_the_token_and_registers_as_nothing_is_refused(meeting: Meeting, said: bytes) -> None:
    with meeting.stranger() as stream:
        peer = Peer(stream)
        stream.sendall(peer.hello)
        peer.say(said)
        assert peer.read().startswith(b"refused ")
    (_, hear), _ = meeting.join(0), meeting.join(1)
    hear("assigned")


@pytest.mark.parametrize(
    "said",
    [
        b"[]",
        b'{"type":"failed","attempt":0,"report":{"failure":{"a":' + b"[" * 970 + b"]" * 970 + b"}}}",
        b'{"type":"failed","attempt":%s}' % (b"9" * 5000),
        b"\xff" * 100,
    ],
)
def test_host_that_says_what_cannot_be_read_is_lost_alone(meeting: Meeting, said: bytes) -> None:
    with meeting.stranger() as stream:
        peer = Peer(stream)
        peer.register(1)
        _, hear = meeting.join(0)
        hear("assigned")
        peer.say(said)
        assert "has sent what cannot be read" in reason_of(hear("stop"))


def test_message_that_was_heard_before_is_not_heard_again(meeting: Meeting) -> None:
    """What a host has sent cannot be sent again by somebody in between, on the same connection or on another."""
    with meeting.stranger() as stream:
        peer = Peer(stream)
        peer.register(1)
        _, hear = meeting.join(0)
        hear("assigned")
        once = frame(peer.seal.close(encode_body({"type": "beat"})))
        stream.sendall(once + once)
        assert "without the proof that it is the next of this connection" in reason_of(hear("stop"))


def test_one_address_cannot_hold_more_than_a_few_connections(meeting: Meeting) -> None:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(meeting.stranger()) for _ in range(3 * module.MAX_STRANGERS_OF_ONE)]
        peers = [Peer(stream) for stream in streams]
        peers[0].read_to_end()  # the oldest made room
        wait_until(lambda: len(meeting.coordinator._strangers) <= module.MAX_STRANGERS_OF_ONE, "the others are closed")
        (_, hear), _ = meeting.join(0), meeting.join(1)
        hear("assigned")


def test_where_there_is_no_room_those_who_come_wait_and_silent_ones_go(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 4)
    monkeypatch.setattr(module, "PRESSED_S", 0.2)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(meeting.stranger())
        (_, hear), _ = meeting.join(0), meeting.join(1)
        hear("assigned")
        assert len(meeting.coordinator._strangers) <= 4


def greets(stream: socket.socket) -> bool:
    """Return whether the scheduler has taken a connection."""
    stream.settimeout(0.0)
    try:
        return bool(stream.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@contextlib.contextmanager
def full_house(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, ...]]:
    """Yield two strangers for whom there is room, and one who waits."""
    monkeypatch.setattr(module, "MAX_STRANGERS", 2)
    with meeting.stranger() as first, meeting.stranger() as second:
        wait_until(lambda: greets(first) and greets(second), "two have been taken")
        with meeting.stranger() as third:
            wait_until(lambda: not meeting.coordinator._is_listening, "there is no room for a third one")
            meeting.coordinator._next_beat = 1e12  # a beat lets another one come in any case
            assert not greets(third)
            for stream in (first, second, third):
                stream.settimeout(10)
            yield first, second, third


def test_stranger_who_becomes_a_host_makes_room_for_another(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRESSED_S", 1e9)
    with full_house(meeting, monkeypatch) as (first, _, third):
        Peer(first).register(1)
        wait_until(lambda: greets(third), "the next one is taken")
        assert len(meeting.coordinator._strangers) == 2, "a host is no stranger"


def test_stranger_who_leaves_makes_room_for_another(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRESSED_S", 1e9)
    with full_house(meeting, monkeypatch) as (_, second, third):
        second.close()
        wait_until(lambda: greets(third), "the next one is taken")


def test_stranger_who_has_said_nothing_for_a_moment_makes_room(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 2)
    monkeypatch.setattr(module, "PRESSED_S", 0.0)
    with meeting.stranger() as first, meeting.stranger() as second:
        wait_until(lambda: greets(first) and greets(second), "two have been taken")
        with meeting.stranger() as third:
            wait_until(lambda: greets(third), "the third is taken")
            first.settimeout(10)
            Peer(first).read_to_end()  # the oldest
            assert len(meeting.coordinator._strangers) == 2


def test_host_with_a_wrong_token_is_refused_on_both_sides(meeting: Meeting) -> None:
    _, hear = meeting.join(0, b"left")
    assert "the scheduler has refused this host: wrong token" in hear("refused")["reason"]
    wait_until(lambda: any("wrong token" in note for note in meeting.notes), "a note of the wrong token")


def test_those_who_say_nothing_are_sent_away(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GREETING_S", 0.0)
    with meeting.stranger() as stream:
        Peer(stream).read_to_end()
    said = "nothing that makes it a host of this job"
    wait_until(lambda: any(said in note for note in meeting.notes), "the refusal is told")


def flood(meeting: Meeting, source: str = "127.0.0.1") -> None:
    """Be refused from an address, four times."""
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", meeting.port), 10, (source, 0)) as stream:
            stream.sendall(b"garbage!")
            while stream.recv(4096):
                pass


def test_flood_of_strangers_fills_no_record_and_hides_no_host(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_NOTES_OF_ONE", 2)
    monkeypatch.setattr(module, "MAX_NOTED", 2)
    flood(meeting)
    assert [note.partition(" ")[0] for note in meeting.notes] == ["refused", "refused", "127.0.0.1"]
    flood(meeting, "127.0.0.2")
    flood(meeting, "127.0.0.3")
    assert len(meeting.notes) == 6 and not any("127.0.0.3" in note for note in meeting.notes)
    for number, node_rank in enumerate((0, 0)):  # the second has the node_rank of the first, and knows the token
        meeting.join(node_rank)[1]("refused" if number else "registered")
    wait_until(lambda: any("--node_rank 0 is taken" in note for note in meeting.notes), "a note of the host")


def test_time_limit_is_told_with_who_came() -> None:
    found = Meeting(cluster_time_out_s=0.2)
    try:
        _, hear = found.join(0)
        called_off = hear("called_off")
        assert called_off["exit_code"] == 124
        assert called_off["reason"] == (
            "--cluster_time_out 0.2: 1 of 2 registered, missing: rank 1, from node 1 on; "
            "came: node 0 (h0, 10.0.0.0) with 1"
        )
    finally:
        found.close()


def test_host_without_a_sign_of_life_is_lost() -> None:
    """It keeps its connection, as one does whose cable is out."""
    found = Meeting(silence_s=0.3)
    try:
        with found.stranger() as stream:
            Peer(stream).register(1)
            _, hear = found.join(0)
            reason = reason_of(hear("stop")) if hear("assigned") else ""
            assert "lost node 1 (h1, 10.0.0.1), which has given no sign of life" in reason
    finally:
        found.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is no msrun scheduler"),
        (hello("0" * 64).replace(b":%d," % PROTOCOL, b":99,"), "speaks protocol 99, this one"),
        (hello("0" * 64) + b" ", "is no msrun scheduler: it does not say hello"),
        (encode_body({"type": "assigned", "hosts": []}), "is no msrun scheduler"),
        (b"refused \x1b[2J\n", "refused this host: ?[2J?"),
        (b"[" * 5000, "is no msrun scheduler"),
    ],
)
def test_host_does_not_trust_whoever_answers(answer: bytes, reason: str) -> None:
    inbox = Inbox()
    with listen("127.0.0.1", 0) as listener:
        link = HostLink(listener.getsockname()[:2], TOKEN, lambda _: request(0), inbox, limit_s=20)
        link.start()
        stream, _ = listener.accept()
        with stream:
            stream.sendall(frame(answer))
            (message,) = wait_until(inbox.take, "an answer")
            assert message["type"] == "refused" and reason in message["reason"]
            link.close()
    inbox.close()


def test_host_does_not_trust_a_scheduler_without_the_token() -> None:
    inbox = Inbox()
    with listen("127.0.0.1", 0) as listener:
        link = HostLink(listener.getsockname()[:2], TOKEN, lambda _: request(0), inbox, limit_s=20)
        link.start()
        stream, _ = listener.accept()
        with stream:
            seal = Seal(b"another", "0" * 64, "0" * 64, is_scheduler=True)
            accepted = encode_body({"type": "accepted", "beat_s": 1, "silence_s": 1})
            stream.sendall(frame(hello("0" * 64)) + frame(seal.close(accepted)))
            (message,) = wait_until(inbox.take, "an answer")
            assert message["type"] == "refused" and "does not know this job's token" in message["reason"]
            link.close()
    inbox.close()


def test_host_shows_another_nonce_at_every_try() -> None:
    inbox = Inbox()
    with listen("127.0.0.1", 0) as listener:
        link = HostLink(listener.getsockname()[:2], TOKEN, lambda _: request(0), inbox, limit_s=20)
        link.start()
        nonces = []
        for _ in range(2):
            stream, _ = listener.accept()
            with stream:
                (body,) = FrameBuffer(1 << 10).feed(stream.recv(1 << 10))
                nonces.append(read_hello(body))
        link.close()
    inbox.close()
    assert None not in nonces and nonces[0] != nonces[1]


@pytest.mark.parametrize("has_begun", [False, True])
def test_fault_of_the_scheduler_ends_the_job_under_its_own_name(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    faults: list[BaseException] = []
    monkeypatch.setattr(meeting.coordinator, "_record_fault", faults.append)
    _, hear = meeting.join(0)
    hear("registered")
    if has_begun:
        meeting.join(1)
        hear("assigned")
    slips = [KeyError("slip")]
    look = meeting.coordinator._look_at_clock

    def fail() -> None:
        if slips:
            raise slips.pop()
        look()

    monkeypatch.setattr(meeting.coordinator, "_look_at_clock", fail)
    told = hear("stop")["report"]["failure"] if has_begun else hear("called_off")
    assert told["reason"] == (
        "the scheduler's host: msrun itself failed: KeyError: 'slip'; its traceback is in scheduler.log"
    )
    assert told["exit_code"] == 3 and [str(fault) for fault in faults] == ["'slip'"]


def test_fault_of_a_host_is_no_loss_of_the_scheduler(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[BaseException] = []
    link, hear = meeting.join(0)
    monkeypatch.setattr(link, "_record_fault", faults.append)
    hear("registered")
    monkeypatch.setattr(link, "_send_rest", lambda _: None)
    link.send({"type": "event", "text": object()})
    assert hear("lost")["reason"].startswith("msrun itself failed: TypeError: ")
    assert len(faults) == 1


def test_derived_token_is_the_same_for_those_who_were_told_the_same() -> None:
    assert derived_token(8118) == derived_token(8118) != derived_token(8119)
    assert new_nonce() != new_nonce()


def test_loop_wakes_for_the_moment_that_comes_first() -> None:
    """By itself, without a beat that would come anyway."""
    with listen("127.0.0.1", 0) as listener:
        terms = MeetingTerms(TOKEN, "JOB", 4711, 5.0, 30.0, RestartPolicy(0))
        made = CoordinatorServer(listener, Registry(2, 0), terms, lambda _: None)
        made._next_beat = made._next_line = 1e12
        assert 4.0 < made._time_left() <= 5.0, "the time limit"
        made._next_line = made._begin + 3.0
        assert 2.0 < made._time_left() <= 3.0, "the line about who is missing"
        made._ends_at = made._begin + 2.0
        assert 1.0 < made._time_left() <= 2.0, "the end"
        made._next_beat = 0.0
        assert made._time_left() == 0.0
        made._wake.close()
