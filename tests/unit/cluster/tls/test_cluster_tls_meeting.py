"""Hosts and scheduler through TLS, over real sockets: who is let in, who is told what, and that nobody waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failure_reports import failed, fault_of, reason_of
from job_runner import wait_until
from tls_files import PASSWORDS, Authority, TlsFolder, as_pem

from msrun.cluster import coordinator_server as coordinator_module
from msrun.cluster.connection import Connection
from msrun.cluster.coordinator_server import CoordinatorServer, MeetingTerms
from msrun.cluster.host_link import HostLink
from msrun.cluster.hosts import HostRequest, Registry
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.own_thread import Inbox
from msrun.cluster.proof import PROTOCOL, Seal, hello, new_nonce, read_hello
from msrun.cluster.rendezvous import listen
from msrun.cluster.tls.identity import (
    Side,
    TlsIdentity,
    build_context,
    now_utc,
    open_identity,
    read_authority,
    read_key_pair,
)
from msrun.planning.record_json import encode_record
from msrun.planning.tls_spec import parse_tls_config

TOKEN = b"secret"
Hear = Callable[[str], dict[str, Any]]


def request(node_rank: int) -> HostRequest:
    return HostRequest(PROTOCOL, 2, 1, node_rank, f"h{node_rank}", f"10.0.0.{node_rank}", 0)


def open_unproved(tls: TlsFolder, side: Side, **changes: Any) -> TlsIdentity:
    """Return a side as it is, though `open_identity` might refuse it: its certificate expired after its start, say."""
    spec = parse_tls_config(tls.config(**changes).read_text(), "tls.json", str(tls.folder), PASSWORDS)
    pair = read_key_pair(spec, side)
    context = build_context(spec, side, pair, read_authority(spec, now_utc()))
    return TlsIdentity(side, context, spec.server_name, pair.certificate, ())


class Meeting:
    """A scheduler for two hosts of a worker each."""

    def __init__(self, tls: TlsIdentity | None, silence_s: float = 30.0) -> None:
        listener = listen("127.0.0.1", 0)
        self.place = ("127.0.0.1", listener.getsockname()[1])
        self.notes: list[str] = []
        self._links: list[tuple[HostLink, Inbox]] = []
        self._gone: list[HostLink] = []
        terms = MeetingTerms(TOKEN, "JOB", 4711, 60.0, silence_s, RestartPolicy(0), tls)
        self._coordinator = CoordinatorServer(listener, Registry(2, 0), terms, self.notes.append)
        self._coordinator.start()

    def close(self) -> None:
        for link, _ in self._links:
            if link not in self._gone:
                link.close()
        self._coordinator.close()
        for link, inbox in self._links:
            inbox.close()
            assert not link.is_alive()
        assert not self._coordinator.is_alive()

    def leave(self, link: HostLink) -> None:
        """Let a host go as if it had been ended."""
        link.close()
        self._gone.append(link)

    def join(self, node_rank: int, tls: TlsIdentity | None) -> tuple[HostLink, Hear]:
        """Start a host; the second value waits for a message of a kind."""
        inbox = Inbox()
        link = HostLink(self.place, TOKEN, lambda _: request(node_rank), inbox, limit_s=20, tls=tls)
        self._links.append((link, inbox))
        link.start()
        seen: list[dict[str, Any]] = []

        def hear(kind: str) -> dict[str, Any]:
            def find() -> dict[str, Any] | None:
                seen.extend(inbox.take())
                return next((message for message in seen if message["type"] == kind), None)

            return dict(wait_until(find, f"message {kind}; came: {seen}; notes: {self.notes}"))

        return link, hear

    def refusal(self, node_rank: int, tls: TlsIdentity | None) -> str:
        """Return why a host cannot take part; the scheduler's last note says it for its side."""
        count = len(self.notes)
        _, hear = self.join(node_rank, tls)
        reason = str(hear("refused")["reason"])
        wait_until(lambda: len(self.notes) > count, "the scheduler notes it")
        return reason


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(tmp_path: Path, authority: Authority) -> TlsFolder:
    return TlsFolder(tmp_path, authority)


def open_both(tls: TlsFolder, **changes: Any) -> tuple[TlsIdentity, TlsIdentity]:
    spec = parse_tls_config(tls.config(**changes).read_text(), "tls.json", str(tls.folder), PASSWORDS)
    return open_identity(spec, "server"), open_identity(spec, "client")


@pytest.fixture
def client(tls: TlsFolder) -> TlsIdentity:
    return open_both(tls)[1]


@pytest.fixture
def meeting(tls: TlsFolder, authority: Authority) -> Iterator[Meeting]:
    """It knows a revocation list without entries of interest."""
    tls.write("crl", authority.revoke())
    found = Meeting(open_both(tls, crl_path="crl")[0])
    yield found
    found.close()


