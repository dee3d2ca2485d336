"""TLS of the connections between hosts and scheduler, for jobs with --tls_config only: this host's proof of who it is,
looked at as the others will look at it before anything starts, and the session of one connection."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from msrun.cluster.messages import NO_TLS, NotUnderstood
from msrun.errors import ClusterError, UsageError, refused_as
from msrun.planning.record import Record
from msrun.planning.settings import CLIENT_PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE, TlsSpec, check_private
from ranktable.files import read_at_most

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Side = Literal["server", "client"]
MAX_FILE_BYTES = 1 << 20
GIVE_ANOTHER = "give a file that is there"
PEM = b"-----BEGIN "
_PEM_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----")
_VARIABLES = {"server": SERVER_PASSWORD_VARIABLE, "client": CLIENT_PASSWORD_VARIABLE}
SECURITY_LEVEL = 3  # as MindSpore's: 128 bits, so RSA keys of 3072 bits and no SHA-1
WEAK = {  # what OpenSSL says of a file, in words
    "EE_KEY_TOO_SMALL": "the key is too small; make an EC key such as prime256v1, or an RSA key of 3072 bits or more",
    "CA_KEY_TOO_SMALL": "the CA's key is too small; it needs an EC key such as prime256v1, or RSA of 3072 bits or more",
    "CA_MD_TOO_WEAK": "was signed with too weak a hash; let the CA sign it with SHA-256 or better",
    "KEY_VALUES_MISMATCH": "the key in it does not fit the certificate; export the two that belong together",
}
_OTHER_CA = "another CA has signed it"
_NOT_OURS = "is not from the CA in ca_cert_path; give both of the same CA"
_NO_CA = "ca_cert_path holds no CA certificate (CA:TRUE is missing); give the CA's own"
_VERDICTS = {
    3: ("", "crl_path holds no list of the CA that signed it; add that CA's list"),
    7: (_OTHER_CA, "is not from the CA in ca_cert_path, only from one of that name; give both of the same CA"),
    8: ("crl_path is another CA's here", "crl_path is not from the CA in ca_cert_path; give the list of that CA"),
    9: ("it is not valid yet, or a clock is wrong", "is not valid yet; check the clock"),
    10: ("it has expired, or a clock is wrong", "has expired; have it renewed"),
    11: ("crl_path is later than now here", "crl_path is later than now; check the clocks"),
    12: ("crl_path is out of date here", 'crl_path is out of date; get the CA\'s newest, or give "" for none'),
    18: (_OTHER_CA, "is signed by itself, and not in ca_cert_path; let the CA sign it"),
    **dict.fromkeys((19, 20, 21), (_OTHER_CA, _NOT_OURS)),
    23: ("it was revoked", "was revoked, says crl_path; get a new one"),
    24: ("", _NO_CA),
    26: (
        "it is not made for this side",
        "is not made for this side (extended key usage); the scheduler needs serverAuth, the others clientAuth",
    ),
    **dict.fromkeys(
        (62, 64),
        (
            "it is not for server_name",
            "is not for server_name {name}; make one with it as subjectAltName, or correct server_name",
        ),
    ),
    79: ("", _NO_CA),
}
"""What we say of the other side's certificate, and of our own before the other side sees it, by OpenSSL's verification
errors (X509_V_ERR_*, openssl-verification-options(1))."""
MAX_TURNS = 4  # a handshake of TLS 1.2 has four flights of messages, one of 1.3 three
_SHORT = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}
_Certificate = Mapping[str, Any]  # as `ssl.SSLSocket.getpeercert` gives it


class TlsIdentity(Record):
    """What one side of all connections of a job needs."""

    side: Side
    context: ssl.SSLContext
    server_name: str
    subject: str
    end: float  # when its certificate expires (s since the epoch)
    warnings: tuple[str, ...]  # what will expire soon; one line each

    def wrap(self, stream: socket.socket) -> TlsSocket:
        """Return a connected socket as one that speaks TLS. Raises OSError: the other side has gone."""
        is_server = self.side == "server"
        name = None if is_server else self.server_name or None  # None: anybody whom the CA has signed
        wrapped = self.context.wrap_socket(
            stream, server_side=is_server, server_hostname=name, do_handshake_on_connect=False
        )
        return cast(TlsSocket, wrapped)

    def describe(self) -> str:
        return f"{self.side} {self.subject} until {_day(self.end)}"


def open_identity(spec: TlsSpec, side: Side) -> TlsIdentity:
    """Read and try what one side needs (UsageError: the other would not let us in; ClusterError: this OpenSSL)."""
    place = spec.place(f"{side}_cert_path")
    if not getattr(spec, f"{side}_cert_path"):
        raise UsageError(
            f"--tls_config {spec.source}: {side}_cert_path: is missing; the host with the scheduler needs it"
        )
    ours, theirs = (_build_context(spec, one) for one in (side, "server" if side == "client" else "client"))
    for context in (ours, theirs):  # a server without a certificate shakes no hands
        _load_pair(context, spec, side, place)
    is_named, ours.check_hostname, ours.verify_mode = ours.check_hostname, False, ssl.CERT_NONE  # for the trial
    try:
        certificate = _shake_hands(ours, theirs, ours_is_server=side == "server", server_name=spec.server_name)
    except ssl.SSLCertVerificationError as error:
        _, verdict = _VERDICTS.get(error.verify_code, ("", ""))
        reason = verdict.format(name=spec.server_name) or f"would be refused: {error.verify_message}"
        raise UsageError(f"{place}: {reason}") from None
    except ssl.SSLError as error:
        raise UsageError(f"{place}: {_explain_file(error)}") from None
    ours.verify_mode, ours.check_hostname = ssl.CERT_REQUIRED, is_named
    known = [(place, certificate), *((spec.place("ca_cert_path"), one) for one in ours.get_ca_certs())]
    return TlsIdentity(
        side, ours, spec.server_name, _subject(certificate), _end(certificate), tuple(_warn(known, spec.warning_days))
    )


def _read_limited(path: str, place: str) -> bytes:
    """Return the content of a small file. Raises UsageError: it cannot be read, is empty or is no small file."""
    with refused_as(f"{place}: cannot be read", GIVE_ANOTHER):
        data = read_at_most(path, MAX_FILE_BYTES + 1)
    if not data or len(data) > MAX_FILE_BYTES:
        what = "is empty" if not data else f"has more than {MAX_FILE_BYTES} bytes"
        raise UsageError(f"{place}: {what}; give a certificate file")
    return data


def _password(spec: TlsSpec, side: Side) -> bytes:
    """Return what opens the key: the variable's value, else the file's first line."""
    given, path = getattr(spec, f"{side}_password"), getattr(spec, f"{side}_password_file")
    if given or not path:
        return str(given).encode()
    place = spec.place(f"{side}_password_file")
    with refused_as(f"{place}: cannot be read", GIVE_ANOTHER):
        check_private(Path(path).stat().st_mode, place, path)
        return read_at_most(path, MAX_FILE_BYTES).partition(b"\n")[0].rstrip(b"\r")


def _load_pair(context: ssl.SSLContext, spec: TlsSpec, side: Side, place: str) -> None:
    """Take certificate and key of a side. Raises UsageError: file or password is missing or wrong."""
    path = getattr(spec, f"{side}_cert_path")
    data, password, was_asked = _read_limited(path, place), _password(spec, side), False
    if PEM not in data:
        raise UsageError(f"{place}: is no PEM; of a PKCS#12 file openssl pkcs12 -in FILE -out FILE.pem makes one")
    if not _PEM_KEY.search(data):
        raise UsageError(f"{place}: holds no private key; put certificate and key into one PEM file")
    if PEM + b"CERTIFICATE-----" not in data:
        raise UsageError(f"{place}: holds no certificate; put certificate and key into one PEM file")

    def ask() -> bytes:
        nonlocal was_asked
        was_asked = True
        return password

    try:
        context.load_cert_chain(path, password=ask)
    except ssl.SSLError as error:
        if was_asked and error.reason not in WEAK:
            what = "wrong password" if password else "is encrypted, and there is no password"
            remedy = f"set {_VARIABLES[side]}, or name a file with {side}_password_file"
            raise UsageError(f"{place}: {what}; {remedy}") from None
        raise UsageError(f"{place}: {_explain_file(error)}") from None


def _build_context(spec: TlsSpec, side: Side) -> ssl.SSLContext:
    """Return a context of a side that wants the other to prove who it is (UsageError, ClusterError)."""
    is_server = side == "server"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    if is_server:
        context.num_tickets = 0  # a host connects once
    context.check_hostname = not is_server and bool(spec.server_name)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.set_ciphers(":".join([*spec.ciphers, f"@SECLEVEL={SECURITY_LEVEL}"]))
    except ssl.SSLError:
        raise ClusterError(f"{ssl.OPENSSL_VERSION} knows none of {':'.join(spec.ciphers)}; update it") from None
    place = spec.place("ca_cert_path")
    data = _read_limited(spec.ca_cert_path, place)
    try:
        context.load_verify_locations(cadata=data.decode("ascii", "ignore") if PEM in data else data)
    except (ssl.SSLError, ValueError):
        raise UsageError(f"{place}: holds no certificate that can be read; give the CA's as PEM or DER") from None
    if spec.crl_path:
        place = spec.place("crl_path")
        _read_limited(spec.crl_path, place)
        with contextlib.suppress(ssl.SSLError):
            context.load_verify_locations(spec.crl_path)
        if not context.cert_store_stats()["crl"]:
            raise UsageError(f"{place}: holds no revocation list that can be read; give the CA's CRL as PEM")
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def _explain_file(error: ssl.SSLError) -> str:
    reason = error.reason or "what it holds as PEM cannot be read"
    return WEAK.get(reason, f"is not taken by OpenSSL ({reason.lower().replace('_', ' ')}); export it again")


def _subject(certificate: _Certificate) -> str:
    parts = [f"{_SHORT.get(name, name)}={value}" for part in certificate.get("subject", ()) for name, value in part]
    text = ",".join(reversed(parts)) or "without a name"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _end(certificate: _Certificate) -> float:
    return float(ssl.cert_time_to_seconds(certificate["notAfter"]))


def _day(moment: float) -> str:
    return time.strftime("%F", time.gmtime(moment))


def _warn(known: Iterable[tuple[str, _Certificate]], warning_days: int) -> Iterable[str]:
    for place, certificate in known:
        days = timedelta(seconds=_end(certificate) - time.time()).days
        if days < warning_days:
            name, day = _subject(certificate), _day(_end(certificate))
            yield f"{place}: {name} expires on {day}, in {days} days; have it renewed"


def _shake_hands(
    ours: ssl.SSLContext, theirs: ssl.SSLContext, *, ours_is_server: bool, server_name: str
) -> _Certificate:
    """Let OpenSSL judge our certificate as the other side will; return it. Raises ssl.SSLError: it would not do."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = (server_name or None) if ours_is_server else None  # which the other side looks for
    one = ours.wrap_bio(back, there, server_side=ours_is_server)
    other = theirs.wrap_bio(there, back, server_side=not ours_is_server, server_hostname=name)
    for _ in range(MAX_TURNS):
        for side in (one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return other.getpeercert() or {}


READ_BYTES = 1 << 16
_ALERTS = {  # what the other side says of our certificate, by OpenSSL's names (RFC 8446, 6.2)
    "TLSV1_ALERT_UNKNOWN_CA": _OTHER_CA,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired, or a clock is wrong",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it was revoked",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it is not valid there",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it is not valid there",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it is not made for this side",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "there was none",
}
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate; give it --tls_config with one of this job's CA",
    "NO_SHARED_CIPHER": "no cipher suite in common; give all hosts the same cipher_list",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "no cipher suite in common; give all hosts the same cipher_list",
    "TLSV1_ALERT_INSUFFICIENT_SECURITY": "it takes our keys or cipher suites for too weak",
    "UNSUPPORTED_PROTOCOL": "it speaks an older TLS than 1.2",
    "TLSV1_ALERT_PROTOCOL_VERSION": "no version of TLS in common; 1.2 or 1.3 is needed",
}


