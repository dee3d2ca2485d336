"""A job of hosts on each of which msrun is typed, on the one that has the scheduler: they come in, and then run as one.

From the moment in which all have come this is a job as over SSH: `FleetRun` coordinates the hosts, and an agent below
this process runs this host's part. Until then the hosts are told who is missing. What hosts are told beside that:
    waiting {text}    called_off {reason, exit_code}
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from msrun import __version__, contract
from msrun.agent.host.host_facts import LOOPBACK
from msrun.agent.processes.process_control import raise_open_files, set_open_files
from msrun.agent.signals import SignalPipe
from msrun.cluster.hosts import HostRequest, Refused, Registry
from msrun.cluster.messages import Message
from msrun.cluster.own_thread import Inbox, describe_fault, traceback_of
from msrun.cluster.proof import PROTOCOL, token_of_servers
from msrun.errors import ClusterError, Interrupted, MsrunError, PeerFailed
from msrun.launch.directory.log_directory import EventLog, record_fault
from msrun.launch.fleet.agent_link import AgentLink
from msrun.launch.fleet.agents import OF_LAUNCHER, Agents
from msrun.launch.fleet.fleet_plan import spec_of_host
from msrun.launch.fleet.gate import Gate, Stranger
from msrun.launch.fleet.log_collector import LogCollector
from msrun.launch.fleet.preparation import ANSWER_S, ReadyHosts
from msrun.launch.job_hosts import table_digest
from msrun.launch.remote.agent import HostJob
from msrun.launch.rendezvous import folder_of, of_hosts
from msrun.launch.transport.agent_code import AgentCode, salvage_code, start_code
from msrun.launch.transport.event_loop import EventLoop
from msrun.launch.transport.pipe import AgentPipe, LocalPipe, agent_argv
from msrun.launch.transport.sealed import SealedPipe
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.ranks import count_workers
from msrun.planning.record_json import encode_record
from msrun.planning.spec import LaunchSpec

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls.identity import TlsIdentity

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
        self._inbox = Inbox()
        self._loop = EventLoop(1, self._tell_fault)
        self._gate = Gate(self._loop, listener, token, tls, self._pass_on, self._note)
        self.agents = Agents(self._inbox, self._loop, signals, spec.forward_signals, spec.heartbeat_time_out_s)
        self.agents.always = {
            "knock": lambda _, message: self._on_knock(message["stranger"], message["request"]),
            "note": lambda _, message: self._on_note(message["text"]),
        }
        self._registry = Registry(spec.worker_num, spec.max_restarts, spec.table_hosts, table_digest(spec.table_hosts))
        self._links: dict[int, tuple[AgentLink, HostRequest]] = {}
        """Hosts that have come, by the number that they get at first: the order of their coming."""
        self._numbers = itertools.count()
        self.hosts: tuple[HostAssignment, ...] = ()
        """All of them, in the order of their node_rank, once the last has come."""
        self._window_end = 0.0
        """Until when more may come; 0 while those that have are too few."""
        self.own: HostAssignment
        """This one, then."""
        self.logs: LogCollector | None = None
        self._events: EventLog | None = None
        self._open_files = 0
        """How many this process might open before."""
        self.folder = spec.log_dir
        """The log directory, which may be another one once this host knows its number."""

    def __enter__(self) -> JoinedHosts:
        self._gate.open()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        if error is not None and not self.agents.has_begun:
            code = error.exit_code if isinstance(error, MsrunError) else 1
            reason = str(error) if isinstance(error, PeerFailed) else f"the scheduler's host gave up: {error}"
            self.agents.tell_all("called_off", reason=reason, exit_code=code)
        self._gate.close()
        self.agents.close()
        if self._open_files:
            set_open_files(self._open_files)
        self._inbox.close()

    # -- of the loop's thread -----------------------------------------------------------------------------------------

    def _tell_fault(self, error: BaseException) -> None:
        record_fault(self.folder, describe_fault(error), traceback_of(error))
        self._inbox.post({"type": "fault", "node": OF_LAUNCHER, "text": describe_fault(error)})

    def _pass_on(self, stranger: Stranger, request: HostRequest) -> None:
        self._inbox.post({"type": "knock", "node": OF_LAUNCHER, "stranger": stranger, "request": request})

    def _note(self, text: str) -> None:
        self._inbox.post({"type": "note", "node": OF_LAUNCHER, "text": text})

    def _take_first(self, link: AgentLink, message: Message) -> bool:
        return self.logs is not None and self.logs.take(link.node_rank, link.entry.name, message)

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
                {"lost": self._on_gone},
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
        self.agents.tell_all("waiting", text=text)

    def _on_knock(self, stranger: Stranger, request: HostRequest) -> None:
        """Somebody who knows the token wants to take part."""
        number = next(self._numbers)
        try:
            self._registry.add(number, request)
        except Refused as error:
            self._gate.refuse(stranger, str(error))
            return
        silence_s = self._spec.heartbeat_time_out_s
        stranger.guest.accept(silence_s)
        self._say(f"{request.describe()} registered with {count_workers(request.local_worker_num)}")
        pipe = SealedPipe(stranger.guest.connection, request.address)
        entry = HostEntry(request.describe(), request.local_worker_num, address=request.address, has_come=True)
        link = self._link(number, entry, _given_once(pipe, entry.name), NO_CODE, None)
        self._links[number] = link, request
        self.agents.links.append(link)
        link.start()

    def _link(
        self,
        number: int,
        entry: HostEntry,
        open_pipe: Callable[[float | None], AgentPipe],
        code: AgentCode,
        job: Message | None,
    ) -> AgentLink:
        link = AgentLink(
            number,
            entry,
            open_pipe,
            code,
            job,
            self._inbox,
            lambda message: self._take_first(link, message),
            self._loop,
            silence_s=self._spec.heartbeat_time_out_s,
            has_dialled=code is NO_CODE,
        )
        return link

    def _on_gone(self, number: int, message: Message) -> None:
        """A host has gone before all had come."""
        if self._registry.remove(number) is not None:
            self._say(f"{message['reason']}; it may register again")

    def _number(self) -> None:
        """Give all hosts their node ranks, by which they are known from now on.

        The loop's thread does it, so that what hosts say carries their old number before the mark, their new one after.
        """
        assignments = self._registry.assignments()
        self.hosts = tuple(sorted(assignments.values(), key=lambda assignment: assignment.node_rank))
        self.own = assignments[OWN]
        came = f"all {len(self.hosts)} hosts have come" if len(self.hosts) > 1 else "no other host has come"
        self._say(f"{came}; this is {self.own.describe()}")
        found = [(self._links[key][0], one) for key, one in assignments.items() if isinstance(key, int)]

        def number() -> None:
            for link, assignment in found:
                link.node_rank, link.entry = assignment.node_rank, _entry(assignment)
            self._inbox.post({"type": "numbered", "node": OF_LAUNCHER})

        is_numbered: list[bool] = []
        gone: list[str] = []

        def on_lost(_: int, message: Message) -> None:
            gone.append(str(message["reason"]))

        self._loop.call(number)
        handlers = {"numbered": lambda *_: is_numbered.append(True), "lost": on_lost}
        self.agents.hear(lambda: bool(is_numbered), handlers)
        self.agents.links = [link for link, _ in sorted(found, key=lambda one: one[1].node_rank)]
        if gone:
            raise ClusterError(f"{gone[0]}, before the job began")

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
            table_hosts=self.hosts,
            server_token=token,
        )

    def own_agent(self, spec: LaunchSpec, caller: Mapping[str, str], logs: LogCollector, events: EventLog) -> OwnAgent:
        """Return this host's own agent, which is started when it is run.

        Args:
            spec: from `whole_spec`.
            events: of the job, whose log directory is known now: for whom the gate sends away, too.
        """
        own, self.logs, self.folder = self.own, logs, spec.log_dir
        self._events = events
        self._open_files = raise_open_files()
        job = HostJob(
            protocol=PROTOCOL,
            version=__version__,
            job_id=self._job_id,
            node_rank=own.node_rank,
            spec=replace(spec_of_host(spec, own), rank_table_file=spec.rank_table_file, settings=spec.settings),
            environment=caller,
            silence_s=spec.heartbeat_time_out_s,
            will_run=True,
            can_resume=False,
            is_launchers_host=True,
            has_scheduler=True,
        )
        link = self._link(
            own.node_rank,
            spec.host_entries[own.node_rank],
            lambda _: LocalPipe(agent_argv(sys.executable), "", None, self._open_files),
            AgentCode(
                start_code({}), b"", lambda: salvage_code({}, self._job_id, own.node_rank, logs.sizes(own.node_rank))
            ),
            {"type": "job", "job": encode_record(job)},
        )
        self.agents.links.insert(own.node_rank, link)
        return OwnAgent(self, link)


class OwnAgent:
    """The agent of the host with the scheduler, with which all hosts are ready. A context that gives all agents."""

    failed_nodes: frozenset[int] = frozenset()
    """Hosts without which the job could start; none: it starts once."""

    def __init__(self, joined: JoinedHosts, link: AgentLink) -> None:
        self._joined, self._link = joined, link

    def __enter__(self) -> Agents:
        return self._joined.agents

    def __exit__(self, *_: object) -> None:
        """It ends with the other agents."""

    def run(self) -> ReadyHosts:
        """Start it, and return hosts that are ready.

        Raises:
            UsageError, ClusterError: the agent cannot do its part, or a host has gone.
            Interrupted: a signal came.
        """
        joined, node_rank, heard = self._joined, self._link.node_rank, Message()
        self._link.start()
        if len(joined.hosts) == 1:  # no others have come: its store serves this host alone
            return ReadyHosts((LOOPBACK, 0), joined.hosts, frozenset({node_rank}))
        self._link.send("listen", address=joined.place[0], port=0)
        handlers = {"listening": lambda node, message: heard.update(message if node == node_rank else {})}
        deadline = time.monotonic() + ANSWER_S
        joined.agents.hear(lambda: bool(heard), handlers, deadline=deadline, on_loss=lambda _, error: _raise(error))
        if not heard.get("port"):
            raise ClusterError(str(heard.get("error") or f"this host's agent says nothing for {ANSWER_S:g} s"))
        master = (joined.place[0], int(heard["port"]))
        return ReadyHosts(master, joined.hosts, frozenset({node_rank}))


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


def _raise(error: MsrunError) -> None:
    raise error
