"""TLS: certificates are judged before anything starts, and whatever a stranger sends is a reason and no more."""

import os
import socket
import ssl
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tls_files import PASSWORDS, Authority, TlsFolder, as_pem, new_key, small_rsa_key

from msrun.cluster.messages import NotUnderstood
from msrun.cluster.tls import TlsIdentity, TlsSocket, explain, open_identity
from msrun.errors import ClusterError, UsageError
from msrun.planning.settings import CIPHERS, parse_tls_config

SIDES = ("server", "client")
OTHER = {"server": "client", "client": "server"}


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def tls(tmp_path, authority):
    return TlsFolder(tmp_path, authority)


def open_side(tls, side, environ=PASSWORDS, **changes):
    config = tls.config(**changes)
    return open_identity(parse_tls_config(config.read_text(), "tls.json", str(tls.folder), environ), side)


def refusal(tls, side, environ=PASSWORDS, **changes):
    with pytest.raises(UsageError, match=r"\A--tls_config tls.json: \w+ /[^\n]+\Z") as caught:
        open_side(tls, side, environ, **changes)
    return str(caught.value)


def use(tls, side, key, certificate):
    """Write a side's file; return the change of the configuration."""
    tls.write("own.pem", as_pem(key, certificate))
    return {f"{side}_cert_path": "own.pem"}


@pytest.mark.parametrize("side", SIDES)
def test_good_files_give_a_strict_context(tls, side):
    before = set(os.listdir("/proc/self/fd"))
    identity = open_side(tls, side, cipher_list=CIPHERS[1])
    assert identity.describe().startswith(f"{side} CN={side} until 20") and identity.warnings == ()
    context = identity.context
    assert (context.security_level, context.verify_mode) == (3, ssl.CERT_REQUIRED)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    names = [cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] != "TLSv1.3"]
    assert names == [CIPHERS[1]]
    spec = replace(
        parse_tls_config(tls.config().read_text(), "tls.json", str(tls.folder), PASSWORDS), ciphers=("NONE",)
    )
    with pytest.raises(ClusterError, match="knows none of NONE; update it"):
        open_identity(spec, side)
    assert set(os.listdir("/proc/self/fd")) == before and sorted(os.listdir(tls.folder)) == [
        "ca.crt", "client.pem", "server.pem", "tls.json",
    ]  # fmt: skip


def test_a_key_needs_no_password(tls):
    assert open_side(tls, "client", {}, **use(tls, "client", tls.keys["client"], tls.certificates["client"]))


def test_password_may_be_in_a_file_that_nobody_else_can_read(tls):
    tls.write("pass", b"client secret\r\nmore\n")
    assert open_side(tls, "client", {}, client_password_file="pass")
    assert open_side(tls, "client", PASSWORDS, client_password_file="not there")  # the variable wins
    tls.write("pass", b"client secret\n", 0o640)
    assert "others may read it (mode 0640); chmod 600 /" in refusal(tls, "client", {}, client_password_file="pass")
    assert "/no: cannot be read (No such file" in refusal(tls, "client", {}, client_password_file="no")


@pytest.mark.parametrize("side", SIDES)
def test_wrong_and_missing_passwords_are_told_apart(tls, side):
    name = f"MSRUN_TLS_{side.upper()}_PASSWORD"
    wrong = refusal(tls, side, {name: "no"})
    assert f"{side}.pem: wrong password; set {name}, or name a file with {side}_password_file" in wrong
    assert "is encrypted, and there is no password" in refusal(tls, side, {})


DECRYPTED_TO_NO_KEY = b"""\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIH0MF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBDP/SB8/gzWoGz5IKJY
eELwAgIIADAMBggqhkiG9w0CCQUAMB0GCWCGSAFlAwQBKgQQ4Vyi5+/QvPLIvxEx
AmbC5ASBkO18eA+Yp6m/euAHzP0brvL/3DRIQ8h6I/SjqPEfaBl5P/GES9R4qHPW
nreY9RaToL2rm9jPgg/j0fu3XjvboX1W6NGXzWy1wMCnZ+s38CLWi41pXgxhOFxL
JPoQRUZTBGOTP9GKocZgQEv61Lj1ipOxQ1GRxayb8kJttzdEt2TjA8tVn2nu+bDA
2m5xk2SrbA==
-----END ENCRYPTED PRIVATE KEY-----
"""
"""With the password "no152", which is as wrong as "no"."""


def test_wrong_password_that_decrypts_to_something_is_still_a_wrong_password(tls):
    own = as_pem(None, tls.certificates["client"])
    tls.write("own.pem", DECRYPTED_TO_NO_KEY + own)
    for password in ("no", "no152"):
        assert "wrong password" in refusal(
            tls, "client", {"MSRUN_TLS_CLIENT_PASSWORD": password}, client_cert_path="own.pem"
        )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda tls: b"", "is empty"),
        (lambda tls: b"x" * ((1 << 20) + 1), "has more than"),
        (lambda tls: b"no certificate", "is no PEM; of a PKCS#12 file openssl pkcs12"),
        (lambda tls: tls.authority.pem, "holds no private key; put certificate and key into one PEM file"),
        (lambda tls: as_pem(tls.keys["client"], None), "holds no certificate"),
        (
            lambda tls: as_pem(new_key(), None)[:60] + b"\n-----END PRIVATE KEY-----\n" + tls.authority.pem,
            "cannot be read",
        ),
        (lambda tls: as_pem(new_key(), tls.certificates["client"]), "the key in it does not fit the certificate"),
    ],
)
def test_file_of_a_key_that_is_none_is_refused(tls, make, reason):
    tls.write("own", make(tls))
    assert reason in refusal(tls, "client", {}, client_cert_path="own")


