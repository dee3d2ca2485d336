"""TLS of the connections between hosts and scheduler, for jobs with --tls_config only: this host's proof of who it is,
looked at as the others will look at it before anything starts, and the session of one connection."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    pkcs12,
)

from msrun.cluster.messages import NotUnderstood
from msrun.errors import ClusterError, UsageError
from msrun.planning.tls_spec import CLIENT_PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE, TlsSpec, check_private
from ranktable.files import read_at_most

Side = Literal["server", "client"]
MAX_FILE_BYTES = 1 << 20
PEM = b"-----BEGIN "
_PEM_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----")
_VARIABLES = {"server": SERVER_PASSWORD_VARIABLE, "client": CLIENT_PASSWORD_VARIABLE}


def _pem_texts(data: bytes, kind: str) -> list[bytes]:
    return re.findall(rb"-----BEGIN %b-----.+?-----END %b-----" % (kind.encode(), kind.encode()), data, re.DOTALL)


def _read_limited(path: str, place: str) -> bytes:
    """Return the content of a small file. Raises UsageError: it cannot be read, is empty or is no small file."""
    try:
        data = read_at_most(path, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable_file(place, error) from None
    if not data or len(data) > MAX_FILE_BYTES:
        what = "is empty" if not data else f"has more than {MAX_FILE_BYTES} bytes"
        raise UsageError(f"{place}: {what}; give a certificate file")
    return data


def _unreadable_file(place: str, error: OSError) -> UsageError:
    return UsageError(f"{place}: cannot be read ({error.strerror}); give a file that is there")


def _read_pair(spec: TlsSpec, side: Side) -> tuple[str, x509.Certificate, bytes]:
    """Return where the certificate of one side was named, the certificate, and it with its key as PEM, not encrypted:
    never to be written to a disk. Raises UsageError: file or password is missing or wrong, there is more or less in it
    than one certificate and one key, or they do not belong together."""
    place, path = spec.place(f"{side}_cert_path"), getattr(spec, f"{side}_cert_path")
    if not path:
        raise UsageError(
            f"--tls_config {spec.source}: {side}_cert_path: is missing; the host with the scheduler needs it"
        )
    data, password = _read_limited(path, place), _password(spec, side)
    no_key = "wrong password" if password else "is encrypted, and there is no password"
    no_key += f"; set {_VARIABLES[side]}, or name a file with {side}_password_file"
    try:
        key, certificates = (_read_pem if PEM in data else _read_pkcs12)(data, password, no_key)
        if len(certificates) != 1:
            found = "no certificate" if not certificates else f"a chain of {len(certificates)} certificates"
            raise _Unfit(f"holds {found}; give one certificate with its key, and all of the CA in ca_cert_path")
        own, certified = (
            one.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            for one in (key.public_key(), certificates[0].public_key())
        )
        if own != certified:
            raise _Unfit("the key in it does not fit the certificate; export the two that belong together")
    except UnsupportedAlgorithm:
        raise UsageError(f"{place}: is encrypted in a way that is not known here; make it anew with AES") from None
    except _Unfit as error:
        raise UsageError(f"{place}: {error}") from None
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return place, certificates[0], pem + certificates[0].public_bytes(Encoding.PEM)


class _Unfit(Exception):
    """What is wrong with a file, and what to do."""


def _read_pkcs12(data: bytes, password: bytes, no_key: str) -> tuple[PrivateKeyTypes, list[x509.Certificate]]:
    try:
        found = pkcs12.load_pkcs12(data, password or None)
    except ValueError as error:
        is_locked = "password" in str(error).lower()
        raise _Unfit(no_key if is_locked else "is neither PKCS#12 nor PEM, or is damaged; export it again") from None
    if found.key is None:
        raise _Unfit("holds no private key; export it with its key")
    return found.key, [one.certificate for one in [found.cert, *found.additional_certs] if one is not None]


def _read_pem(data: bytes, password: bytes, no_key: str) -> tuple[PrivateKeyTypes, list[x509.Certificate]]:
    if not _PEM_KEY.search(data):
        raise _Unfit("holds no private key; put certificate and key into one PEM file, or use PKCS#12")
    with contextlib.suppress(TypeError, ValueError):
        key = load_pem_private_key(data, password or None if b"ENCRYPTED" in data else None)
        return key, [x509.load_pem_x509_certificate(text) for text in _pem_texts(data, "CERTIFICATE")]
    try:  # OpenSSL's words do not tell: one wrong password of about 300 decrypts to something that only is no key
        load_pem_private_key(data, None)
    except TypeError:  # whole, and encrypted
        raise _Unfit(no_key) from None
    except ValueError:
        pass
    raise _Unfit("what it holds as PEM cannot be read; export it again")


def _password(spec: TlsSpec, side: Side) -> bytes:
    """Return what opens the key: the variable's value, else the file's first line."""
    given, path = getattr(spec, f"{side}_password"), getattr(spec, f"{side}_password_file")
    if given or not path:
        return str(given).encode()
    place = spec.place(f"{side}_password_file")
    try:
        check_private(Path(path).stat().st_mode, place, path)
        return read_at_most(path, MAX_FILE_BYTES).partition(b"\n")[0].rstrip(b"\r")
    except OSError as error:
        raise _unreadable_file(place, error) from None


def _read_certificates(spec: TlsSpec) -> list[x509.Certificate]:
    """Return those of the CA. Raises UsageError: the file is missing or is not what it should be."""
    place = spec.place("ca_cert_path")
    data = _read_limited(spec.ca_cert_path, place)
    try:
        return x509.load_pem_x509_certificates(data) if PEM in data else [x509.load_der_x509_certificate(data)]
    except ValueError:
        raise UsageError(f"{place}: holds no certificate that can be read; give the CA's as PEM or DER") from None


def _read_revocations(
    spec: TlsSpec, certificates: list[x509.Certificate], now: datetime.datetime
) -> list[x509.CertificateRevocationList]:
    """Return the CA's lists. Raises UsageError: the file is none, or a list is out of date or another CA's."""
    if not spec.crl_path:
        return []
    place = spec.place("crl_path")
    data = _read_limited(spec.crl_path, place)
    texts = _pem_texts(data, "X509 CRL") if PEM in data else [data]
    load = x509.load_pem_x509_crl if PEM in data else x509.load_der_x509_crl
    found: list[x509.CertificateRevocationList] = []
    with contextlib.suppress(ValueError):
        found = [load(text) for text in texts]
    if not found:
        raise UsageError(f"{place}: holds no revocation list that can be read; give the CA's CRL as PEM or DER")
    for one in found:
        begin, end = one.last_update_utc, one.next_update_utc
        if begin > now:
            raise UsageError(f"{place}: is of {begin:%F %T} UTC, later than now; check the clocks")
        if end is not None and end < now:
            raise UsageError(
                f'{place}: is out of date since {end:%F %T} UTC; get the CA\'s newest, or give "" for none'
            )
        keys = [certificate.public_key() for certificate in certificates if certificate.subject == one.issuer]
        if not any(one.is_signature_valid(key) for key in keys):  # type: ignore[arg-type]
            raise UsageError(f"{place}: is not from the CA in ca_cert_path; give the list of that CA")
    return found


SECURITY_LEVEL = 3
"""Of OpenSSL, as MindSpore's: 128 bits, so RSA keys of 3072 bits and no SHA-1 (SSL_CTX_set_security_level(3))."""
WEAK = {
    "EE_KEY_TOO_SMALL": "the key is too small; make an EC key such as prime256v1, or an RSA key of 3072 bits or more",
    "CA_KEY_TOO_SMALL": "the CA's key is too small; it needs an EC key such as prime256v1, or RSA of 3072 bits or more",
    "CA_MD_TOO_WEAK": "was signed with too weak a hash; let the CA sign it with SHA-256 or better",
}
"""What OpenSSL says of the security level, in words."""


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield a path under which OpenSSL can read `data`, which is on no disk and which no other program inherits."""
    descriptor = os.memfd_create("msrun-tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


_OTHER_CA = "another CA has signed it"
_NOT_OURS = "is not from the CA in ca_cert_path; give both of the same CA"
_NO_CA = "ca_cert_path holds no CA certificate (CA:TRUE is missing); give the CA's own"
_VERDICTS = {
    3: ("", "crl_path holds no list of the CA that signed it; add that CA's list"),
    7: (_OTHER_CA, "is not from the CA in ca_cert_path, only from one of that name; give both of the same CA"),
    9: ("it is not valid yet, or a clock is wrong", "is not valid yet; check the clock"),
    10: ("it has expired, or a clock is wrong", "has expired; have it renewed"),
    12: ("crl_path is out of date here", ""),
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
    66: ("", WEAK["EE_KEY_TOO_SMALL"]),
    67: ("", WEAK["CA_KEY_TOO_SMALL"]),
    68: ("", WEAK["CA_MD_TOO_WEAK"]),
    79: ("", _NO_CA),
}
"""What we say of the other side's certificate, and of our own before the other side sees it, by OpenSSL's verification
errors (X509_V_ERR_*, openssl-verification-options(1))."""
MAX_TURNS = 4  # a handshake of TLS 1.2 has four flights of messages, one of 1.3 three


@dataclass(frozen=True)
class TlsIdentity:
    """What one side of all connections of a job needs."""

    side: Side
    context: ssl.SSLContext
    server_name: str
    certificate: x509.Certificate
    warnings: tuple[str, ...]  # what will expire soon; one line each

    def open_session(self) -> TlsSession:
        is_server = self.side == "server"
        return TlsSession(self.context, is_server=is_server, server_name="" if is_server else self.server_name)

    def describe(self) -> str:
        return f"{self.side} {_subject(self.certificate)} until {self.certificate.not_valid_after_utc:%F}"


def open_identity(spec: TlsSpec, side: Side) -> TlsIdentity:
    """Read and try everything that one side needs. Raises UsageError: a file or password is wrong, or the other side
    would not let us in: expired, revoked, another CA, too weak. Raises ClusterError: this OpenSSL cannot do it."""
    now = datetime.datetime.now(datetime.UTC)
    certificates = _read_certificates(spec)
    revocations = _read_revocations(spec, certificates, now)
    pair_place, certificate, pem = _read_pair(spec, side)
    known: list[x509.Certificate | x509.CertificateRevocationList] = [*certificates, *revocations]
    authority = b"".join(one.public_bytes(Encoding.PEM) for one in known)

    def context_of(side: Side) -> ssl.SSLContext:
        return _build_context(spec, side, pair_place, pem, authority, has_revocations=bool(revocations))

    ours, theirs = context_of(side), context_of("server" if side == "client" else "client")
    ours.check_hostname, ours.verify_mode = False, ssl.CERT_NONE
    try:
        _shake_hands(ours, theirs, ours_is_server=side == "server", server_name=spec.server_name)
    except ssl.SSLCertVerificationError as error:
        _, verdict = _VERDICTS.get(error.verify_code, ("", ""))
        reason = verdict.format(name=spec.server_name) or f"would be refused: {error.verify_message}"
        raise UsageError(f"{pair_place}: {reason}") from None
    except ssl.SSLError as error:
        raise UsageError(f"{pair_place}: {_explain_weak(error)}") from None
    looked_at = [(pair_place, certificate), *((spec.place("ca_cert_path"), one) for one in certificates)]
    warnings = [_warn(place, one, now, spec.warning_days) for place, one in looked_at]
    return TlsIdentity(side, context_of(side), spec.server_name, certificate, tuple(filter(None, warnings)))


def _build_context(
    spec: TlsSpec, side: Side, place: str, pem: bytes, authority: bytes, *, has_revocations: bool
) -> ssl.SSLContext:
    """Return a context of a side that proves who it is, and wants the other to."""
    is_server = side == "server"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
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
    try:
        with _in_memory(pem) as path:
            context.load_cert_chain(path)
    except ssl.SSLError as error:
        raise UsageError(f"{place}: {_explain_weak(error)}") from None
    with _in_memory(authority) as path:
        context.load_verify_locations(path)
    if has_revocations:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def _explain_weak(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    return WEAK.get(reason, f"is not taken by OpenSSL ({reason.lower().replace('_', ' ')}); export it again")


def _subject(certificate: x509.Certificate) -> str:
    text = certificate.subject.rfc4514_string() or "without a name"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _warn(place: str, certificate: x509.Certificate, now: datetime.datetime, warning_days: int) -> str:
    end = certificate.not_valid_after_utc
    days = (end - now).days
    what = f"{place}: {_subject(certificate)} expires on {end:%F}, in {days} days; have it renewed"
    return what if days < warning_days else ""


def _shake_hands(ours: ssl.SSLContext, theirs: ssl.SSLContext, *, ours_is_server: bool, server_name: str) -> None:
    """Let OpenSSL judge our certificate as the other side will. Raises ssl.SSLError: it would not."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = (server_name or None) if ours_is_server else None  # which the other side looks for
    one = ours.wrap_bio(back, there, server_side=ours_is_server)
    other = theirs.wrap_bio(there, back, server_side=not ours_is_server, server_hostname=name)
    for _ in range(MAX_TURNS):
        for side in (one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()


READ_BYTES = 1 << 16
_ALERTS = {
    "TLSV1_ALERT_UNKNOWN_CA": _OTHER_CA,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired, or a clock is wrong",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it was revoked",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it is not valid there",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it is not valid there",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it is not made for this side",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "there was none",
}
"""What the other side says of our certificate, by OpenSSL's names (RFC 8446, 6.2)."""
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate; give it --tls_config with one of this job's CA",
    "NO_SHARED_CIPHER": "no cipher suite in common; give all hosts the same cipher_list",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "no cipher suite in common; give all hosts the same cipher_list",
    "TLSV1_ALERT_INSUFFICIENT_SECURITY": "it takes our keys or cipher suites for too weak",
    "UNSUPPORTED_PROTOCOL": "it speaks an older TLS than 1.2",
    "TLSV1_ALERT_PROTOCOL_VERSION": "no version of TLS in common; 1.2 or 1.3 is needed",
}


