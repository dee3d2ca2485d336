"""This host's proof of who it is towards the others, looked at as they will look at it before anything starts."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from msrun.cluster.tls.session import TlsSession
from msrun.errors import ClusterError, UsageError
from msrun.planning.tls_spec import CLIENT_PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE, TlsSpec, check_private
from ranktable.files import read_at_most

Side = Literal["server", "client"]
MAX_FILE_BYTES = 1 << 20
PEM = b"-----BEGIN "
_PEM_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_PEM_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----")
_VARIABLES = {"server": SERVER_PASSWORD_VARIABLE, "client": CLIENT_PASSWORD_VARIABLE}


@dataclass(frozen=True)
class KeyPair:
    """A certificate with its key."""

    place: str
    """Where it came from, for messages."""
    certificate: x509.Certificate
    pem: bytes = field(repr=False)
    """Both, the key not encrypted: never to be written to a disk."""


def read_key_pair(spec: TlsSpec, side: Side) -> KeyPair:
    """Return the certificate and key of one side. Raises UsageError: file or password is missing or wrong, there is
    more or less in it than one certificate and one key, or they do not belong together.
    """
    place = spec.place(f"{side}_cert_path")
    path = getattr(spec, f"{side}_cert_path")
    if not path:
        raise UsageError(
            f"--tls_config {spec.source}: {side}_cert_path: is missing; the host with the scheduler needs it"
        )
    data = read_limited(path, place)
    password = _password(spec, side)
    read = _read_pem if PEM in data else _read_pkcs12
    try:
        key, certificates = read(data, password, place, side)
    except UnsupportedAlgorithm:
        raise UsageError(f"{place}: is encrypted in a way that is not known here; make it anew with AES") from None
    if len(certificates) != 1:
        found = "no certificate" if not certificates else f"a chain of {len(certificates)} certificates"
        raise UsageError(
            f"{place}: holds {found}; give one certificate with its key, and all of the CA in ca_cert_path"
        )
    if _public(key.public_key()) != _public(certificates[0].public_key()):
        raise UsageError(f"{place}: the key in it does not fit the certificate; export the two that belong together")
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return KeyPair(place, certificates[0], pem + certificates[0].public_bytes(Encoding.PEM))


def read_limited(path: str, place: str) -> bytes:
    """Return the content of a small file. Raises UsageError: it cannot be read, is empty or is no small file."""
    try:
        data = read_at_most(path, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{place}: cannot be read ({error.strerror}); give a file that is there") from None
    if not data or len(data) > MAX_FILE_BYTES:
        what = "is empty" if not data else f"has more than {MAX_FILE_BYTES} bytes"
        raise UsageError(f"{place}: {what}; give a certificate file")
    return data


def _password(spec: TlsSpec, side: Side) -> bytes:
    """Return what opens the key: the variable's value, else the file's first line."""
    given = getattr(spec, f"{side}_password")
    path = getattr(spec, f"{side}_password_file")
    if given or not path:
        return str(given).encode()
    place = spec.place(f"{side}_password_file")
    try:
        check_private(Path(path).stat().st_mode, place, path)
        return read_at_most(path, MAX_FILE_BYTES).partition(b"\n")[0].rstrip(b"\r")
    except OSError as error:
        raise UsageError(f"{place}: cannot be read ({error.strerror}); give a file that is there") from None


def _read_pkcs12(
    data: bytes, password: bytes, place: str, side: Side
) -> tuple[PrivateKeyTypes, list[x509.Certificate]]:
    try:
        found = pkcs12.load_pkcs12(data, password or None)
    except ValueError as error:
        if "password" in str(error).lower():
            raise _wrong_password(place, password, side) from None
        raise UsageError(f"{place}: is neither PKCS#12 nor PEM, or is damaged; export it again") from None
    if found.key is None:
        raise UsageError(f"{place}: holds no private key; export it with its key")
    certificates = [entry.certificate for entry in [found.cert, *found.additional_certs] if entry is not None]
    return found.key, certificates


def _read_pem(data: bytes, password: bytes, place: str, side: Side) -> tuple[PrivateKeyTypes, list[x509.Certificate]]:
    if not _PEM_KEY.search(data):
        raise UsageError(f"{place}: holds no private key; put certificate and key into one PEM file, or use PKCS#12")
    try:
        key = load_pem_private_key(data, password or None if b"ENCRYPTED" in data else None)
    except (TypeError, ValueError):
        raise _unread_key(data, password, place, side) from None
    try:
        return key, [x509.load_pem_x509_certificate(text) for text in _PEM_CERTIFICATE.findall(data)]
    except ValueError:
        raise _unreadable_pem(place) from None


def _unread_key(data: bytes, password: bytes, place: str, side: Side) -> UsageError:
    """Say whether a password is missing or wrong, or the text is damaged.

    OpenSSL's words do not tell: one wrong password of about 300 decrypts to something that only is no key.
    """
    try:
        load_pem_private_key(data, None)
    except TypeError:  # whole, and encrypted
        return _wrong_password(place, password, side)
    except ValueError:
        pass
    return _unreadable_pem(place)


def _unreadable_pem(place: str) -> UsageError:
    return UsageError(f"{place}: what it holds as PEM cannot be read; export it again")


def _wrong_password(place: str, password: bytes, side: Side) -> UsageError:
    what = "wrong password" if password else "is encrypted, and there is no password"
    return UsageError(f"{place}: {what}; set {_VARIABLES[side]}, or name a file with {side}_password_file")


def _public(key: object) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined,no-any-return]


_PEM_CRL = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)


@dataclass(frozen=True)
class Authority:
    """CA certificates and revocation lists that fit them."""

    certificates: tuple[x509.Certificate, ...]
    revocations: tuple[x509.CertificateRevocationList, ...]

    @property
    def pem(self) -> bytes:
        """All of it as one PEM text."""
        certificates = [certificate.public_bytes(Encoding.PEM) for certificate in self.certificates]
        return b"".join([*certificates, *(revocation.public_bytes(Encoding.PEM) for revocation in self.revocations)])


def read_authority(spec: TlsSpec, now: datetime.datetime) -> Authority:
    """Return the CA and its revocation lists. Raises UsageError: a file is missing or is not what it should be, or a
    list is out of date or another CA's.
    """
    certificates = _read_certificates(spec)
    revocations = _read_revocations(spec) if spec.crl_path else ()
    for revocation in revocations:
        _check_revocation(revocation, certificates, spec.place("crl_path"), now)
    return Authority(certificates, revocations)


def _read_certificates(spec: TlsSpec) -> tuple[x509.Certificate, ...]:
    place = spec.place("ca_cert_path")
    data = read_limited(spec.ca_cert_path, place)
    try:
        if PEM in data:
            return tuple(x509.load_pem_x509_certificates(data))
        return (x509.load_der_x509_certificate(data),)
    except ValueError:
        raise UsageError(f"{place}: holds no certificate that can be read; give the CA's as PEM or DER") from None


def _read_revocations(spec: TlsSpec) -> tuple[x509.CertificateRevocationList, ...]:
    place = spec.place("crl_path")
    data = read_limited(spec.crl_path, place)
    try:
        if PEM not in data:
            return (x509.load_der_x509_crl(data),)
        found = tuple(x509.load_pem_x509_crl(text) for text in _PEM_CRL.findall(data))
    except ValueError:
        found = ()
    if not found:
        raise UsageError(f"{place}: holds no revocation list that can be read; give the CA's CRL as PEM or DER")
    return found


def _check_revocation(
    revocation: x509.CertificateRevocationList,
    certificates: tuple[x509.Certificate, ...],
    place: str,
    now: datetime.datetime,
) -> None:
    if revocation.last_update_utc > now:
        raise UsageError(f"{place}: is of {revocation.last_update_utc:%F %T} UTC, later than now; check the clocks")
    end = revocation.next_update_utc
    if end is not None and end < now:
        raise UsageError(f'{place}: is out of date since {end:%F %T} UTC; get the CA\'s newest, or give "" for none')
    issuers = [certificate for certificate in certificates if certificate.subject == revocation.issuer]
    if not any(revocation.is_signature_valid(issuer.public_key()) for issuer in issuers):  # type: ignore[arg-type]
        raise UsageError(f"{place}: is not from the CA in ca_cert_path; give the list of that CA")


SECURITY_LEVEL = 3
"""Of OpenSSL, as MindSpore's: 128 bits, so RSA keys of 3072 bits and no SHA-1 (SSL_CTX_set_security_level(3))."""