def test_files_that_are_not_there_are_named(tls):
    for key in ("client_cert_path", "ca_cert_path", "crl_path"):
        reason = refusal(tls, "client", **{key: "gone"})
        assert f"{key} {tls.folder}/gone: cannot be read (No such file or directory)" in reason
    with pytest.raises(UsageError, match="server_cert_path: is missing; the host with the scheduler needs it"):
        open_side(tls, "server", server_cert_path=None)


@pytest.mark.parametrize("side", SIDES)
def test_certificate_that_the_other_side_would_refuse_is_refused_at_once(tls, authority, side):
    key, rsa_key, alone = tls.keys[side], small_rsa_key(), Authority("alone")
    for certificate, own_key, reason in (
        (authority.issue(key, days=-1), key, "has expired; have it renewed"),
        (authority.issue(key, begin_days=1), key, "is not valid yet; check the clock"),
        (authority.issue(key, side=OTHER[side]), key, "is not made for this side (extended key usage)"),
        (authority.issue(rsa_key), rsa_key, "the key is too small"),
        (Authority("another CA").issue(key), key, "is not from the CA in ca_cert_path"),
        (Authority("test CA").issue(key), key, "is not from the CA in ca_cert_path, only from one of that name"),
        (alone.certificate, alone.key, "is signed by itself"),
    ):
        assert f"{side}_cert_path {tls.folder}/own.pem: {reason}" in refusal(
            tls, side, **use(tls, side, own_key, certificate)
        )


def test_weak_or_wrong_authority_is_refused(tls):
    key = tls.keys["client"]
    for name, ca, reason in (
        ("weak.crt", Authority("weak", key=small_rsa_key()), "the CA's key is too small"),
        ("no.crt", Authority("none", is_ca=False), "ca_cert_path holds no CA certificate"),
    ):
        tls.write(name, ca.pem)
        assert reason in refusal(tls, "client", ca_cert_path=name, **use(tls, "client", key, ca.issue(key)))
    tls.write("not.crt", b"-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n")
    assert "holds no certificate that can be read" in refusal(tls, "client", ca_cert_path="not.crt")


@pytest.mark.parametrize("side", SIDES)
def test_revocation_list_is_held_to_its_dates_and_its_authority(tls, authority, side):
    other = Authority("another CA")
    for text, reason in (
        (authority.revoke([tls.certificates[side]]), f"{side}.pem: was revoked, says crl_path; get a new one"),
        (authority.revoke(days=-1), "crl_path is out of date; get the CA's newest"),
        (authority.revoke(begin_days=1), "later than now; check the clocks"),
        (other.revoke(), "crl_path holds no list of the CA that signed it"),
        (Authority("test CA").revoke(), "is not from the CA in ca_cert_path"),
        (b"-----BEGIN X509 CRL-----\nabc\n-----END X509 CRL-----\n", "holds no revocation list"),
        (authority.pem, "holds no revocation list"),
    ):
        tls.write("crl", text)
        assert reason in refusal(tls, side, crl_path="crl")
    tls.write("crl", authority.revoke([tls.certificates[OTHER[side]]]))
    assert open_side(tls, side, crl_path="crl")
    tls.write("ca.crt", authority.pem + other.pem)
    tls.write("crl", other.revoke())
    assert "crl_path holds no list of the CA that signed it" in refusal(tls, side, crl_path="crl")


def test_scheduler_has_to_have_the_name_that_is_asked_for(tls, authority):
    key = tls.keys["server"]
    change = use(tls, "server", key, authority.issue(key, ip="10.0.0.1"))
    assert open_side(tls, "server", server_name="10.0.0.1", **change)
    assert "own.pem: is not for server_name 10.0.0.2" in refusal(tls, "server", server_name="10.0.0.2", **change)
    assert "is not for server_name sched" in refusal(tls, "server", server_name="sched")


def test_what_expires_soon_is_warned_about(tls, authority):
    old = Authority("old CA", days=19.5)
    key = tls.keys["client"]
    tls.write("ca.crt", old.pem)
    change = use(tls, "client", key, old.issue(key, name="host-7\n", days=9.5))
    warnings = open_side(tls, "client", cert_expire_warning_time_in_day=20, **change).warnings
    assert [line.partition(": ")[2].partition(" expires on ")[0].partition(": ")[2] for line in warnings] == [
        "CN=host-7?", "CN=old CA",
    ]  # fmt: skip
    assert "in 9 days; have it renewed" in warnings[0] and "ca_cert_path" in warnings[1]
    warnings = open_side(tls, "client", cert_expire_warning_time_in_day=10, **change).warnings
    assert len(warnings) == 1


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    """Of scheduler and host."""
    tls = TlsFolder(tmp_path_factory.mktemp("tls"), Authority())
    spec = parse_tls_config(tls.config().read_text(), "tls.json", str(tls.folder), PASSWORDS)
    return open_identity(spec, "server"), open_identity(spec, "client")