class TlsSession:
    """TLS of one connection, apart from its socket: bytes of the wire in, text out, and back. It waits for nothing."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool, server_name: str = "") -> None:
        """`server_name`: whom a client wants to find; empty = anybody with a certificate of the CA."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_server, server_hostname=server_name or None
        )
        self._early = bytearray()  # to be sent once the handshake is done
        self.is_open = False  # the handshake is done: on the server's side, the client has proved who it is
        self._is_broken = False
        if not is_server:
            self.receive(b"")  # the client speaks first

    @property
    def version(self) -> str:
        """What was agreed on, e.g. TLSv1.3; empty before that."""
        return self._object.version() or "" if self.is_open else ""

    def send(self, data: bytes) -> None:
        """Encrypt what is to be sent; `take` returns it, after the handshake."""
        if not self.is_open:
            self._early += data
        elif data and not self._is_broken:
            try:
                self._object.write(data)
            except ssl.SSLError:  # what comes next, or its end, says why
                self._is_broken = True

    def take(self) -> bytes:
        return self._outgoing.read()

    def receive(self, data: bytes) -> bytes:
        """Return the text in what came over the wire, which may complete the handshake. Raises NotUnderstood: the other
        side is not let in, does not let us in, or speaks no TLS."""
        self._incoming.write(data)
        found = bytearray()
        try:
            if not self.is_open:
                self._object.do_handshake()
                self.is_open = True
                self.send(bytes(self._early))
                self._early.clear()
            while piece := self._object.read(READ_BYTES):
                found += piece
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._is_broken = True
            if not found:
                raise NotUnderstood(f"TLS: {explain(error)}") from None
        return bytes(found)

    def end(self) -> None:
        """Tell the other side that nothing more comes; it is not waited for."""
        if self.is_open and not self._is_broken:
            self._is_broken = True
            with contextlib.suppress(ssl.SSLError):  # it has not said so yet
                self._object.unwrap()


def explain(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        verdict, _ = _VERDICTS.get(error.verify_code, ("", ""))
        return f"its certificate is refused: {verdict or error.verify_message}"
    reason = error.reason or str(error)
    if reason in _ALERTS:
        return f"it refuses our certificate: {_ALERTS[reason]}"
    return _REASONS.get(reason, reason.lower().replace("_", " "))
