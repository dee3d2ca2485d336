"""The port at which hosts come in, with TLS, over real sockets: who is let in, and who is told what."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runner import wait_until
from open_gate import OpenGate
from tls_files import PASSWORDS, Authority, TlsFolder, as_pem

from msrun.cluster.tls.identity import (
    Side,
    TlsIdentity,
    build_context,
    now_utc,
    open_identity,
    read_authority,
    read_key_pair,
)
from msrun.launch.fleet import gate as module
from msrun.launch.transport.sealed import SealedPipe
from msrun.planning.tls_spec import parse_tls_config


def open_unproved(tls: TlsFolder, side: Side, **changes: Any) -> TlsIdentity:
    """Return a side as it is, though `open_identity` might refuse it: its certificate expired after its start, say."""
    spec = parse_tls_config(tls.config(**changes).read_text(), "tls.json", str(tls.folder), PASSWORDS)
    pair = read_key_pair(spec, side)
    context = build_context(spec, side, pair, read_authority(spec, now_utc()))
    return TlsIdentity(side, context, spec.server_name, pair.certificate, ())


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
def gate(tls: TlsFolder, authority: Authority) -> Iterator[OpenGate]:
    """It knows a revocation list without entries of interest."""
    tls.write("crl", authority.revoke())
    with OpenGate(open_both(tls, crl_path="crl")[0]) as found:
        yield found


def test_what_a_host_says_arrives_as_it_was_said_and_no_other_way(gate: OpenGate, client: TlsIdentity) -> None:
    connection = gate.dial(0, client)
    assert connection.tls_version == "TLSv1.3"
    host, here = SealedPipe(connection, ""), SealedPipe(gate.let_in[0], "")
    data, sent, came = bytes(range(256)) * (1 << 14), 0, b""
    while len(came) < len(data):
        sent += host.write(data[sent:]) if sent < len(data) else 0
        came += here.read() or b""
    assert came == data
    with socket.socket(fileno=socket.dup(connection.fileno())) as wire:
        wire.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    wait_until(lambda: here.read() == b"", "the connection is over")
    assert here.stderr_text().startswith("TLS: decryption failed")


def test_host_without_tls_is_refused_at_once_on_both_sides(gate: OpenGate, client: TlsIdentity) -> None:
    reason = gate.refusal(0, None)
    assert reason == (
        "the scheduler has refused this host: it does not speak TLS; give --tls_config on all hosts, or on none"
    )
    assert gate.notes[-1].endswith(": it does not speak TLS; give --tls_config on all hosts, or on none")
    gate.let_in_both(client)


def test_scheduler_without_tls_is_refused_at_once_on_both_sides(client: TlsIdentity) -> None:
    with OpenGate(None) as gate:
        reason = gate.refusal(0, client)
        assert f"no connection with the scheduler at 127.0.0.1:{gate.place[1]}: it does not speak TLS; give" in reason
        assert gate.notes[-1].endswith(": it speaks TLS; give --tls_config on all hosts, or on none")
        gate.let_in_both()


def test_bad_certificate_of_a_host_is_refused_with_its_reason_and_the_job_goes_on(
    gate: OpenGate, tls: TlsFolder, client: TlsIdentity, authority: Authority, tmp_path: Path
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
        reason = gate.refusal(0, identity)
        assert "TLS: it refuses our certificate: " in reason and there in reason
        assert gate.notes[-1].endswith(f": TLS: its certificate is refused: {here}")
    gate.let_in_both(client)


def test_revoked_host_is_refused_and_the_job_goes_on(tls: TlsFolder, authority: Authority, client: TlsIdentity) -> None:
    key = tls.keys["client"]
    revoked = authority.issue(key)
    tls.write("own.pem", as_pem(key, revoked))
    tls.write("crl", authority.revoke([revoked]))
    with OpenGate(open_both(tls, crl_path="crl")[0]) as gate:
        assert gate.refusal(0, open_both(tls, client_cert_path="own.pem")[1]).endswith("certificate: it was revoked")
        assert gate.notes[-1].endswith("TLS: its certificate is refused: it was revoked")
        gate.let_in_both(client)


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
        with OpenGate(server) as gate:
            told = gate.refusal(0, host)
            assert f"no connection with the scheduler at 127.0.0.1:{gate.place[1]}: TLS: its certificate is" in told
            assert reason in told
            assert "TLS: it refuses our certificate: " in gate.notes[-1]


def test_strangers_hold_up_nobody(gate: OpenGate, client: TlsIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one begins a handshake and stops, one speaks HTTP."""
    first_words = client.open_session().take()
    streams = [socket.create_connection(gate.place, timeout=10) for _ in range(3)]
    streams[1].sendall(first_words[:100])
    streams[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
    wait_until(lambda: any("does not speak TLS" in note for note in gate.notes), "HTTP is refused")
    gate.let_in_both(client)
    monkeypatch.setattr(module, "GREETING_S", 0.0)
    wait_until(lambda: sum("nothing that makes it a host" in note for note in gate.notes) == 2, "they are sent away")
    for stream in streams:
        stream.close()
