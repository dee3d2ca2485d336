"""How a host and the scheduler prove with every message that they know the job's token, without sending it.

Each side begins with a random nonce. Token and both nonces make two keys, one for each direction, and from then on
every message carries an HMAC-SHA256 of its number and its bytes. So nothing is looked at that was not proved first, and
a message is good for one connection, one direction and one place in the order.

The token is the user's (`--token_file`, MSRUN_TOKEN), or a random one that the scheduler's host leaves in the log
directory for those that share it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import struct

from msrun.cluster.protocol import protocol

PROOF_BYTES = hashlib.sha256().digest_size
_CLIENT, _SERVER = b"msrun host", b"msrun scheduler"
_NUMBER = struct.Struct("!Q")
_HELLO = re.compile(rb'\{"type":"hello","protocol":([0-9]{1,9}),"nonce":"([0-9a-f]{64})"\}')
"""JSON, which an older msrun reads; here it is not parsed, for it comes from anybody."""


class NotProved(ValueError):
    """A message is not from one who knows the token, or is not the next of this connection."""


def token_of_servers(token: str, job_id: str) -> str:
    """Return what the workers and parameter servers of one job know each other by, of the hosts' token."""
    return hmac.digest(token.encode(), f"msrun parameter servers {job_id}".encode(), "sha256").hex()


def new_nonce() -> str:
    """Return 32 random bytes as text."""
    return secrets.token_hex(32)


def hello(nonce: str) -> bytes:
    return f'{{"type":"hello","protocol":{protocol()},"nonce":"{nonce}"}}'.encode()


def read_hello(body: bytes) -> tuple[int, str] | None:
    """Return protocol and nonce of the other side's first words; None when they are something else."""
    match = _HELLO.fullmatch(body)
    return (int(match[1]), match[2].decode()) if match else None


class Seal:
    """Closes what one side of one connection says, and opens what it hears."""

    def __init__(self, token: bytes, scheduler_nonce: str, host_nonce: str, *, is_scheduler: bool) -> None:
        nonces = f"{scheduler_nonce}{host_nonce}".encode()
        keys = [hmac.digest(token, side + b"\0" + nonces, "sha256") for side in (_CLIENT, _SERVER)]
        self._in_key, self._out_key = keys if is_scheduler else reversed(keys)
        self._sent = self._received = 0

    def close(self, body: bytes) -> bytes:
        self._sent += 1
        return _proof(self._out_key, self._sent, body) + body

    def open(self, data: bytes) -> bytes:
        """Return the next message of the other side without its proof. Raises NotProved: it is not from there."""
        proof, body = data[:PROOF_BYTES], data[PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._in_key, self._received + 1, body)):
            raise NotProved("a message without the proof that it is the next of this connection")
        self._received += 1
        return body


def _proof(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + body, "sha256")
