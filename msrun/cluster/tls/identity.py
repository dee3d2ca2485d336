"""This host's proof of who it is towards the others, looked at as they will look at it before anything starts."""

from __future__ import annotations

import contextlib
import datetime
import ssl
from dataclasses import dataclass

from cryptography import x509

from msrun.cluster.tls.authority import Authority, read_authority
from msrun.cluster.tls.context import WEAK, build_context, explain_weak, now_utc
from msrun.cluster.tls.key_pair import KeyPair, Side, read_key_pair
from msrun.cluster.tls.session import TlsSession
from msrun.errors import UsageError
from msrun.planning.tls_spec import TlsSpec

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
    """Read and try everything that one side needs.

    Raises:
        UsageError: a file or password is wrong, or the other side would not let us in: expired, revoked, another CA,
            too weak.
        ClusterError: this OpenSSL is not able to do what is needed.
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
    """Carry out a handshake between two contexts.

    Raises:
        ssl.SSLError: of the side that did not let the other in.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = (server_name or None) if ours_is_server else None  # which the other side looks for
    one = ours.wrap_bio(back, there, server_side=ours_is_server)
    other = theirs.wrap_bio(there, back, server_side=not ours_is_server, server_hostname=name)
    for _ in range(MAX_TURNS):
        for side in (one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
