"""A job of hosts on each of which msrun is typed, on the one that has the scheduler: they come in, and then run as one.

From the moment in which all have come this is a job as over SSH: `FleetRun` coordinates the hosts, and an agent below
this process runs this host's part. Until then the hosts are told who is missing.

The loop of all hosts serves the port at which they come in, for as long as the job lasts. Nothing that a stranger sends
is more than a refused greeting, and whatever goes wrong with one of them ends that connection alone."""

from __future__ import annotations

import errno
import itertools
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from msrun import contract
from msrun.agent.signals import SignalPipe
from msrun.cluster.connection import (
    REFUSED,
    WRONG_KEY,
    Connection,
    Greeting,
    HostRequest,
    NotProved,
    Refused,
    Registry,
    token_of_servers,
)
from msrun.cluster.messages import Message, NotUnderstood
from msrun.errors import ClusterError, Interrupted, MsrunError, PeerFailed
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet.agents import ANSWER_S, AgentLink
from msrun.launch.fleet.hosts import Hosts, ReadyHosts
from msrun.launch.job import Start
from msrun.launch.job_hosts import table_digest
from msrun.launch.remote.logs import LogCollector
from msrun.launch.rendezvous import folder_of, of_hosts
from msrun.launch.transport.link import EventLoop
from msrun.launch.transport.opener import HostOpener, Way
from msrun.planning.hosts import HostAssignment, HostEntry, HostPool, assign_hosts, count_workers
from msrun.planning.record import Record
from msrun.planning.spec import LOOPBACK, LaunchSpec

if TYPE_CHECKING:
    from msrun.cluster.tls import TlsIdentity  # loaded for jobs with --tls_config

GREETING_S = 5.0  # how long somebody who has connected may take to register
MAX_STRANGERS = 128  # connections of which nobody has registered yet, well under the usual limit of 1024 descriptors
MAX_STRANGERS_OF_ONE = 16  # from one address; one more closes the oldest: a host tries again
PRESSED_S = 1.0  # how long each may take where others wait for room
LOOK_S = 1.0  # how often to look whose time is over, and whether there is room again
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
MAX_NOTED = 100  # addresses whose refusals are told; a flood of them must not fill a disk
MAX_NOTES_OF_ONE = 10  # refusals of an address, told for those who know the token apart


