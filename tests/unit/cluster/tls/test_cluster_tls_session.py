"""TLS apart from sockets: nothing waits, nothing is lost, and whatever a stranger sends is a reason and no more."""

from __future__ import annotations

import json
import secrets
import ssl
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tls_files import PASSWORDS, Authority, TlsFolder

from msrun.cluster.messages import NotUnderstood
from msrun.cluster.tls.identity import TlsIdentity, open_identity
from msrun.cluster.tls.session import TlsSession, explain
from msrun.planning.tls_spec import parse_tls_config


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsIdentity, TlsIdentity]:
    """Of scheduler and host."""
    tls = TlsFolder(tmp_path_factory.mktemp("tls"), Authority())
    spec = parse_tls_config(tls.config().read_text(), "tls.json", str(tls.folder), PASSWORDS)
    return open_identity(spec, "server"), open_identity(spec, "client")


def open_both(identities: tuple[TlsIdentity, TlsIdentity]) -> tuple[TlsSession, TlsSession]:
    server, client = (identity.open_session() for identity in identities)
    carry(server, client)
    assert server.is_open and client.is_open
    return server, client


def carry(server: TlsSession, client: TlsSession, piece: int = 1 << 20) -> tuple[bytes, bytes]:
    """Carry everything that is under way, `piece` bytes at once; return what server and client have read."""
    read = {server: b"", client: b""}
    moved = True
    while moved:
        moved = False
        for one, other in ((server, client), (client, server)):
            data = one.take()
            moved |= bool(data)
            for begin in range(0, len(data), piece):
                read[other] += other.receive(data[begin : begin + piece])
    return read[server], read[client]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_text_sent_before_the_handshake_arrives_whole_whatever_the_pieces(
    identities: tuple[TlsIdentity, TlsIdentity], piece: int
) -> None:
    server, client = (identity.open_session() for identity in identities)
    server.send(b"hello ")
    server.send(b"host")
    client.send(b"here I am")
    assert carry(server, client, piece) == (b"here I am", b"hello host")


def test_long_text_is_read_to_the_end_at_once(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    server, client = open_both(identities)
    text = secrets.token_bytes(3 << 20)
    client.send(text)
    data = client.take()
    assert text[:64] not in data
    assert server.receive(data) == text


def test_end_is_told_once_and_what_came_before_is_kept(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    server, client = open_both(identities)
    server.send(b"refused")
    server.end()
    server.end()
    server.send(b"too late")
    assert client.receive(server.take()) == b"refused"
    assert client._object.read(1) == b""  # the end, and not a want of more


def test_changed_bytes_are_noticed(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    server, client = open_both(identities)
    client.send(b"stop the job")
    data = bytearray(client.take())
    data[-1] ^= 1
    with pytest.raises(NotUnderstood, match="TLS: decryption failed or bad record mac"):
        server.receive(bytes(data))
    server.send(b"this goes nowhere")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_version_is_the_newest_and_the_old_ones_are_refused(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    assert [session.version for session in open_both(identities)] == ["TLSv1.3"] * 2
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(NotUnderstood, match=r"TLS: it speaks an older TLS than 1\.2"):
        identities[0].open_session().receive(TlsSession(context, is_server=False).take())


def test_suite_that_is_not_on_the_list_is_refused(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-ECDSA-AES128-SHA256")
    with pytest.raises(NotUnderstood, match="TLS: no cipher suite in common"):
        identities[0].open_session().receive(TlsSession(context, is_server=False).take())


def test_tls_1_2_works_with_each_allowed_suite_that_fits_the_key(tmp_path: Path) -> None:
    tls = TlsFolder(tmp_path, Authority())
    for name in ("ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-CHACHA20-POLY1305", "ECDHE-ECDSA-AES128-CCM"):
        text = tls.config(cipher_list=name).read_text()
        spec = parse_tls_config(text, "tls.json", str(tls.folder), PASSWORDS)
        pair = open_identity(spec, "server"), open_identity(spec, "client")
        pair[1].context.maximum_version = ssl.TLSVersion.TLSv1_2
        _, client = open_both(pair)
        assert client._object.cipher()[:2] == (name, "TLSv1.2")


def test_side_without_a_certificate_is_refused_and_told_so(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client, server = TlsSession(context, is_server=False), identities[0].open_session()
    server.receive(client.take())
    client.receive(server.take())
    with pytest.raises(NotUnderstood, match="TLS: it has no certificate; give it --tls_config"):
        server.receive(client.take())
    with pytest.raises(NotUnderstood, match="TLS: it refuses our certificate: there was none"):
        client.receive(server.take())


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.booleans())
def test_whatever_a_stranger_sends_is_not_understood_or_waited_on(
    identities: tuple[TlsIdentity, TlsIdentity], pieces: list[bytes], is_record: bool
) -> None:
    session = identities[0].open_session()
    session.send(b"secret")
    try:
        for piece in pieces:
            assert session.receive((b"\x16\x03\x01" + piece) if is_record else piece) == b""
    except NotUnderstood as error:
        assert "\n" not in str(error) and len(str(error)) < 200
    assert not session.is_open and b"secret" not in session.take()


def test_identity_can_be_opened_for_many_connections(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    pairs = [open_both(identities) for _ in range(5)]
    for number, (server, client) in enumerate(pairs):
        client.send(json.dumps(number).encode())
        assert carry(server, client)[0] == str(number).encode()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        *((code, "another CA has signed it") for code in (7, 18, 19, 20, 21)),
        *((code, "clock is wrong") for code in (9, 10)),
        (12, "crl_path is out of date here"),
        (23, "it was revoked"),
        (26, "it is not made for this side"),
        *((code, "it is not for server_name") for code in (62, 64)),
        (99, "what OpenSSL says"),
    ],
)
def test_refusal_of_a_certificate_is_said_in_words(code: int, why: str) -> None:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_code, error.verify_message = code, "what OpenSSL says"
    assert explain(error).startswith("its certificate is refused: ") and explain(error).endswith(why)
