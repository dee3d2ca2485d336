"""What OpenSSL has to know to speak for one side: keys, whom to trust, how strong everything must be."""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from msrun.cluster.tls.authority import Authority
from msrun.cluster.tls.key_pair import KeyPair, Side
from msrun.errors import ClusterError, UsageError
from msrun.planning.tls_spec import TlsSpec

SECURITY_LEVEL = 3
"""Of OpenSSL, as MindSpore's: 128 bits, so RSA keys of 3072 bits and no SHA-1 (SSL_CTX_set_security_level(3))."""

WEAK = {
    "EE_KEY_TOO_SMALL": "the key is too small; make an EC key such as prime256v1, or an RSA key of 3072 bits or more",
    "CA_KEY_TOO_SMALL": "the CA's key is too small; it needs an EC key such as prime256v1, or RSA of 3072 bits or more",
    "CA_MD_TOO_WEAK": "was signed with too weak a hash; let the CA sign it with SHA-256 or better",
}
"""What OpenSSL says of the security level, in words."""


def build_context(spec: TlsSpec, side: Side, pair: KeyPair, authority: Authority) -> ssl.SSLContext:
    """Return a context of a side that proves who it is, and wants the other to.

    Raises:
        UsageError: OpenSSL takes the key or the certificate for too weak.
        ClusterError: this OpenSSL is not able to do what is needed.
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
