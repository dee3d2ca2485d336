"""A certificate and its private key, from PKCS#12 as MindSpore has it, or from PEM."""

from __future__ import annotations

import re
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

from msrun.errors import UsageError
from msrun.planning.private_file import check_private
from msrun.planning.tls_spec import CLIENT_PASSWORD_VARIABLE, SERVER_PASSWORD_VARIABLE, TlsSpec
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
    """Return the certificate and key of one side.

    Raises:
        UsageError: file or password is missing or wrong, there is more or less in it than one certificate and one key,
            or they do not belong together.
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
    """Return the content of a small file.

    Raises:
        UsageError: it cannot be read, is empty or is no small file.
    """
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
    encrypted = b"ENCRYPTED" in data
    try:
        key = load_pem_private_key(data, password or None if encrypted else None)
        return key, [x509.load_pem_x509_certificate(text) for text in _PEM_CERTIFICATE.findall(data)]
    except TypeError:  # encrypted, and no password is there
        raise _wrong_password(place, password, side) from None
    except ValueError as error:
        if "password" in str(error).lower():
            raise _wrong_password(place, password, side) from None
        raise UsageError(f"{place}: what it holds as PEM cannot be read; export it again") from None


def _wrong_password(place: str, password: bytes, side: Side) -> UsageError:
    what = "wrong password" if password else "is encrypted, and there is no password"
    return UsageError(f"{place}: {what}; set {_VARIABLES[side]}, or name a file with {side}_password_file")


def _public(key: object) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined,no-any-return]