def assign_two(meeting: Meeting, client: TlsIdentity) -> tuple[tuple[HostLink, Hear], tuple[HostLink, Hear]]:
    """Prove that the job goes on: two hosts come and are assigned."""
    first, second = meeting.join(0, client), meeting.join(1, client)
    assert [hear("assigned")["node_rank"] for _, hear in (first, second)] == [0, 1]
    return first, second


def test_hosts_are_assigned_hear_of_a_failure_and_of_the_end(meeting: Meeting, client: TlsIdentity) -> None:
    (first, hear_first), (second, hear_second) = assign_two(meeting, client)
    second.send(failed(0, fault_of(1, "r", 9)))
    assert hear_first("stop")["report"]["failure"]["exit_code"] == 9
    for link in (first, second):
        link.send({"type": "ended", "attempt": 0, "can_continue": True})
    assert [reason_of(hear("over")) for hear in (hear_first, hear_second)] == ["r", "r"]


def deafen(kind: type[threading.Thread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one side hear nothing more, as with a cable out; the other hears on, so that only the first can notice."""
    receive = Connection.receive

    def hear_nothing(self: Connection) -> list[bytes]:
        return [] if isinstance(threading.current_thread(), kind) else receive(self)

    monkeypatch.setattr(Connection, "receive", hear_nothing)


@pytest.mark.slow
def test_scheduler_notices_that_signs_of_life_through_tls_stay_away(
    tls: TlsFolder, client: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Meeting(open_both(tls)[0], silence_s=1.5)
    try:
        assign_two(found, client)
        beats: list[int] = []
        hear = HostLink._hear
        with monkeypatch.context() as patch:
            patch.setattr(HostLink, "_hear", lambda self, message: beats.append(1) or hear(self, message))
            wait_until(lambda: len(beats) > 3, "signs of life of the scheduler")
        assert not [note for note in found.notes if "lost" in note]
        deafen(CoordinatorServer, monkeypatch)
        wait_until(lambda: [note for note in found.notes if "no sign of life" in note], "it is noticed")
        monkeypatch.undo()
    finally:
        found.close()


def test_host_notices_that_signs_of_life_through_tls_stay_away(
    tls: TlsFolder, client: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Meeting(open_both(tls)[0], silence_s=1.5)
    try:
        (_, hear), _ = assign_two(found, client)
        deafen(HostLink, monkeypatch)
        assert "has given no sign of life" in hear("lost")["reason"]
        monkeypatch.undo()
    finally:
        found.close()


def test_host_that_goes_is_told_to_the_others(meeting: Meeting, client: TlsIdentity) -> None:
    (_, hear_first), (second, _) = assign_two(meeting, client)
    meeting.leave(second)
    assert "lost node 1 (h1, 10.0.0.1), which has closed" in reason_of(hear_first("stop"))


def test_host_whose_words_were_changed_on_the_way_is_lost(meeting: Meeting, client: TlsIdentity) -> None:
    with socket.create_connection(meeting.place, timeout=10) as stream:
        host = Connection(stream, tls=client.open_session())
        nonce = new_nonce()
        host.send_plain(hello(nonce))
        (greeting,) = wait_until(host.receive, "a greeting")
        said = read_hello(greeting)
        assert said is not None
        host.agree(Seal(TOKEN, said[1], nonce, is_scheduler=False))
        host.send({"type": "register", "request": encode_record(request(1))})
        _, hear = meeting.join(0, client)
        hear("assigned")
        stream.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        reason = reason_of(hear("stop"))
    assert "lost node 1 (h1, 10.0.0.1), which has sent what cannot be read (TLS: decryption failed" in reason


def test_host_without_tls_is_refused_at_once_on_both_sides(meeting: Meeting, client: TlsIdentity) -> None:
    reason = meeting.refusal(0, None)
    assert reason == (
        "the scheduler has refused this host: it does not speak TLS; give --tls_config on all hosts, or on none"
    )
    assert meeting.notes[-1].endswith(": it does not speak TLS; give --tls_config on all hosts, or on none")
    assign_two(meeting, client)


def test_scheduler_without_tls_is_refused_at_once_on_both_sides(client: TlsIdentity) -> None:
    found = Meeting(None)
    try:
        reason = found.refusal(0, client)
        assert f"no connection with the scheduler at 127.0.0.1:{found.place[1]}: it does not speak TLS; give" in reason
        assert found.notes[-1].endswith(": it speaks TLS; give --tls_config on all hosts, or on none")
        for node_rank in (0, 1):
            _, hear = found.join(node_rank, None)
        hear("assigned")
    finally:
        found.close()


def test_bad_certificate_of_a_host_is_refused_with_its_reason_and_the_job_goes_on(
    meeting: Meeting, tls: TlsFolder, client: TlsIdentity, authority: Authority, tmp_path: Path
) -> None:
    key = tls.keys["client"]
    stranger = TlsFolder(tmp_path / "stranger", Authority("another CA"))
    stranger.write("own.pem", as_pem(stranger.keys["client"], stranger.certificates["client"]))
    for name, certificate in (
        ("late.pem", authority.issue(key, days=-1)),
        ("early.pem", authority.issue(key, begin_days=1)),
        ("server.pem", authority.issue(key, side="server")),
    ):
        tls.write(name, as_pem(key, certificate))
    for identity, there, here in (
        (open_unproved(tls, "client", client_cert_path="late.pem"), "expired", "it has expired, or a clock is wrong"),
        (
            open_unproved(tls, "client", client_cert_path="early.pem"),
            "not valid",
            "it is not valid yet, or a clock is wrong",
        ),
        (open_unproved(tls, "client", client_cert_path="server.pem"), "not made for", "it is not made for this side"),
        (
            open_unproved(tls, "client", client_cert_path="stranger/own.pem"),
            "another CA has signed it",
            "another CA has signed it",
        ),
    ):
        reason = meeting.refusal(0, identity)
        assert "TLS: it refuses our certificate: " in reason and there in reason
        assert meeting.notes[-1].endswith(f": TLS: its certificate is refused: {here}")
    assign_two(meeting, client)


def test_revoked_host_is_refused_and_the_job_goes_on(tls: TlsFolder, authority: Authority, client: TlsIdentity) -> None:
    key = tls.keys["client"]
    revoked = authority.issue(key)
    tls.write("own.pem", as_pem(key, revoked))
    tls.write("crl", authority.revoke([revoked]))
    found = Meeting(open_both(tls, crl_path="crl")[0])
    try:
        assert found.refusal(0, open_both(tls, client_cert_path="own.pem")[1]).endswith("certificate: it was revoked")
        assert found.notes[-1].endswith("TLS: its certificate is refused: it was revoked")
        assign_two(found, client)
    finally:
        found.close()


def test_host_does_not_talk_to_a_scheduler_that_is_not_the_right_one(
    tls: TlsFolder, authority: Authority, client: TlsIdentity, tmp_path: Path
) -> None:
    """Not even one with a certificate of the same CA that is a host's, or that is not for the name asked for."""
    key = tls.keys["server"]
    for name, certificate in (("late", authority.issue(key, days=-1)), ("host", authority.issue(key, side="client"))):
        tls.write(name, as_pem(key, certificate))
    tls.write("named", as_pem(key, authority.issue(key, ip="127.0.0.1")))
    other = open_both(TlsFolder(tmp_path / "other", Authority("another CA")))[0]
    picky = open_unproved(tls, "client", server_name="10.1.2.3")
    for server, host, reason in (
        (open_unproved(tls, "server", server_cert_path="late"), client, "it has expired"),
        (open_unproved(tls, "server", server_cert_path="host"), client, "it is not made for this side"),
        (open_unproved(tls, "server", server_cert_path="named"), picky, "it is not for server_name"),
        (other, client, "another CA has signed it"),
    ):
        found = Meeting(server)
        try:
            told = found.refusal(0, host)
            assert f"no connection with the scheduler at 127.0.0.1:{found.place[1]}: TLS: its certificate is" in told
            assert reason in told
            assert "TLS: it refuses our certificate: " in found.notes[-1]
        finally:
            found.close()


def test_strangers_hold_up_nobody(meeting: Meeting, client: TlsIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one begins a handshake and stops, one speaks HTTP."""
    first_words = client.open_session().take()
    streams = [socket.create_connection(meeting.place, timeout=10) for _ in range(3)]
    streams[1].sendall(first_words[:100])
    streams[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
    wait_until(lambda: any("does not speak TLS" in note for note in meeting.notes), "HTTP is refused")
    assign_two(meeting, client)
    monkeypatch.setattr(coordinator_module, "GREETING_S", 0.0)
    wait_until(lambda: sum("nothing that makes it a host" in note for note in meeting.notes) == 2, "they are sent away")
    for stream in streams:
        stream.close()


def test_long_messages_pass_a_connection_that_takes_little_at_once(tls: TlsFolder) -> None:
    """A list of thousands of hosts, to one that does not read yet: the sender does not wait, and nothing is lost."""
    identities = open_both(tls)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, reader = (
        Connection(ours, tls=identities[0].open_session()),
        Connection(theirs, tls=identities[1].open_session()),
    )
    text = b"x" * (1 << 20)
    reader.trust()
    sender.send_plain(text)
    found: list[bytes] = []
    while not found:
        reader.flush()
        sender.receive()
        found = reader.receive()
        sender.flush()
    assert found == [text] and not sender.has_unsent
    sender.close()
    assert theirs.recv(1, socket.MSG_PEEK)  # it says good-bye
    assert reader.receive() == [] and reader.receive() == [] and reader.is_closed
    reader.close()
