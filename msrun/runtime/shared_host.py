"""Which ranks share a host: every rank says in the store of its world where it runs.

All ranks of a group come to the same answer, as they compare the same words. Containers with a network of their own are
hosts of their own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # exported, not declared

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")

_shared: dict[tuple[int, ...], bool] = {}


def tell_host(rank: int) -> None:
    """Say where this rank runs. Called once in each world, before anybody asks."""
    _shared.clear()
    _store().set(_key(rank), _own_host())


def share_host(ranks: Sequence[int]) -> bool:
    """Return whether ranks run on one host and reach each other without a network in between."""
    key = tuple(ranks)
    if key not in _shared:
        _shared[key] = len(set(_store().multi_get([_key(rank) for rank in key]))) == 1
    return _shared[key]


def _own_host() -> str:
    try:
        return f"{BOOT_ID.read_text().strip()} {NETWORK.stat().st_ino}"
    except OSError:  # no Linux
        return socket.gethostname()


def _key(rank: int) -> str:
    return f"msrun/host/{rank}"


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()
