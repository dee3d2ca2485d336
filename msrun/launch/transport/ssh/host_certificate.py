"""Certificates of host keys: whether an authority of known_hosts says that this key is the host's.

Source: PROTOCOL.certkeys of OpenSSH.
"""

from __future__ import annotations

import base64
import fnmatch
import time
from collections.abc import Collection, Iterable

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)

CERTIFICATE = "-cert-v01@openssh.com"
"""End of the names of such algorithms."""


class BadCertificate(Exception):
    """It does not make the key that of the host; the message says why."""


def read_authority(kind: str, blob: bytes) -> bytes:
    """Return the key of the authority that has signed a certificate.

    Raises:
        BadCertificate: it is none that can be read.
    """
    return _key_blob(_read(kind, blob).signature_key())


def check_certificate(kind: str, blob: bytes, key: bytes, names: Iterable[str], signatures: Collection[str]) -> None:
    """Let a certificate pass whose authority is trusted for the host.

    Args:
        kind: of the certificate, ssh-ed25519-cert-v01@openssh.com and so on.
        key: with which the server has proved who it is.
        names: of the host, as known_hosts may have them; without the port.
        signatures: by which it may be signed.

    Raises:
        BadCertificate: it is not for this host, not for now, or not what its authority has signed.
    """
    certificate = _read(kind, blob)
    try:
        certificate.verify_cert_signature()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        raise BadCertificate("its signature is wrong") from None
    signature = _signature_kind(certificate, blob)
    if signature not in signatures:
        raise BadCertificate(f"its authority has signed it with {signature}")
    now = time.time()
    principals = [name.decode("utf-8", "backslashreplace") for name in certificate.valid_principals]
    if _key_blob(certificate.public_key()) != key:
        raise BadCertificate("it is of another key")
    if certificate.type is not SSHCertificateType.HOST:
        raise BadCertificate("it is a user's, not a host's")
    if certificate.critical_options:
        raise BadCertificate("it has critical options, and none is known for hosts")
    if not certificate.valid_after <= now < certificate.valid_before:
        raise BadCertificate("it is not valid now; see its dates and the clock")
    patterns = [principal.replace("[", "[[]") for principal in principals]
    if not any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns):
        raise BadCertificate(f"it is for {', '.join(principals) or 'no host by name'}")


def _read(kind: str, blob: bytes) -> SSHCertificate:
    try:
        found = load_ssh_public_identity(kind.encode() + b" " + base64.b64encode(blob))
    except (ValueError, UnsupportedAlgorithm):
        raise BadCertificate("it cannot be read") from None
    if not isinstance(found, SSHCertificate):
        raise BadCertificate("it is a plain key")
    return found


def _signature_kind(certificate: SSHCertificate, blob: bytes) -> str:
    authority = certificate.signature_key()
    if not isinstance(authority, RSAPublicKey):
        return authority.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[0].decode()
    before = blob[
        : -((authority.key_size + 7) // 8 + 4)
    ]  # the signature and its length come last, its kind before them
    return next((name for name in ("rsa-sha2-512", "rsa-sha2-256") if before.endswith(name.encode())), "ssh-rsa")


def _key_blob(key: object) -> bytes:
    text = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)  # type: ignore[attr-defined]
    return base64.b64decode(text.split()[1])
