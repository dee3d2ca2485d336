"""What a process reads from its environment: where it stands, and where it meets the others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from msrun import contract
from msrun.errors import WorldError

FIRST_PORT, PORTS = 20000, 12000
"""Ports that follow from a job's key: below those of outgoing connections, which begin at 32768 on Linux."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet that no launcher brings together."""

    addresses: tuple[str, ...]
    """Addresses or names of one host, of which each rank takes the first that it reaches."""
    port: int
    key: str
    """Of the job; who brings another one is refused."""
    named_by: str
    """The variables that told the place, for errors."""
    keeper: str = "rank 0"
    """Who waits there for the others."""
    may_be_foreign: bool = False
    """Whether the keeper's own host may not know the address, as with that of a service in Kubernetes."""

    @property
    def place(self) -> str:
        """Address and port in words."""
        return " or ".join(join_place(address, self.port) for address in self.addresses)


@dataclass(frozen=True)
class WorldSpec:
    """Where a process stands."""

    source: str
    """Which variables said so: dry run, msrun, torchrun, mpirun, Slurm, rank table, MS_ROLE, or alone."""
    global_rank: int
    """-1 when the scheduler of MS_ROLE assigns it."""
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str
    """file:///path, env://, fake:// or empty when alone and where there is a meeting."""
    meeting: Meeting | None = None
    device_id: int | None = None
    """What DEVICE_ID is to say; None leaves it as it is."""


ALONE = WorldSpec("alone", 0, 1, 0, 1, "")


def join_place(address: str, port: int) -> str:
    """Return `address:port`, with brackets around IPv6."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the whole number that a variable holds."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise WorldError(f"{name}={text!r}: a whole number is expected; start the job with msrun") from None


def derive_port(key: str) -> int:
    """Return the port of a job that was given none: 20000 to 31999 by the SHA-256 of its key."""
    return FIRST_PORT + int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % PORTS


def choose_meeting(environ: Mapping[str, str], addresses: tuple[str, ...], named_by: str, key: str) -> Meeting:
    """Return where a job meets: at MASTER_ADDR and MASTER_PORT, and where they are not set at what the source tells.

    Args:
        addresses: of rank 0's host, as the source tells; empty when it does not.
        named_by: who told; without addresses the remedy.
        key: of the job; its port follows from it.
    """
    port = derive_port(key)
    if contract.MASTER_PORT in environ:
        port = parse_number(environ, contract.MASTER_PORT)
        if not 0 < port < 65536:
            raise WorldError(f"{contract.MASTER_PORT}={port}: a port from 1 to 65535 is expected, or leave it unset")
    if environ.get(contract.MASTER_ADDR):
        address = environ[contract.MASTER_ADDR]
        return Meeting((address,), port, key, contract.MASTER_ADDR, may_be_foreign=True)
    if not addresses:
        raise WorldError(f"{contract.MASTER_ADDR} is not set: {named_by}, or start with msrun")
    return Meeting(addresses, port, key, named_by)