class Gate:
    """The port at which hosts come in. Of the loop's thread."""

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        token: bytes,
        tls: TlsIdentity | None,
        knock: Callable[[Stranger, HostRequest], None],
        note: Callable[[str], None],
    ) -> None:
        """`listener`: closed here. `knock`: gets each who knows the token, lets him in or refuses him."""
        listener.settimeout(0.0)
        self._loop, self._listener = loop, listener
        self._token, self._tls = token, tls
        self.knock, self._note = knock, note
        self._strangers: dict[int, Stranger] = {}  # by id, in the order of their coming
        self._notes: Counter[tuple[str, bool]] = Counter()  # refusals by address, and whether the token was known
        self._is_listening = self._is_closed = False

    def open(self) -> None:
        self._loop.call(self._look)

    def close(self) -> None:
        """Send away all who have not been let in, and give up the port."""

        def end() -> None:
            self._is_closed = True
            self._listen(is_wanted=False)
            for stranger in list(self._strangers.values()):
                self.forget(stranger)
            self._listener.close()

        self._loop.call(end)

    def _look(self) -> None:
        if self._is_closed:
            return
        now = time.monotonic()
        for stranger in [one for one in self._strangers.values() if now - one.since > GREETING_S]:
            self.forget(stranger)  # without a word: a host that was only slow tries again
            self.note_refusal(stranger, f"nothing that makes it a host of this job within {GREETING_S:g} s")
        self._listen(is_wanted=True)
        self._loop.call_later(LOOK_S, self._look)

    def handle(self, _mask: int) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers.values()))
            if time.monotonic() - oldest.since < PRESSED_S:
                self._listen(is_wanted=False)
                return
            self.forget(oldest)
        try:
            stream, address = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # whoever waits has to wait for the next look
                self._listen(is_wanted=False)
            return
        same = [one for one in self._strangers.values() if one.host == address[0]]
        if len(same) >= MAX_STRANGERS_OF_ONE:
            self.forget(same[0])
        connection = Connection(stream, self._tls)
        stranger = Stranger(self, connection, self._token, *address[:2])
        self._strangers[id(stranger)] = stranger
        self._loop.selector.register(connection, selectors.EVENT_READ, stranger)

    def _listen(self, *, is_wanted: bool) -> None:
        if is_wanted and not self._is_listening:
            self._loop.selector.register(self._listener, selectors.EVENT_READ, self)
        elif not is_wanted and self._is_listening:
            self._loop.selector.unregister(self._listener)
        self._is_listening = is_wanted

    def release(self, stranger: Stranger) -> bool:
        """Leave a connection to somebody else; False when it is over."""
        if self._strangers.pop(id(stranger), None) is None:
            return False
        self._loop.selector.unregister(stranger.connection)
        if len(self._strangers) < MAX_STRANGERS and not self._is_closed:
            self._listen(is_wanted=True)
        return True

    def forget(self, stranger: Stranger) -> None:
        if self.release(stranger):
            stranger.connection.close()

    def refuse(self, stranger: Stranger, reason: str) -> None:
        # In the clear, to one without a token.
        stranger.connection.send_plain(REFUSED + reason.encode("utf-8", "replace"))
        stranger.connection.close()
        self.note_refusal(stranger, reason)

    def note_refusal(self, stranger: Stranger, reason: str) -> None:
        """Say whom was refused, as far as that is worth a line."""
        key = stranger.host, stranger.knows_token
        if key not in self._notes and sum(knows == key[1] for _, knows in self._notes) >= MAX_NOTED:
            return
        self._notes[key] += 1
        if self._notes[key] <= MAX_NOTES_OF_ONE:
            self._note(f"refused {stranger.host}:{stranger.port}: {reason}")
        if self._notes[key] == MAX_NOTES_OF_ONE:
            self._note(f"{stranger.host} was refused {MAX_NOTES_OF_ONE} times; no more of it is told")


class Stranger(Greeting):
    """Somebody who has connected, until it is a host of the job or is sent away."""

    def __init__(self, gate: Gate, connection: Connection, token: bytes, host: str, port: int) -> None:
        super().__init__(connection, token, is_scheduler=True)
        self._gate, self.host, self.port = gate, host, port
        self.since = time.monotonic()
        self.knows_token = False  # it has proved that; it may be refused all the same

    def handle(self, _mask: int) -> None:
        connection, request = self.connection, None
        try:
            connection.flush()
            while request is None and (bodies := connection.receive()):
                if (message := self.open(bodies[0])) is not None:
                    self.knows_token = True
                    request = HostRequest.from_json(message.get("request"))
        except Exception as error:  # noqa: BLE001 - whatever it has sent, it must not end the job of the others
            said = str(error) if isinstance(error, ValueError | Refused) else f"{type(error).__name__}: {error}"
            reason = said if isinstance(error, NotUnderstood | Refused) else f"no msrun host: {said}"
            if self._gate.release(self):
                self._gate.refuse(self, WRONG_KEY if isinstance(error, NotProved) else reason)
            return
        if request is not None:
            if self._gate.release(self):
                self._gate.knock(self, request)
        elif connection.is_closed:
            self._gate.forget(self)

    def accept(self, silence_s: float) -> None:
        """Let it in. `silence_s`: how long either side may give no sign of life."""
        self.connection.trust()
        self.connection.send({"type": "accepted", "silence_s": silence_s})


WAITING_LINE_S = 5.0
RETELL_S = 0.5
OWN = "own"  # the key of this host among those that have come


