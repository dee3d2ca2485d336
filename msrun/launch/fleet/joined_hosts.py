"""A job of hosts on each of which msrun is typed, on the one that has the scheduler: they come in, and then run as one.

From the moment in which all have come this is a job as over SSH: `FleetRun` coordinates the hosts, and an agent below
this process runs this host's part. Until then the hosts are told who is missing. What hosts are told beside that:
    waiting {text}    called_off {reason, exit_code}
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from msrun import __version__, contract
from msrun.agent.host.host_facts import LOOPBACK
from msrun.agent.signals import SignalPipe
from msrun.cluster.hosts import HostRequest, Refused, Registry
from msrun.cluster.messages import Message
from msrun.cluster.proof import token_of_servers
from msrun.cluster.protocol import HostJob, protocol
from msrun.errors import ClusterError, Interrupted, MsrunError, PeerFailed
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet.agent_link import AgentLink
from msrun.launch.fleet.agents import ANSWER_S, Agents
from msrun.launch.fleet.fleet_plan import spec_of_host
from msrun.launch.fleet.gate import Gate, Stranger
from msrun.launch.fleet.log_collector import LogCollector
from msrun.launch.fleet.opener import HostOpener
from msrun.launch.fleet.preparation import ReadyHosts
from msrun.launch.job_hosts import table_digest
from msrun.launch.rendezvous import folder_of, of_hosts
from msrun.launch.transport.agent_code import AgentCode
from msrun.launch.transport.pipe import AgentPipe
from msrun.launch.transport.sealed import SealedPipe
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.assignment import HostPool, assign_hosts
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.ranks import count_workers
from msrun.planning.spec import LaunchSpec

if TYPE_CHECKING:
    from msrun.cluster.tls import TlsIdentity  # loaded for jobs with --tls_config
    from msrun.launch.fleet.fleet_job import FleetRun

WAITING_LINE_S = 5.0
LOOK_S = 0.5
OWN = "own"
"""The key of this host among those that have come."""
NO_CODE = AgentCode(b"", b"", lambda: b"")
"""Of an agent that runs already."""


class JoinedHosts:
    """The hosts of a job from the first that comes. A context; leaving it lets all of them go."""

    def __init__(
        self,
        spec: LaunchSpec,
        request: HostRequest,
        job_id: str,
        place: tuple[str, int],
        listener: socket.socket,
        token: bytes,
        tls: TlsIdentity | None,
        signals: SignalPipe,
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            spec: of this host, as the user gave it.
            request: as which this host takes part.
            place: numeric address and port at which hosts come in.
            listener: the socket there; this object's from now on.
        """
        self._spec, self._request, self._job_id, self._say = spec, request, job_id, say
        self.signals = signals
        self.place = place
        self.agents = Agents(signals, spec.forward_signals, spec.heartbeat_time_out_s, folder=spec.log_dir)
        self._gate = Gate(self.agents.loop, listener, token, tls, self._on_knock, self._on_note)
        self.agents.aside = {"lost": self._on_gone}
        self._registry = Registry(spec.worker_num, spec.max_restarts, spec.table_hosts, table_digest(spec.table_hosts))
        self._links: dict[int, AgentLink] = {}
        """Those to hosts that have come, by their numbers: the order of their coming."""
        self._places: dict[HostEntry, _Place] = {}
        """Hosts of the job, and those that wait for its next start, once all have come."""
        self._folders = itertools.count()
        self.pool: HostPool
        """Of the same hosts."""
        self.run_of_job: FleetRun | None = None
        """The start that runs now."""
        self.failed_nodes: set[int] = set()
        """Hosts of the start that `run` was to make ready which have gone."""
        self.hosts: tuple[HostAssignment, ...] = ()
        """All of them, in the order of their node_rank, once the last has come."""
        self._window_end = 0.0
        """Until when more may come; 0 while those that have are too few."""
        self.own: HostAssignment
        """This one, then."""
        self._events: EventLog | None = None
        self._opener: HostOpener | None = None
        """Of this host's own agent."""

    def __enter__(self) -> JoinedHosts:
        self._gate.open()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        if error is not None and not self.agents.has_begun:
            code = error.exit_code if isinstance(error, MsrunError) else 1
            reason = str(error) if isinstance(error, PeerFailed) else f"the scheduler's host gave up: {error}"
            self.agents.others += self.agents.links
            self.agents.links = []
            self.call_off(reason, code)
        self._gate.close()
        self.agents.close()
        if self._opener is not None:
            self._opener.close()
        self.agents.inbox.close()

    def call_off(self, reason: str, exit_code: int) -> None:
        """Tell hosts that have no part in the job that they will have none."""
        for link in self.agents.others:
            if not link.is_over:
                link.send("called_off", reason=reason, exit_code=exit_code)

    # -- until all have come ------------------------------------------------------------------------------------------

    def _on_note(self, text: str) -> None:
        self._say(text)
        if self._events is not None:
            self._events.note("note", {"text": text})

    def meet(self) -> None:
        """Wait until all hosts have come.

        Raises:
            PeerFailed: not everybody came in time.
            Interrupted: a signal came.
        """
        spec = self._spec
        missing = spec.worker_num - spec.local_worker_num
        self._say(
            f"waiting for {missing} of {spec.worker_num} workers from other hosts at {self.place[0]}:{self.place[1]}"
        )
        self._registry.add(OWN, self._request)
        self._say(f"{self._request.describe()} registered with {count_workers(spec.local_worker_num)}")
        limit_s = spec.cluster_time_out_s
        try:
            is_all = self.agents.hear(
                self._are_enough,
                {},
                deadline=time.monotonic() + limit_s if limit_s >= 0 else None,
                every=(min(WAITING_LINE_S, max(LOOK_S, spec.join_window_s)), self._tell_missing),
            )
        except Interrupted as error:
            error.args = (f"{error} before all hosts had come",)
            raise
        if not is_all:
            came = self._registry.describe_present()
            reason = f"--cluster_time_out {limit_s:g}: {self._registry.describe()}; came: {came}"
            raise PeerFailed(reason, contract.EXIT_TIMEOUT)
        if not self.hosts:
            self._number()

    def _are_enough(self) -> bool:
        """Whether all have come; or as many as are enough, and no more within the window."""
        registry, now = self._registry, time.monotonic()
        if self._spec.min_hosts and registry.can_do_with(self._spec.min_hosts):
            self._window_end = self._window_end or now + self._spec.join_window_s
            if now >= self._window_end and not registry.is_complete:
                registry.close()
        else:
            self._window_end = 0.0
        return registry.is_complete

    def _tell_missing(self) -> None:
        text = self._registry.describe()
        self._say(text)
        for link in self.agents.others:
            link.send("waiting", text=text)

    def _on_knock(self, stranger: Stranger, request: HostRequest) -> None:
        """Somebody who knows the token wants to take part."""
        number = next(self.agents.numbers)
        if self._spec.min_hosts and self._registry.is_complete and not self.hosts:
            self._number()  # this one has come in the same moment as the last of them
        is_late = bool(self.hosts)
        try:
            if is_late and self._spec.min_hosts:
                self._registry.check_late(request)
            else:
                self._registry.add(number, request)
        except Refused as error:
            self._gate.refuse(stranger, str(error))
            return
        silence_s = self._spec.heartbeat_time_out_s
        stranger.guest.accept(silence_s)
        self._say(f"{request.describe()} registered with {count_workers(request.local_worker_num)}")
        pipe = SealedPipe(stranger.guest.connection, request.address)
        entry = HostEntry(request.describe(), request.local_worker_num, address=request.address, has_come=True)
        entry = replace(entry, device_ids=tuple(range(entry.slots)))
        if is_late:
            entry = replace(entry, name=f"host {number} {request.describe()}")
        link = self.agents.make_link(entry, _given_once(pipe, entry.name), NO_CODE, None, number, has_dialled=True)
        self._links[number] = link
        self.agents.others.append(link)
        link.start()
        if is_late:
            self._places[entry] = _Place(link, request.name, request.address, next(self._folders))
            self.pool.add(entry)
            link.send("waiting", text="the job runs; this host is used from its next start on")
            if self._spec.rescale_now and self.run_of_job is not None and self.pool.can_grow:
                self.run_of_job.regroup(f"{entry.name} has come (--rescale now)")

    def _on_gone(self, number: int, message: Message) -> None:
        """A host has gone that is not of the job, or not yet."""
        link = self._links.pop(number, None)
        if link is None:
            return
        self.agents.others.remove(link)
        if self._registry.remove(number) is not None and not self.hosts:
            self._say(f"{message['reason']}; it may register again")
        elif self._places.pop(link.entry, None) is not None:
            self._say(f"{message['reason']}; the job did not use it")
            self.pool.remove(link.entry)

    def _number(self) -> None:
        """Give all hosts their node ranks."""
        assignments = self._registry.assignments()
        self.hosts = tuple(sorted(assignments.values(), key=lambda assignment: assignment.node_rank))
        self.own = assignments[OWN]
        came = f"all {len(self.hosts)} hosts have come" if len(self.hosts) > 1 else "no other host has come"
        self._say(f"{came}; this is {self.own.describe()}")
        for key, one in sorted(assignments.items(), key=lambda item: item[1].node_rank):
            entry, link = _entry(one), self._links[key] if isinstance(key, int) else None
            if link is not None:
                link.entry = entry
            self._places[entry] = _Place(link, one.name, one.address, next(self._folders))
        max_workers = self._spec.worker_num if self._spec.min_hosts else 0
        own = _entry(self.own)
        self.pool = HostPool([*self._places], (), self._spec.min_hosts, max_workers, needed=own)

    def whole_spec(self) -> LaunchSpec:
        """Return what is asked of all hosts together, once they have come."""
        spec, own = self._spec, self.own
        token = token_of_servers(spec.token, self._job_id) if spec.token else spec.server_token
        return replace(
            of_hosts(spec, self.hosts),
            node_rank=own.node_rank,
            master_port=spec.master_port if len(self.hosts) > 1 else 0,
            log_dir=folder_of(spec.log_dir, own.node_rank),
            host_entries=tuple(map(_entry, self.hosts)),
            min_hosts=spec.min_hosts,
            table_hosts=self.hosts,
            server_token=token,
        )

    def begin(self, caller: Mapping[str, str], events: EventLog) -> None:
        """The log directory is known now: `events` is for whom the gate sends away, too."""
        self._caller, self._events = caller, events
        self._opener = HostOpener(self.whole_spec(), self._job_id, self._say)

    def run(self, spec: LaunchSpec, logs: LogCollector | None, lost: Collection[HostEntry] = ()) -> ReadyHosts:
        """Return hosts that are ready, with this one's own agent.

        Args:
            spec: of this start, from `whole_spec`.
            lost: hosts of the start before that are left.

        Raises:
            UsageError, ClusterError: the agent cannot do its part, or a host has gone; see `failed_nodes`.
            Interrupted: a signal came.
        """
        agents, own = self.agents, spec.node_rank
        agents.logs, agents.folder, agents.has_begun, self.run_of_job = logs, spec.log_dir, False, None
        for entry in lost:
            if (place := self._places.pop(entry, None)) and place.link is not None:
                self._links.pop(place.link.number, None)
                place.link.dismiss()
        entry = spec.host_entries[own]
        if self._places[entry].link is None:
            self._places[entry] = replace(self._places[entry], link=self._start_own(spec, own))
        places = [self._places[entry] for entry in spec.host_entries]
        known = {id(link): link for link in (*agents.links, *agents.others, *self._links.values())}
        agents.links = [place.link for place in places if place.link is not None]
        agents.others = [link for link in known.values() if link not in agents.links]
        self.failed_nodes = {node for node, link in enumerate(agents.links) if link.is_over}
        hosts = assign_hosts(spec.host_entries, spec.table_hosts)
        hosts = tuple(
            replace(host, name=place.name, address=place.address) for host, place in zip(hosts, places, strict=True)
        )
        folders = {node: place.folder for node, place in enumerate(places)}
        if len(hosts) == 1:  # no others have come: its store serves this host alone
            return ReadyHosts((LOOPBACK, 0), hosts, frozenset({own}), folders=folders)

        def lose(node: int, error: MsrunError) -> None:
            self.failed_nodes |= {node} if node != own else set()
            raise error

        if self.failed_nodes:
            names = ", ".join(spec.host_entries[node].name for node in sorted(self.failed_nodes))
            raise ClusterError(f"lost {names}, before the job began")
        heard = agents.open_store(own, self.place[0], 0, lose, lambda: False)
        if not heard.get("port"):
            raise ClusterError(str(heard.get("error") or f"this host's agent says nothing for {ANSWER_S:g} s"))
        return ReadyHosts((self.place[0], int(heard["port"])), hosts, frozenset({own}), folders=folders)

    def _start_own(self, spec: LaunchSpec, node_rank: int) -> AgentLink:
        """Start this host's own agent."""
        number = next(self.agents.numbers)
        job = HostJob(
            protocol=protocol(),
            version=__version__,
            job_id=self._job_id,
            number=number,
            spec=replace(spec_of_host(spec, self.own), rank_table_file=spec.rank_table_file, settings=spec.settings),
            environment=self._caller,
            silence_s=spec.heartbeat_time_out_s,
            will_run=True,
            can_resume=False,
            is_launchers_host=True,
        )

        assert self._opener is not None, "begun"
        entry = spec.host_entries[node_rank]
        code = self._opener.code(entry, {}, number, partial(self.agents.sizes_of, number))
        link = self.agents.make_link(entry, partial(self._opener.open, entry), code, job, number)
        link.start()
        return link


@dataclass(frozen=True)
class _Place:
    """A host that has come."""

    link: AgentLink | None
    """None: this host, whose agent has not been started."""
    name: str
    address: str
    folder: int
    """Number of its log directory."""


def _given_once(pipe: AgentPipe, name: str) -> Callable[[float | None], AgentPipe]:
    """Return what gives a pipe to whoever asks first: nobody can make another one from here."""
    pipes = [pipe]

    def take(_deadline: float | None) -> AgentPipe:
        if not pipes:
            raise ClusterError(f"{name}: has to come by itself")
        return pipes.pop()

    return take


def _entry(assignment: HostAssignment) -> HostEntry:
    return HostEntry(
        assignment.describe(),
        len(assignment.ranks),
        assignment.device_ids,
        address=assignment.address,
        has_come=True,
    )