class TlsSocket(ssl.SSLSocket):
    """A socket that waits for nothing: with its first bytes it shakes hands, by which a client has proved who it is."""

    fault: ssl.SSLError | None = None  # what has ended it while it sent; the next `recv` says so

    def recv(self, buflen: int = READ_BYTES, flags: int = 0) -> bytes:
        """Return text that has come (BlockingIOError: none now; NotUnderstood: no agreement, or no TLS)."""
        try:
            if self.fault is not None:
                raise self.fault
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise NotUnderstood(
                NO_TLS if error.reason == "WRONG_VERSION_NUMBER" else f"TLS: {explain(error)}"
            ) from None

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Send text, as a socket does (BlockingIOError: there is no room, or the two have not shaken hands yet)."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLEOFError):
                self.fault = error
            raise

    def close(self) -> None:
        """Tell the other side that nothing more comes, which is not waited for."""
        with contextlib.suppress(OSError, ValueError):  # it has not said so yet, has gone, or no hands were shaken
            self.unwrap()
        super().close()


def explain(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        verdict, _ = _VERDICTS.get(error.verify_code, ("", ""))
        return f"its certificate is refused: {verdict or error.verify_message}"
    reason = error.reason or str(error)
    if reason in _ALERTS:
        return f"it refuses our certificate: {_ALERTS[reason]}"
    return _REASONS.get(reason, reason.lower().replace("_", " "))
