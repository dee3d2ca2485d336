"""What the environment tells of a job of several hosts, each value with the variable that it came from."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from msrun.errors import UsageError

T = TypeVar("T", int, str)

OFF = "--discover=False"
FIRST_PORT = 10_000
PORT_COUNT = 20_000
"""Ports that msrun derives lie below those that Linux (from 32768) and Kubernetes (from 30000) give away."""

_MAX_DIGITS = 9
_LOOPBACK = re.compile(r"localhost\Z|127\.[0-9.]+\Z|::1\Z")


@dataclass(frozen=True)
class Told(Generic[T]):
    """A value, and where it came from."""

    value: T
    source: str
    """Name of a variable, or more words than that."""


@dataclass(frozen=True)
class HostView:
    """The little that must be known of this host to understand its variables."""

    name: str
    """Its host name, without a domain."""
    domain: str = ""
    """What follows the name where peers ask for it: the headless service of a pod; empty when there is none."""
    cpu_count: int = 1
    """Processors that msrun may use."""
    listed: tuple[str, ...] = ()
    """The hosts in the file that PBS_NODEFILE names, one for each of their slots."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A job of which this host is a part, as far as variables tell of it."""

    name: str
    """In words: "Slurm job 4711"."""
    node_num: Told[int] | None = None
    """Number of hosts; None = no variable says it."""
    min_hosts: Told[int] | None = None
    """How few of them are enough to begin; None = all are needed."""
    node_rank: Told[int] | None = None
    """Index of this host; None = hosts are numbered when they meet."""
    worker_num: Told[int] | None = None
    """Workers of all hosts; None = no variable says it."""
    local_worker_num: Told[int] | None = None
    """Workers here; None = no variable says it."""
    without_devices: Told[int] | None = None
    """Workers here where no variable says it and this host has no devices; None = one."""
    master_addr: Told[str] | None = None
    """Name or address of node 0; None = no variable says it."""
    master_port: Told[int] | None = None
    """None = any that is equal on all hosts."""
    are_peers_near: bool = False
    """Whether others of the same job are known to be there although nobody says how many."""
    cpu_count: int = 0
    """Processors that msrun was given, where it may have been given fewer than it needs; 0 = the host's are its own."""
    cpu_remedy: str = ""
    """How to be given more."""
    hint: str = ""
    """What to say when this host turns out to be the only one."""
    remedy: str = ""
    """What to do when the address of node 0 is not known, in words."""


def read_number(environ: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """Return the whole number in a variable that is set.

    Raises:
        UsageError: something else is in it.
    """
    text = environ[name].strip()
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or int(text) < least:
        raise UsageError(
            f"{name}={environ[name]!r}: a whole number from {least} on is expected; correct the variable, or give {OFF}"
        )
    return int(text)


def read_place(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[Told[int], Told[int]]:
    """Return index and number of hosts from two variables.

    Raises:
        UsageError: no numbers, or an index that is too high.
    """
    rank, size = read_number(environ, rank_name), read_number(environ, size_name, least=1)
    if rank >= size:
        raise UsageError(
            f"{rank_name}={rank}: must be below {size_name}={size}; are these variables of another job? unset them, or "
            f"give {OFF}"
        )
    return Told(rank, rank_name), Told(size, size_name)


def read_port(environ: Mapping[str, str], *names: str) -> Told[int] | None:
    """Return the port in the first variable that is set."""
    return next((Told(read_number(environ, name, least=1), name) for name in names if environ.get(name)), None)


def read_master(
    environ: Mapping[str, str], host: HostView, node_rank: Told[int] | None, *names: str
) -> Told[str] | None:
    """Return the address of node 0 in the first variable that is set.

    Some operators tell node 0 that it is `localhost`; it then goes by its host name, as the others know it.

    Raises:
        UsageError: loopback on another node.
    """
    name = next((name for name in names if environ.get(name)), "")
    if not name:
        return None
    address = environ[name]
    if not _LOOPBACK.match(address):
        return Told(address, name)
    if node_rank is not None and node_rank.value == 0:
        return Told(host.name, f"host name; {name} is {address}")
    raise UsageError(f"{name}={address}: other hosts cannot be reached by it; set it to the address of node 0")


def derived_port(source: str, key: str) -> Told[int]:
    """Return a port that all hosts of a job find alike and that two jobs on one host hardly share.

    Args:
        source: which variables `key` came from.
        key: what is the same on all hosts of a job, and different for another job.
    """
    return Told(FIRST_PORT + zlib.crc32(key.encode(errors="surrogateescape")) % PORT_COUNT, source)
