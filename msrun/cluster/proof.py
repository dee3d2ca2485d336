"""How a host and the scheduler prove to each other that they know the job's token, without sending it.

Challenge and response: each side makes a random nonce, and answers the other's with an HMAC-SHA256 of both nonces and
of what it says, keyed with the token. A proof is good for one connection and for one side only.

A token that the user gives (`--token_file`, MSRUN_TOKEN) keeps strangers out. Without one the token follows from what
every host was told, the port: that keeps out mistakes, such as another program that uses the port, and nobody who
means harm.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

PROTOCOL = 2
"""Raised when hosts of an older msrun could not take part any more."""
_CLIENT, _SERVER = b"msrun host", b"msrun scheduler"


def derived_token(master_port: int) -> bytes:
    """Return the token of a job to which the user gave none."""
    return hashlib.sha256(f"msrun job at port {master_port}".encode()).digest()


def new_nonce() -> str:
    """Return 32 random bytes as text."""
    return secrets.token_hex(32)


def host_proof(token: bytes, scheduler_nonce: str, host_nonce: str, request: Mapping[str, Any]) -> str:
    """Return a host's proof; it covers what the host asks for."""
    return _proof(token, _CLIENT, scheduler_nonce, host_nonce, request)


def scheduler_proof(token: bytes, scheduler_nonce: str, host_nonce: str) -> str:
    """Return the scheduler's proof."""
    return _proof(token, _SERVER, scheduler_nonce, host_nonce, {})


def is_same_proof(expected: str, given: object) -> bool:
    """Compare without telling, by the time it takes, how much is right."""
    return isinstance(given, str) and hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace"))


def _proof(token: bytes, side: bytes, scheduler_nonce: str, host_nonce: str, said: Mapping[str, Any]) -> str:
    text = json.dumps([scheduler_nonce, host_nonce, said], sort_keys=True, separators=(",", ":"))
    return hmac.new(token, side + b"\0" + text.encode(), hashlib.sha256).hexdigest()
