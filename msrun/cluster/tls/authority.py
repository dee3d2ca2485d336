"""Whom a job trusts: the certificates of its CA, and the list of those that the CA has revoked."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from msrun.cluster.tls.key_pair import PEM, read_limited
from msrun.errors import UsageError
from msrun.planning.tls_spec import TlsSpec

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
    """Return the CA and its revocation lists.

    Raises:
        UsageError: a file is missing or is not what it should be, or a list is out of date or another CA's.
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