WEAK = {
    "EE_KEY_TOO_SMALL": "the key is too small; make an EC key such as prime256v1, or an RSA key of 3072 bits or more",
    "CA_KEY_TOO_SMALL": "the CA's key is too small; it needs an EC key such as prime256v1, or RSA of 3072 bits or more",
    "CA_MD_TOO_WEAK": "was signed with too weak a hash; let the CA sign it with SHA-256 or better",
}
"""What OpenSSL says of the security level, in words."""


def build_context(spec: TlsSpec, side: Side, pair: KeyPair, authority: Authority) -> ssl.SSLContext:
    """Return a context of a side that proves who it is, and wants the other to. Raises UsageError: OpenSSL takes the
    key or the certificate for too weak. Raises ClusterError: this OpenSSL is not able to do what is needed.
    """
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
        with _in_memory(pair.pem) as path:
            context.load_cert_chain(path)
    except ssl.SSLError as error:
        raise UsageError(f"{pair.place}: {explain_weak(error)}") from None
    with _in_memory(authority.pem) as path:
        context.load_verify_locations(path)
    if authority.revocations:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def explain_weak(error: ssl.SSLError) -> str:
    """Return why OpenSSL does not take a certificate or its key."""
    reason = error.reason or str(error)
    if reason in WEAK:
        return WEAK[reason]
    return f"is not taken by OpenSSL ({reason.lower().replace('_', ' ')}); export it again"


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield a path under which OpenSSL can read `data`, which is on no disk and which no other program inherits."""
    descriptor = os.memfd_create("msrun-tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def now_utc() -> datetime.datetime:
    """Return the time by which certificates are judged."""
    return datetime.datetime.now(datetime.UTC)


_OTHER_CA = "is not from the CA in ca_cert_path; give both of the same CA"
_NO_CA = "ca_cert_path holds no CA certificate (CA:TRUE is missing); give the CA's own"
_REMEDIES = {
    3: "crl_path holds no list of the CA that signed it; add that CA's list",
    7: "is not from the CA in ca_cert_path, only from one of that name; give both of the same CA",
    9: "is not valid yet; check the clock",
    10: "has expired; have it renewed",
    18: "is signed by itself, and not in ca_cert_path; let the CA sign it",
    19: _OTHER_CA,
    20: _OTHER_CA,
    21: _OTHER_CA,
    23: "was revoked, says crl_path; get a new one",
    24: _NO_CA,
    26: "is not made for this side (extended key usage); the scheduler needs serverAuth, the others clientAuth",
    66: WEAK["EE_KEY_TOO_SMALL"],
    67: WEAK["CA_KEY_TOO_SMALL"],
    68: WEAK["CA_MD_TOO_WEAK"],
    79: _NO_CA,
}
"""Of OpenSSL's verification errors (X509_V_ERR_*, openssl-verification-options(1))."""
_NAME_CODES = (62, 64)
MAX_TURNS = 4
"""A handshake of TLS 1.2 has four flights of messages, one of 1.3 three."""