@pytest.fixture
def wire(identities):
    """Scheduler and host at two ends of a wire, which has carried nothing yet."""
    with ExitStack() as stack:
        yield [stack.enter_context(end) for end in wrapped(*identities)]


def wrapped(server, client):
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(0.0)
    return server.wrap(ends[0]), client.wrap(ends[1])


def stranger(**settings):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode, context.sslsocket_class = False, ssl.CERT_NONE, TlsSocket
    for name, value in settings.items():
        setattr(context, name, value)
    return TlsIdentity("client", context, "", "", 0.0, ())


def attempt(action, *given):
    with suppress(BlockingIOError, ssl.SSLError):
        return action(*given)


def meet(server, client, here=b"hello host", there=b"here I am"):
    """Return what server and client have read, once both have shaken hands and sent everything."""
    unsent, read = {server: here, client: there}, {server: b"", client: b""}
    while read != {server: there, client: here}:
        for end in (client, server):
            unsent[end] = unsent[end][attempt(end.send, unsent[end]) or 0 :] if unsent[end] else b""
            read[end] += attempt(end.recv) or b""
    return read


def test_text_given_before_the_handshake_arrives_after_it(wire):
    meet(*wire)
    assert [end.version() for end in wire] == ["TLSv1.3"] * 2
    with pytest.raises(BlockingIOError):
        wire[0].recv()


def test_end_is_told_after_what_came_before(wire):
    server, client = wire
    meet(server, client)
    server.send(b"refused")
    server.close()
    client.suppress_ragged_eofs = False  # an end that is not told is a fault then
    assert [client.recv(), client.recv()] == [b"refused", b""]


def test_other_side_that_has_gone_without_a_word_is_an_end_and_no_fault(identities):
    here, there = socket.socketpair()
    there.settimeout(0.0)
    with identities[1].wrap(there) as client:
        attempt(client.send, b"here I am")
        assert here.recv(1 << 16), "its first words"
        here.close()
        attempt(client.send, b"here I am")
        assert client.recv() == b""


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize(
    ("settings", "cipher", "why"),
    [
        (
            {"minimum_version": ssl.TLSVersion.TLSv1, "maximum_version": ssl.TLSVersion.TLSv1_1},
            "ALL:@SECLEVEL=0",
            r"TLS: it speaks an older TLS than 1\.2",
        ),
        (
            {"maximum_version": ssl.TLSVersion.TLSv1_2},
            "ECDHE-ECDSA-AES128-SHA256",
            "TLS: no cipher suite in common",
        ),
    ],
    ids=["old version", "other suite"],
)
def test_version_and_suite_that_are_not_on_the_list_are_refused(settings, cipher, why, identities):
    other = stranger(**settings)
    other.context.set_ciphers(cipher)
    server, client = wrapped(identities[0], other)
    with server, client:
        attempt(client.send, b"here I am")
        with pytest.raises(NotUnderstood, match=why):
            server.recv()


def test_side_without_a_certificate_is_refused_and_told_so(identities):
    server, client = wrapped(identities[0], stranger())
    with server, client:
        for end in (client, server, client):
            attempt(end.send, b"text")
        with pytest.raises(NotUnderstood, match="TLS: it has no certificate; give it --tls_config"):
            server.recv()
        with pytest.raises(NotUnderstood, match="TLS: it refuses our certificate: there was none"):
            client.recv()


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.booleans())
def test_whatever_a_stranger_sends_is_not_understood_or_waited_on(identities, pieces, is_record):
    here, there = socket.socketpair()
    here.settimeout(0.0)
    there.settimeout(0.0)
    with identities[0].wrap(here) as server, there:
        try:
            for piece in pieces:
                there.sendall((b"\x16\x03\x01" + piece) if is_record else piece)
                attempt(server.send, b"secret")
                with suppress(BlockingIOError):
                    assert server.recv() == b""
        except NotUnderstood as error:
            assert "\n" not in str(error) and len(str(error)) < 200
        assert b"secret" not in (attempt(there.recv, 1 << 16) or b"")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        *((code, "another CA has signed it") for code in (7, 18, 19, 20, 21)),
        *((code, "clock is wrong") for code in (9, 10)),
        *((12, "crl_path is out of date here"), (23, "it was revoked"), (26, "it is not made for this side")),
        *((62, "it is not for server_name"), (64, "it is not for server_name"), (99, "what OpenSSL says")),
    ],
)
def test_refusal_of_a_certificate_is_said_in_words(code, why):
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_code, error.verify_message = code, "what OpenSSL says"
    assert explain(error).startswith("its certificate is refused: ") and explain(error).endswith(why)
