"""A job of several hosts on each of which msrun is typed, or started by a cluster manager: this host's part of it.

The host with the scheduler leads the job as a launcher over SSH does; every other one comes to it and is an agent.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msrun.agent.host.host_facts import LOOPBACK
from msrun.agent.pause import stop_this_process
from msrun.agent.signals import SignalPipe
from msrun.cluster.connection import Connection
from msrun.cluster.handshake import Caller
from msrun.cluster.hosts import HostRequest
from msrun.cluster.proof import PROTOCOL, derived_token
from msrun.cluster.rendezvous import UnresolvedName, own_addresses, resolve_address
from msrun.errors import RendezvousTimeout, UsageError, interruption
from msrun.launch.console import say
from msrun.launch.job import JobResult, check_part, job_signals, look_at_host, new_job_id
from msrun.launch.job_hosts import table_digest
from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.mindspore import settle_mindspore
from msrun.planning.placement.host import HostFacts
from msrun.planning.spec import LaunchSpec, is_loopback

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls.identity import Side, TlsIdentity

WEAK_KEY = (
    "weak key: without --token_file, MSRUN_TOKEN or --tls_config it follows from port {port}, and whoever reaches that "
    "could join or end the job"
)
UNKNOWN = "?"
"""Name and address of a host that a dry run cannot know."""
NAME_RETRY_S = 1.0
NAME_LINE_S = 5.0


def run_joined_job(
    spec: LaunchSpec,
    caller: Mapping[str, str],
    *,
    quiet: bool = False,
    is_last: bool = False,
    job_id: str = "",
    on_directory: Callable[[str, Path], None] = lambda _id, _folder: None,
) -> JobResult:
    """Run this host's part of a job to the end of the job. Arguments as `launch.job.run_job`.

    Raises:
        UsageError: something is wrong that was seen before any process started.
        ClusterError: the hosts did not come together; nothing was started.
        RendezvousTimeout: not everybody came in time; says who is missing.
        Interrupted: a signal came before all had come.
    """
    facts = look_at_host(spec, caller)
    spec = settle_mindspore(spec, facts)
    check_part(spec, facts)
    tell = partial(say, quiet=quiet)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(job_signals(spec, is_last=is_last))
        heed = partial(_heed_signals, spec, signals)
        tls = _open_tls(spec, "client")
        warnings = tls.warnings if tls else ()
        for warning in warnings:
            tell(warning)
        master_addr = find_master(spec, signals, heed, tell)
        place = (master_addr, spec.meeting_port)
        token = spec.token.encode() or derived_token(spec.meeting_port)

        def request(address: str) -> HostRequest:
            own = spec.stands_for.address if spec.stands_for else address
            numbers = spec.worker_num, spec.local_worker_num, spec.node_rank
            return HostRequest(PROTOCOL, *numbers, facts.name, own, spec.max_restarts, table_digest(spec.table_hosts))

        if has_scheduler(spec, master_addr):
            from msrun.launch.fleet.joined_hosts import JoinedHosts
            from msrun.launch.fleet.starts import run_fleet_job

            if not (spec.token or spec.tls):
                tell(WEAK_KEY.format(port=spec.meeting_port))
            job_id = job_id or new_job_id()
            server = _open_tls(spec, "server")
            for warning in server.warnings if server else ():
                if warning not in warnings:
                    tell(warning)
            joined = JoinedHosts(spec, request(master_addr), job_id, place, token, server, signals, tell)
            stack.enter_context(joined).meet()
            whole = joined.whole_spec()
            return run_fleet_job(whole, caller, quiet=quiet, job_id=job_id, on_directory=on_directory, joined=joined)

        from msrun.launch.remote.dialled_part import DialledPart, dial

        limit_s = float(spec.cluster_time_out_s)
        if limit_s > 0:
            limit_s = max(0.0, limit_s - (time.monotonic() - begin))

        def greet(connection: Connection, own_address: str) -> Caller:
            return Caller(connection, token, f"{place[0]}:{place[1]}", lambda: request(own_address))

        connection, silence_s = dial(place, greet, tls, signals, heed, tell, limit_s)
        part = stack.enter_context(DialledPart(spec, connection, silence_s, signals, place))
        tell("registered with the scheduler" + (f" through {connection.tls_version}" if tls else ""))
        message = part.await_job(heed, tell)
        return part.run(message, caller, quiet=quiet, on_directory=on_directory, say=tell)


def _open_tls(spec: LaunchSpec, side: Side) -> TlsIdentity | None:
    if spec.tls is None:
        return None
    from msrun.cluster.tls.identity import open_identity

    return open_identity(spec.tls, side)


def find_master(spec: LaunchSpec, signals: SignalPipe, heed: Callable[[], None], tell: Callable[[str], None]) -> str:
    """Return the numeric address of the scheduler's host.

    Its name may become known only when its host, or pod, has come up.

    Args:
        heed: called when there are signals; may raise.

    Raises:
        RendezvousTimeout: it has not become known in time.
        UsageError: it stands for this host's own loopback address here.
    """
    if spec.stands_for:
        return spec.master_addr
    limit_s = spec.cluster_time_out_s
    begin = next_line = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        while True:
            try:
                return resolve_address(spec.master_addr)
            except UnresolvedName as error:
                now = time.monotonic()
                if 0 <= limit_s <= now - begin:
                    raise RendezvousTimeout(f"--cluster_time_out {limit_s:g}: {error}") from None
                if now >= next_line:
                    next_line = now + NAME_LINE_S
                    tell(f"{error}; trying again")
            if selector.select(NAME_RETRY_S):
                heed()


def _heed_signals(spec: LaunchSpec, signals: SignalPipe) -> None:
    for signum in signals.read():
        if signum == signal.SIGTSTP:
            stop_this_process()
        elif signum != signal.SIGCONT and signum not in spec.forward_signals:
            error = interruption(signum, spec.time_limit_s)
            error.args = (f"{error} before all hosts had come",)
            raise error


def has_scheduler(spec: LaunchSpec, master_addr: str) -> bool:
    """Return whether the scheduler runs on this host: node_rank 0, or without node_rank the one with the address.

    Raises:
        UsageError: this is node 0, but the address is another host's.
    """
    if spec.stands_for:  # all addresses of loopback are this machine's
        return spec.node_rank == 0
    is_own = master_addr in own_addresses()
    if spec.node_rank == 0 and not is_own:
        raise UsageError(
            f"--master_addr {spec.master_addr}: not an address of this host, which is --node_rank 0 and so runs the "
            f"scheduler; give one of {', '.join(sorted(own_addresses()))}"
        )
    return is_own if spec.node_rank < 0 else spec.node_rank == 0


def fleet_of(spec: LaunchSpec, node_rank: int, hosts: tuple[HostAssignment, ...], master_addr: str) -> Fleet:
    """Return all hosts of a job as this one sees them."""
    address = LOOPBACK if spec.stands_for else hosts[node_rank].address
    return Fleet(node_rank, hosts, master_addr, own_addresses().get(address, ""))


def local_part(spec: LaunchSpec, fleet: Fleet) -> LaunchSpec:
    """Return what is asked of this host alone.

    Node 0 writes into the log directory itself, the others into folders below it: on a disk that hosts share, nobody
    overwrites another's files.
    """
    return replace(spec, node_rank=fleet.node_rank, log_dir=folder_of(spec.log_dir, fleet.node_rank))


def folder_of(log_dir: Path, node_rank: int) -> Path:
    """Return the log directory of a host."""
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
