"""Certificates of host keys, as an authority makes them."""

from __future__ import annotations

import base64
import time
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificateBuilder,
    SSHCertificateType,
    load_ssh_public_key,
)


class SshAuthority:
    """Signs host keys; `public` is its own key as known_hosts has it."""

    def __init__(self, key: Any = None) -> None:
        self._key = key or Ed25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()

    def sign(
        self,
        public: str,
        *names: str,
        begin_s: float = -60,
        end_s: float = 3600,
        kind: SSHCertificateType = SSHCertificateType.HOST,
        option: bytes = b"",
    ) -> str:
        """Return a certificate of a public key as one line.

        Args:
            begin_s, end_s: from when to when it is valid, in seconds from now.
            option: name of a critical option.
        """
        now = time.time()
        builder = SSHCertificateBuilder().public_key(load_ssh_public_key(public.encode())).serial(1)  # type: ignore[arg-type]
        builder = builder.type(kind).key_id(b"host").valid_after(int(now + begin_s)).valid_before(int(now + end_s))
        builder = (
            builder.valid_principals([name.encode() for name in names]) if names else builder.valid_for_all_principals()
        )
        if option:
            builder = builder.add_critical_option(option, b"")
        return builder.sign(self._key).public_bytes().decode()


def blob_of(line: str) -> bytes:
    """Return the bytes of a public key or certificate."""
    return base64.b64decode(line.split()[1])
