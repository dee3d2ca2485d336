"""TLS of one connection, apart from its socket: bytes of the wire in, text out, and back. It waits for nothing."""

from __future__ import annotations

import ssl

from msrun.cluster.messages import NotUnderstood

READ_BYTES = 1 << 16
_OTHER_CA = "another CA has signed it"
_REFUSALS = {
    7: _OTHER_CA,
    9: "it is not valid yet, or a clock is wrong",
    10: "it has expired, or a clock is wrong",
    12: "crl_path is out of date here",
    18: _OTHER_CA,
    19: _OTHER_CA,
    20: _OTHER_CA,
    21: _OTHER_CA,
    23: "it was revoked",
    26: "it is not made for this side",
    62: "it is not for server_name",
    64: "it is not for server_name",
}
"""What we say of the other side's certificate, by OpenSSL's verification errors (openssl-verification-options(1))."""
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
    """One side of one connection."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool, server_name: str = "") -> None:
        """`server_name`: whom a client wants to find; empty = anybody with a certificate of the CA."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_server, server_hostname=server_name or None
        )
        self._early = bytearray()
        """To be sent once the handshake is done."""
        self._is_open = self._is_broken = False
        if not is_server:
            self.receive(b"")  # the client speaks first

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done: on the server's side, the client has proved who it is."""
        return self._is_open

    @property
    def version(self) -> str:
        """What was agreed on, e.g. TLSv1.3; empty before that."""
        return self._object.version() or "" if self._is_open else ""

    def send(self, data: bytes) -> None:
        """Encrypt what is to be sent; `take` returns it, after the handshake."""
        if not self._is_open:
            self._early += data
        elif data and not self._is_broken:
            try:
                self._object.write(data)
            except ssl.SSLError:  # what comes next, or its end, says why
                self._is_broken = True

    def take(self) -> bytes:
        """Return what is to go over the wire now."""
        return self._outgoing.read()

    def receive(self, data: bytes) -> bytes:
        """Return the text in what came over the wire, which may complete the handshake. Raises NotUnderstood: the other
        side is not let in, does not let us in, or speaks no TLS.
        """
        self._incoming.write(data)
        found = bytearray()
        try:
            if not self._is_open:
                self._object.do_handshake()
                self._is_open = True
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
        if self._is_open and not self._is_broken:
            self._is_broken = True
            try:
                self._object.unwrap()
            except ssl.SSLError:  # it has not said so yet
                return


def explain(error: ssl.SSLError) -> str:
    """Return in words why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {_REFUSALS.get(error.verify_code, error.verify_message)}"
    reason = error.reason or str(error)
    if reason in _ALERTS:
        return f"it refuses our certificate: {_ALERTS[reason]}"
    return _REASONS.get(reason, reason.lower().replace("_", " "))