class JoinedHosts(Hosts):
    """The hosts of a job from the first that comes; leaving the context lets all of them go."""

    def __init__(
        self,
        spec: LaunchSpec,
        start: Start,
        request: HostRequest,
        place: tuple[str, int],
        listener: socket.socket,
        token: bytes,
        tls: TlsIdentity | None,
        signals: SignalPipe,
    ) -> None:
        """`spec`: of this host, as the user gave it. `request`: as which this host takes part. `place`: numeric address
        and port at which hosts come in. `listener`: the socket there; this object's from now on."""
        super().__init__(spec, start, signals, folder=spec.log_dir)
        self._request, self.place = request, place
        self._gate = Gate(self.agents.loop, listener, token, tls, self._on_knock, self._on_note)
        self.agents.on_other = self._on_other
        self._registry = Registry(spec.worker_num, spec.max_restarts, spec.table_hosts, table_digest(spec.table_hosts))
        self._places: dict[HostEntry, _Place] = {}  # hosts of the job, or of its next start
        self._folders = itertools.count()
        self._regroup: Callable[[str], None] | None = None  # starts the job that runs again, and why
        self.hosts: tuple[HostAssignment, ...] = ()  # in the order of their node_rank, once all have come
        self.own: HostAssignment  # this one, then
        self._window_end = 0.0  # until when more may come; 0 while those that have are too few
        self._events: EventLog | None = None

    def __enter__(self) -> Self:
        self._gate.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not self.agents.has_begun:
            code = error.exit_code if isinstance(error, MsrunError) else 1
            reason = str(error) if isinstance(error, PeerFailed) else f"the scheduler's host gave up: {error}"
            self.agents.others += self.agents.links
            self.agents.links = []
            self.call_off(reason, code)
        self._gate.close()
        super().__exit__(kind, error, trace)

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
        """Wait until all hosts have come. Raises PeerFailed: not everybody came in time; Interrupted: a signal came."""
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
                every=(min(WAITING_LINE_S, max(RETELL_S, spec.join_window_s)), self._tell_missing),
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
        number = next(self.agents.numbers)
        if self._spec.min_hosts and self._registry.is_complete and not self.hosts:
            self._number()  # this one has come in the same moment as the last of them
        is_late, connection = bool(self.hosts), stranger.connection
        name, devices = request.describe(), tuple(range(request.local_worker_num))
        entry = HostEntry(
            f"host {number} {name}" if is_late else name, len(devices), devices, address=request.address, has_come=True
        )
        link = self.agents.make_link(entry, Way(lambda _: connection), None, number, has_dialled=True)
        try:
            if is_late and self._spec.min_hosts:
                self._registry.check_late(request)
            else:
                self._registry.add(link, request)
        except Refused as error:
            self._gate.refuse(stranger, str(error))
            return
        stranger.accept(self._spec.heartbeat_time_out_s)
        self._say(f"{name} registered with {count_workers(request.local_worker_num)}")
        connection.address = request.address
        self.agents.others.append(link)
        link.start()
        if is_late:
            self._places[entry] = _Place(link, request.name, next(self._folders))
            self.pool.add(entry)
            link.send("waiting", text="the job runs; this host is used from its next start on")
            if self._spec.rescale_now and self._regroup is not None and self.pool.can_grow:
                self._regroup(f"{entry.name} has come (--rescale now)")

    def note_started(self, spec: LaunchSpec, regroup: Callable[[str], None]) -> None:
        del spec
        self._regroup = regroup

    def _on_other(self, link: AgentLink, message: Message) -> None:
        if message["type"] != "lost" or not link.has_dialled or link not in self.agents.others:
            return
        self.agents.others.remove(link)
        if self._registry.remove(link) is not None and not self.hosts:
            self._say(f"{message['reason']}; it may register again")
        elif self._places.pop(link.entry, None) is not None:
            self._say(f"{message['reason']}; the job did not use it")
            self.pool.remove(link.entry)

    def _number(self) -> None:
        assignments = sorted(self._registry.assignments().items(), key=lambda item: item[1].node_rank)
        self.hosts = tuple(one for _, one in assignments)
        self.own = dict(assignments)[OWN]
        came = f"all {len(self.hosts)} hosts have come" if len(self.hosts) > 1 else "no other host has come"
        self._say(f"{came}; this is {self.own.describe()}")
        for key, one in assignments:
            entry, link = _entry(one), key if isinstance(key, AgentLink) else None
            if link is not None:
                link.entry = entry
            self._places[entry] = _Place(link, one.name, next(self._folders))
        spec, own = self._spec, _entry(self.own)
        self.pool = HostPool([*self._places], (), spec.min_hosts, spec.worker_num if spec.min_hosts else 0, needed=own)

    def whole_spec(self) -> LaunchSpec:
        """Return what is asked of all hosts together, once they have come."""
        spec, own = self._spec, self.own
        return replace(
            of_hosts(spec, self.hosts),
            node_rank=own.node_rank,
            master_port=spec.master_port if len(self.hosts) > 1 else 0,
            log_dir=folder_of(spec.log_dir, own.node_rank),
            host_entries=tuple(map(_entry, self.hosts)),
            min_hosts=spec.min_hosts,
            table_hosts=self.hosts,
            server_token=token_of_servers(spec.token, self._start.job_id) if spec.token else spec.server_token,
        )

    def begin(self, events: EventLog) -> None:
        """The log directory is known now: `events` is for whom the gate sends away, too."""
        self._events = events
        self._opener = HostOpener(self.whole_spec(), self._start.job_id, self._say)

    def run(self, spec: LaunchSpec, logs: LogCollector | None, lost: Collection[HostEntry] = ()) -> ReadyHosts:
        """Return hosts that are ready, with this one's own agent: see `Hosts`. `spec` is from `whole_spec`."""
        agents, own = self.agents, spec.node_rank
        agents.logs, agents.folder, agents.has_begun, self._regroup = logs, spec.log_dir, False, None
        for entry in lost:
            if (place := self._places.pop(entry, None)) and place.link is not None:
                place.link.dismiss()
        entry = spec.host_entries[own]
        if self._places[entry].link is None:
            link = self._link(spec, self.own, self._start.caller, will_run=True, is_launchers_host=True)
            link.start()
            self._places[entry] = replace(self._places[entry], link=link)
        places = [self._places[entry] for entry in spec.host_entries]
        known = [*agents.links, *agents.others]
        agents.links = [place.link for place in places if place.link is not None]
        agents.others = [link for link in known if link not in agents.links]
        hosts = tuple(
            replace(host, name=place.name)
            for host, place in zip(assign_hosts(spec.host_entries, spec.table_hosts), places, strict=True)
        )
        folders = {node: place.folder for node, place in enumerate(places)}
        shared = frozenset({own})
        self.failed_nodes = {node for node, link in enumerate(agents.links) if link.is_over}
        if len(hosts) == 1:  # no others have come: its store serves this host alone
            return ReadyHosts((LOOPBACK, 0), hosts, shared, folders=folders)

        def lose(node: int, error: MsrunError) -> None:
            self.failed_nodes |= {node} if node != own else set()
            raise error

        if self.failed_nodes:
            names = ", ".join(spec.host_entries[node].name for node in sorted(self.failed_nodes))
            raise ClusterError(f"lost {names}, before the job began")
        heard = agents.open_store(own, self.place[0], 0, lose, lambda: False)
        if not heard.get("port"):
            raise ClusterError(str(heard.get("error") or f"this host's agent says nothing for {ANSWER_S:g} s"))
        return ReadyHosts((self.place[0], int(heard["port"])), hosts, shared, folders=folders)


class _Place(Record):
    """A host that has come."""

    link: AgentLink | None  # None: this host, whose agent has not been started
    name: str
    folder: int  # number of its log directory


def _entry(assignment: HostAssignment) -> HostEntry:
    name, slots = assignment.describe(), len(assignment.ranks)
    return HostEntry(name, slots, assignment.device_ids, address=assignment.address, has_come=True)
