"""How a worker and a parameter server prove to each other that they know the job's token, without sending it.

    server -> worker   nonce
    worker -> server   nonce, rank, HMAC-SHA256 of both nonces and the rank
    server -> worker   HMAC-SHA256 of both nonces and its index

All are of fixed length, so that whoever does not know the token makes the other side keep no more than that.
"""

from __future__ import annotations

import hmac
import secrets
import struct

NONCE_BYTES = 32
PROOF_BYTES = 32
_RANK = struct.Struct("!I")
CLAIM_BYTES = NONCE_BYTES + _RANK.size + PROOF_BYTES
"""What the worker sends."""
_WORKER, _SERVER = b"msrun worker", b"msrun parameter server"


class NotProved(ValueError):
    """The other side does not know the token, or is not who it should be."""


def new_nonce() -> bytes:
    """Return random bytes, of which every connection has its own."""
    return secrets.token_bytes(NONCE_BYTES)


def build_claim(token: bytes, server_nonce: bytes, worker_nonce: bytes, global_rank: int) -> bytes:
    """Return what a worker answers to the server's nonce."""
    rank = _RANK.pack(global_rank)
    return worker_nonce + rank + _proof(token, _WORKER, server_nonce, worker_nonce, rank)


def check_claim(token: bytes, server_nonce: bytes, claim: bytes) -> tuple[int, bytes]:
    """Return the rank and the nonce of a worker.

    Raises:
        NotProved: it does not know the token.
    """
    worker_nonce, rank, proof = claim[:NONCE_BYTES], claim[NONCE_BYTES:-PROOF_BYTES], claim[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, _WORKER, server_nonce, worker_nonce, rank)):
        raise NotProved("a worker without the token of this job")
    return _RANK.unpack(rank)[0], worker_nonce


def build_answer(token: bytes, server_nonce: bytes, worker_nonce: bytes, index: int) -> bytes:
    """Return what a server answers to a claim."""
    return _proof(token, _SERVER, server_nonce, worker_nonce, _RANK.pack(index))


def check_answer(token: bytes, server_nonce: bytes, worker_nonce: bytes, index: int, answer: bytes) -> None:
    """Refuse who is not parameter server `index` of this job.

    Raises:
        NotProved: it does not know the token, or is another server.
    """
    if not hmac.compare_digest(answer, build_answer(token, server_nonce, worker_nonce, index)):
        raise NotProved("it does not know the token of this job")


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"".join(parts), "sha256")