@dataclass(frozen=True)
class TlsIdentity:
    """What one side of all connections of a job needs."""

    side: Side
    context: ssl.SSLContext
    server_name: str
    certificate: x509.Certificate
    warnings: tuple[str, ...]
    """What will expire soon; one line each."""

    def open_session(self) -> TlsSession:
        """Return a new connection's TLS."""
        is_server = self.side == "server"
        return TlsSession(self.context, is_server=is_server, server_name="" if is_server else self.server_name)

    def describe(self) -> str:
        """Return whose certificate it is, and until when."""
        return f"{self.side} {subject(self.certificate)} until {self.certificate.not_valid_after_utc:%F}"


def open_identity(spec: TlsSpec, side: Side) -> TlsIdentity:
    """Read and try everything that one side needs. Raises UsageError: a file or password is wrong, or the other side
    would not let us in: expired, revoked, another CA, too weak. Raises ClusterError: this OpenSSL is not able to do
    what is needed.
    """
    now = now_utc()
    authority, pair = read_authority(spec, now), read_key_pair(spec, side)
    _prove(spec, side, pair, authority)
    warnings = [_warn(pair.place, pair.certificate, now, spec.warning_days)]
    warnings += [
        _warn(spec.place("ca_cert_path"), certificate, now, spec.warning_days) for certificate in authority.certificates
    ]
    context = build_context(spec, side, pair, authority)
    return TlsIdentity(side, context, spec.server_name, pair.certificate, tuple(line for line in warnings if line))


def subject(certificate: x509.Certificate) -> str:
    """Return a certificate's subject on one line of printable text."""
    text = certificate.subject.rfc4514_string() or "without a name"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _warn(place: str, certificate: x509.Certificate, now: datetime.datetime, warning_days: int) -> str:
    end = certificate.not_valid_after_utc
    days = (end - now).days
    if days >= warning_days:
        return ""
    return f"{place}: {subject(certificate)} expires on {end:%F}, in {days} days; have it renewed"


def _prove(spec: TlsSpec, side: Side, pair: KeyPair, authority: Authority) -> None:
    """Let OpenSSL judge our certificate as the other side will: a handshake with ourselves, in memory."""
    ours = build_context(spec, side, pair, authority)
    ours.check_hostname, ours.verify_mode = False, ssl.CERT_NONE
    theirs = build_context(spec, "server" if side == "client" else "client", pair, authority)
    name = spec.server_name if side == "server" else ""
    try:
        _shake_hands(ours, theirs, ours_is_server=side == "server", server_name=name)
    except ssl.SSLCertVerificationError as error:
        raise UsageError(f"{pair.place}: {_reason(error, spec)}") from None
    except ssl.SSLError as error:
        raise UsageError(f"{pair.place}: {explain_weak(error)}") from None


def _reason(error: ssl.SSLCertVerificationError, spec: TlsSpec) -> str:
    if error.verify_code in _NAME_CODES:
        return f"is not for server_name {spec.server_name}; make one with it as subjectAltName, or correct server_name"
    return _REMEDIES.get(error.verify_code, f"would be refused: {error.verify_message}")


def _shake_hands(ours: ssl.SSLContext, theirs: ssl.SSLContext, *, ours_is_server: bool, server_name: str) -> None:
    """Carry out a handshake between two contexts. Raises ssl.SSLError: of the side that did not let the other in."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = (server_name or None) if ours_is_server else None  # which the other side looks for
    one = ours.wrap_bio(back, there, server_side=ours_is_server)
    other = theirs.wrap_bio(there, back, server_side=not ours_is_server, server_hostname=name)
    for _ in range(MAX_TURNS):
        for side in (one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
