"""Where this host is among those of its job, where msrun is typed on each, or started by a cluster manager."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msrun.agent.host.host_facts import read_gpus, read_npus
from msrun.agent.own_file import text_of
from msrun.agent.signals import SignalPipe, stop_this_process
from msrun.cluster.messages import await_input
from msrun.cluster.rendezvous import listen, own_addresses
from msrun.errors import RendezvousTimeout, UsageError, interruption
from msrun.planning.host_options import HostOptions, find_host_options, is_place_open
from msrun.planning.hosts import Fleet, HostAssignment
from msrun.planning.placement.host import ASCEND_VARIABLE, CUDA_VARIABLE, HostFacts, visible_ascend, visible_cuda
from msrun.planning.schedulers import (
    BY_HAND,
    HOSTS_FILE,
    IN_POD,
    PBS_HOSTS,
    TORCHRUN,
    HostView,
    find_surroundings,
    is_surrounded,
    read_domain,
)
from msrun.planning.spec import LaunchSpec, is_loopback

RETRY_S = 0.5
FIRST_LINE_S = 2.0
LINE_S = 5.0


class Patience:
    """A host's wait for the others of its job: it tells from time to time what is missing, and has a limit."""

    def __init__(self, spec: LaunchSpec, signals: SignalPipe, tell: Callable[[str], None]) -> None:
        self._spec, self.signals, self.tell = spec, signals, tell
        self._begin = time.monotonic()
        self._next_line = self._begin + FIRST_LINE_S

    def wait(self, why: str, remedy: str = "") -> None:
        """Wait before another try. Raises RendezvousTimeout: --cluster_time_out is over; Interrupted: a signal came."""
        now, limit_s = time.monotonic(), self._spec.cluster_time_out_s
        if 0 <= limit_s <= now - self._begin:
            raise RendezvousTimeout(f"--cluster_time_out {limit_s:g}: {why}{remedy}")
        if now >= self._next_line:
            self._next_line = now + LINE_S
            self.tell(f"{why}; trying again")
        if await_input(self.signals, RETRY_S):
            self.heed_signals()

    def heed_signals(self) -> None:
        """Stop as Ctrl-Z wants, and end by what ends a job. Raises Interrupted: such a signal came."""
        spec = self._spec
        for signum in self.signals.read():
            if signum == signal.SIGTSTP:
                stop_this_process()
            elif signum != signal.SIGCONT and signum not in spec.forward_signals:
                error = interruption(signum, spec.time_limit_s)
                error.args = (f"{error} before all hosts had come",)
                raise error


UNKNOWN = "?"  # name and address of a host that a dry run cannot know


def has_scheduler(spec: LaunchSpec, master_addr: str) -> bool:
    """Return whether the scheduler runs here: node_rank 0, else by address (UsageError: node 0, another address)."""
    if spec.stands_for:  # all addresses of loopback are this machine's
        return spec.node_rank == 0
    is_own = master_addr in own_addresses()
    if spec.node_rank == 0 and not is_own:
        raise UsageError(
            f"--master_addr {spec.master_addr}: not an address of this host, which is --node_rank 0 and so runs the "
            f"scheduler; give one of {', '.join(sorted(own_addresses()))}"
        )
    return is_own if spec.node_rank < 0 else spec.node_rank == 0


def open_port(spec: LaunchSpec, place: tuple[str, int]) -> socket.socket | None:
    """Return the socket at which hosts come in (UsageError); None where another msrun here has it: this is a guest."""
    try:
        return listen(*place, "end who uses it, or give another --master_port on all hosts")
    except UsageError:
        if spec.node_rank >= 0 or spec.stands_for or not is_loopback(place[0]):
            raise
        return None


def local_part(spec: LaunchSpec, fleet: Fleet) -> LaunchSpec:
    """Return what is asked of this host alone; hosts but node 0 log into folders below, for disks that they share."""
    return replace(
        of_hosts(spec, fleet.hosts), node_rank=fleet.node_rank, log_dir=folder_of(spec.log_dir, fleet.node_rank)
    )


def of_hosts(spec: LaunchSpec, hosts: Sequence[HostAssignment]) -> LaunchSpec:
    """Return what is asked with the workers of the hosts that have come, which may be fewer than were asked for."""
    count = sum(len(host.ranks) for host in hosts)
    tail_ranks = tuple(rank for rank in spec.tail_ranks if rank < count)
    return replace(spec, worker_num=count, tail_ranks=tail_ranks, min_hosts=0)


