"""How this host comes to the other hosts of its job: the scheduler's place, registration, and what it is told there."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from msrun.agent.host.host_facts import LOOPBACK
from msrun.agent.pause import stop_this_process
from msrun.agent.processes.process_control import signal_name
from msrun.agent.signals import SignalPipe
from msrun.cluster.control import Control, Meeting
from msrun.cluster.coordinator_server import CoordinatorServer, MeetingTerms
from msrun.cluster.failure import FailureReport, fault_of_job
from msrun.cluster.host_link import HostLink
from msrun.cluster.hosts import HostRequest, Registry
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.messages import Message
from msrun.cluster.own_thread import Inbox, describe_fault, traceback_of
from msrun.cluster.proof import PROTOCOL, derived_token
from msrun.cluster.rendezvous import UnresolvedName, listen, own_addresses, resolve_address
from msrun.errors import ClusterError, Interrupted, MsrunError, PeerFailed, RendezvousTimeout, UsageError
from msrun.launch.directory.log_directory import record_fault
from msrun.launch.job_hosts import table_digest
from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.record_json import encode_record
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
GIVE_UP_S = 15.0
"""How long the other hosts are waited for when this one fails before it has started anything."""


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


class HostRendezvous:
    """This host's place among the others, from its registration to the end of the job. A context."""

    def __init__(
        self,
        spec: LaunchSpec,
        host_name: str,
        signals: SignalPipe,
        say: Callable[[str], None],
        job_id: str,
    ) -> None:
        """`job_id`: of the job, if this host runs the scheduler."""
        self._spec = spec
        self._host_name = host_name
        self._signals = signals
        self._say = say
        self._job_id = job_id
        self._coordinator: CoordinatorServer | None = None
        self._link: HostLink | None = None
        self._meeting: Meeting | None = None
        self._warnings: set[str] = set()
        """What was said about certificates; two may come from one CA."""
        self._inbox = Inbox()
        """What the scheduler says from now on."""
        self._store_listener: socket.socket | None = None
        """Where the workers' store will be served; None on hosts without the scheduler."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and self._meeting is not None:
            self._give_up(error)
        if self._link is not None:
            self._link.close()
        if self._coordinator is not None:
            reason = f"the scheduler's host gave up: {error}" if error else ""
            self._coordinator.close(reason, error.exit_code if isinstance(error, MsrunError) else 1)
        if self._store_listener is not None:
            self._store_listener.close()
        self._inbox.close()

    def meet(self) -> Control:
        """Register and wait until all hosts have come.

        Raises:
            UsageError: the scheduler cannot be served here, its name stands for loopback, or a file of --tls_config is
                wrong.
            ClusterError: this host was refused, or the scheduler has gone.
            RendezvousTimeout: not everybody came in time; says who is missing.
            Interrupted: a signal came.
        """
        spec, begin = self._spec, time.monotonic()
        tls = self._open_tls("client")
        master_addr = self._resolve_master()
        token = spec.token.encode() or derived_token(spec.meeting_port)
        if has_scheduler(spec, master_addr):
            self._serve(master_addr, token)
            if not (spec.token or spec.tls):
                self._say(WEAK_KEY.format(port=spec.meeting_port))
            self._say(
                f"waiting for {spec.worker_num - spec.local_worker_num} of {spec.worker_num} workers from other hosts "
                f"at {master_addr}:{spec.meeting_port}"
            )
        limit_s = float(spec.cluster_time_out_s)
        if limit_s > 0:
            limit_s = max(0.0, limit_s - (time.monotonic() - begin))
        place = (master_addr, spec.meeting_port)
        self._link = HostLink(
            place, token, self._request, self._inbox, limit_s=limit_s, tls=tls, on_fault=self._record_fault
        )
        self._link.start()
        self._meeting = self._await_meeting(master_addr)
        return Control(self._inbox, self._link.send, self._meeting, self._store_listener)

    def own_part(self) -> LaunchSpec:
        """Return what is asked of this host alone, once all have come."""
        assert self._meeting is not None
        return local_part(self._spec, self._meeting.fleet)

    def _record_fault(self, error: BaseException) -> None:
        """Called by a thread that serves the hosts, or this one."""
        folder = self.own_part().log_dir if self._meeting else self._spec.log_dir
        record_fault(folder, describe_fault(error), traceback_of(error))

    def _resolve_master(self) -> str:
        """Return the scheduler's address; its name may become known only when its host, or pod, has come up."""
        if self._spec.stands_for:
            return self._spec.master_addr
        limit_s = self._spec.cluster_time_out_s
        begin = next_line = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            while True:
                try:
                    return resolve_address(self._spec.master_addr)
                except UnresolvedName as error:
                    now = time.monotonic()
                    if 0 <= limit_s <= now - begin:
                        raise RendezvousTimeout(f"--cluster_time_out {limit_s:g}: {error}") from None
                    if now >= next_line:
                        next_line = now + NAME_LINE_S
                        self._say(f"{error}; trying again")
                if selector.select(NAME_RETRY_S):
                    self._heed_signals()

    def _open_tls(self, side: Side) -> TlsIdentity | None:
        if self._spec.tls is None:
            return None
        from msrun.cluster.tls.identity import open_identity

        identity = open_identity(self._spec.tls, side)
        for warning in identity.warnings:
            if warning not in self._warnings:
                self._warnings.add(warning)
                self._say(warning)
        return identity

    def _heed_signals(self) -> None:
        for signum in self._signals.read():
            if signum == signal.SIGTSTP:
                stop_this_process()
            elif signum != signal.SIGCONT and signum not in self._spec.forward_signals:
                raise Interrupted(f"stopped by {signal_name(signum)} before all hosts had come", signum)

    def _serve(self, master_addr: str, token: bytes) -> None:
        spec = self._spec
        tls = self._open_tls("server")
        remedy = "end who uses it, or give another --master_port on all hosts"
        listener = listen(master_addr, spec.meeting_port, remedy)
        try:
            self._store_listener = listen(master_addr, 0)
        except UsageError:
            listener.close()
            raise
        terms = MeetingTerms(
            token,
            self._job_id,
            self._store_listener.getsockname()[1],
            spec.cluster_time_out_s,
            spec.heartbeat_time_out_s,
            RestartPolicy.of(spec),
            tls,
        )
        registry = Registry(spec.worker_num, spec.max_restarts, spec.table_hosts, table_digest(spec.table_hosts))
        inbox = self._inbox
        self._coordinator = CoordinatorServer(
            listener, registry, terms, lambda text: inbox.post({"type": "note", "text": text}), self._record_fault
        )
        self._coordinator.start()

    def _request(self, address: str) -> HostRequest:
        spec = self._spec
        return HostRequest(
            PROTOCOL,
            spec.worker_num,
            spec.local_worker_num,
            spec.node_rank,
            self._host_name,
            spec.stands_for.address if spec.stands_for else address,
            spec.max_restarts,
            table_digest(spec.table_hosts),
        )

    def _await_meeting(self, master_addr: str) -> Meeting:
        hosts: tuple[HostAssignment, ...] = ()
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            selector.register(self._inbox, selectors.EVENT_READ)
            while True:
                selector.select()
                self._heed_signals()
                messages = self._inbox.take()
                for index, message in enumerate(messages):
                    if message["type"] == "fleet":
                        hosts = tuple(HostAssignment.from_json(value) for value in message["hosts"])
                    elif message["type"] == "assigned":
                        for later in messages[index + 1 :]:
                            self._inbox.post(later)
                        return self._read_meeting(message, hosts, master_addr)
                    self._hear(message)

    def _hear(self, message: Message) -> None:
        kind, reason = message["type"], message.get("reason", "")
        if kind in ("waiting", "note"):
            self._say(message["text"])
        elif kind == "registered":
            self._say("registered with the scheduler" + (f" through {message['tls']}" if message["tls"] else ""))
        elif kind == "refused":
            raise ClusterError(reason)
        elif kind == "lost":
            raise ClusterError(f"{reason}, before all hosts had come")
        elif kind == "absent":
            raise RendezvousTimeout(
                f"--cluster_time_out {self._spec.cluster_time_out_s}: {reason}; start msrun there, and check "
                "--master_addr, --master_port and firewalls"
            )
        elif kind == "called_off":
            raise PeerFailed(reason, message["exit_code"])

    def _read_meeting(self, message: Message, hosts: tuple[HostAssignment, ...], master_addr: str) -> Meeting:
        own = next(assignment for assignment in hosts if assignment.node_rank == message["node_rank"])
        fleet = fleet_of(self._spec, own.node_rank, hosts, master_addr)
        self._say(f"all {len(hosts)} hosts have come; this is {own.describe()}")
        return Meeting(message["job_id"], fleet, message["store_port"])

    def _give_up(self, error: BaseException) -> None:
        """Tell the others that this host cannot do its part, and let them end before the scheduler goes."""
        assert self._meeting is not None and self._link is not None
        own = self._meeting.fleet.own
        exit_code = error.exit_code if isinstance(error, MsrunError) else 1
        failure = fault_of_job(self._meeting.job_id, f"{own.describe()}: {error}", exit_code)
        report = encode_record(FailureReport(failure, own.node_rank))
        self._link.send({"type": "failed", "attempt": 0, "report": report})
        self._link.send({"type": "ended", "attempt": 0, "can_continue": False})
        end = time.monotonic() + GIVE_UP_S
        with selectors.DefaultSelector() as selector, contextlib.suppress(KeyboardInterrupt):
            selector.register(self._inbox, selectors.EVENT_READ)
            while (left_s := end - time.monotonic()) > 0:
                selector.select(left_s)
                if any(message["type"] in ("over", "lost") for message in self._inbox.take()):
                    return


def fleet_of(spec: LaunchSpec, node_rank: int, hosts: tuple[HostAssignment, ...], master_addr: str) -> Fleet:
    """Return all hosts of a job as this one sees them."""
    address = LOOPBACK if spec.stands_for else hosts[node_rank].address
    return Fleet(node_rank, hosts, master_addr, own_addresses().get(address, ""))


def local_part(spec: LaunchSpec, fleet: Fleet) -> LaunchSpec:
    """Return what is asked of this host alone.

    Node 0 writes into the log directory itself, the others into folders below it: on a disk that hosts share, nobody
    overwrites another's files.
    """
    folder = spec.log_dir / f"node_{fleet.node_rank}" if fleet.node_rank else spec.log_dir
    return replace(spec, node_rank=fleet.node_rank, log_dir=folder)


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
