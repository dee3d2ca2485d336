"""How workers find the parameter servers of their job: each writes its address into a store.

On one host that is a file beside the workers' own, of several hosts the store in which the workers meet, too; in a job
that was started by hand the scheduler's.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.joining.meet import STORE, connect_store

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
    """Return the rank and the nonce of a worker."""
    worker_nonce, rank, proof = claim[:NONCE_BYTES], claim[NONCE_BYTES:-PROOF_BYTES], claim[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, _WORKER, server_nonce, worker_nonce, rank)):
        raise NotProved("a worker without the token of this job")
    return _RANK.unpack(rank)[0], worker_nonce


def build_answer(token: bytes, server_nonce: bytes, worker_nonce: bytes, index: int) -> bytes:
    """Return what a server answers to a claim."""
    return _proof(token, _SERVER, server_nonce, worker_nonce, _RANK.pack(index))


def check_answer(token: bytes, server_nonce: bytes, worker_nonce: bytes, index: int, answer: bytes) -> None:
    """Refuse who is not parameter server `index` of this job."""
    if not hmac.compare_digest(answer, build_answer(token, server_nonce, worker_nonce, index)):
        raise NotProved("it does not know the token of this job")


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"".join(parts), "sha256")


FILE = "file://"
FIND_S = 60.0
"""How long the servers may take to start; they start with the workers."""


def _open_store() -> Store:
    place = os.environ[contract.MSRUN_RENDEZVOUS]
    if place.startswith(FILE):
        store: Store = FileStore(f"{place.removeprefix(FILE)}.servers")
    elif place.startswith(STORE):
        address, _, port = place.removeprefix(STORE).rpartition(":")
        store = connect_store(address.strip("[]"), int(port))
    else:
        store = connect_store(os.environ[contract.MASTER_ADDR], int(os.environ[contract.MASTER_PORT]))
    attempt = os.environ.get(contract.TORCHELASTIC_RESTART_COUNT, "0")
    return PrefixStore(f"servers of attempt {attempt}", store)


def publish(index: int, address: str, port: int) -> None:
    """Write down where a server listens."""
    _open_store().set(str(index), f"{address} {port}")


def find_addresses(servers: int) -> list[tuple[str, int]]:
    """Return address and port of every server, when all have started."""
    store = _open_store()
    names = [str(index) for index in range(servers)]
    try:
        store.wait(names, timedelta(seconds=FIND_S))
    except RuntimeError:
        raise WorldError(
            f"the {servers} parameter servers have not started within {FIND_S:g} s: see {contract.server_name(0)}.log "
            "and the others in the log directory"
        ) from None
    found = [store.get(name).decode().rpartition(" ") for name in names]
    return [(address, int(port)) for address, _, port in found]