def folder_of(log_dir: Path, node_rank: int) -> Path:
    return log_dir / f"node_{node_rank}" if node_rank else log_dir


def assume_fleet(spec: LaunchSpec, facts: HostFacts) -> Fleet:
    """Return the hosts of a job for a dry run, which asks nobody: of its table, else as many as are like this one."""
    addresses = own_addresses()
    is_master = spec.master_addr in addresses
    if spec.table_hosts:
        own = spec.table_hosts[spec.node_rank]
        return Fleet(own.node_rank, spec.table_hosts, spec.master_addr, addresses.get(own.address, ""))
    node_rank = spec.node_rank if spec.node_rank >= 0 else 0 if is_master else 1
    outward = (address for address in addresses if not is_loopback(address))
    address = spec.master_addr if is_master else next(outward, UNKNOWN)
    hosts, first = [], 0
    for index, count in enumerate(assume_counts(spec.worker_num, spec.local_worker_num, node_rank)):
        known = (facts.name, address) if index == node_rank else (UNKNOWN, UNKNOWN)
        hosts.append(HostAssignment(index, *known, tuple(range(first, first + count)), tuple(range(count))))
        first += count
    return Fleet(node_rank, tuple(hosts), spec.master_addr, addresses.get(address, ""), is_assumed=True)


def assume_counts(worker_num: int, local_worker_num: int, node_rank: int) -> list[int]:
    """Return how many workers each host has if all are like this one, as far as the numbers allow it."""
    before = min(node_rank * local_worker_num, worker_num - local_worker_num)
    counts = [before // node_rank + (index < before % node_rank) for index in range(node_rank)]
    counts.append(local_worker_num)
    while (left := worker_num - sum(counts)) > 0:
        counts.append(min(local_worker_num, left))
    return counts


# -- as far as the variables around msrun tell it --------------------------------------------------------------------


def discover_host(options: Mapping[str, Any], given: Collection[str], environ: Mapping[str, str]) -> HostOptions:
    """Return what the variables around msrun say of this host, for options that are not `given` (UsageError)."""
    is_open = is_surrounded(environ) and is_place_open(options, given)
    if not is_open or (job := find_surroundings(environ, view_host(environ))) is None:
        return HostOptions({})
    found = find_host_options(job, options, given, lambda: count_devices(options["device_target"], environ))
    is_node_0 = {**options, **found.options}["node_rank"] == 0
    return with_own_address(found) if is_node_0 and "master_addr" in found.options else found


def is_under_scheduler(environ: Mapping[str, str]) -> bool:
    """Return whether a cluster manager or another launcher has started msrun here, and nobody by hand."""
    if environ.get(IN_POD):
        return True
    with contextlib.suppress(UsageError):
        job = find_surroundings(environ, view_host(environ))
        return job is not None and job.name not in (BY_HAND, TORCHRUN)
    return False


def with_own_address(found: HostOptions) -> HostOptions:
    """Return node 0's options with its only outward address where its name is loopback here, as in /etc/hosts."""
    name = str(found.options["master_addr"])
    try:
        known = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return found
    own = ((text, ipaddress.ip_address(text)) for text in own_addresses())
    outward = [text for text, one in own if one.version == 4 and not one.is_loopback and not one.is_link_local]
    if not all(ipaddress.ip_address(text).is_loopback for text in known) or len(outward) != 1:
        return found
    settings = (
        replace(setting, value=outward[0], source=f"own address; {setting.source} says {name}")
        if setting.name == "master_addr"
        else setting
        for setting in found.settings
    )
    return replace(found, options={**found.options, "master_addr": outward[0]}, settings=tuple(settings))


def view_host(environ: Mapping[str, str]) -> HostView:
    """Look at what of this host decides on the meaning of its variables. Asks no name server."""
    name, _, domain = socket.gethostname().partition(".")
    listed = text_of(environ[PBS_HOSTS]).split() if environ.get(PBS_HOSTS) else ()
    return HostView(name, domain or read_domain(text_of(HOSTS_FILE), name), len(os.sched_getaffinity(0)), tuple(listed))


def count_devices(target: str, environ: Mapping[str, str]) -> int:
    """Return how many accelerators of the target are visible; `auto` takes Ascend devices before GPUs, as jobs do."""
    npus = len(visible_ascend(environ.get(ASCEND_VARIABLE), read_npus()).names) if target in ("auto", "ascend") else 0
    gpus = len(visible_cuda(environ.get(CUDA_VARIABLE), read_gpus()).names) if target in ("auto", "gpu") else 0
    return npus or gpus
