"""Before a job starts anywhere: reach all hosts at once, ask what they are, compare them, let them reach node 0."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType

from msrun import __version__, contract
from msrun.agent.signals import SignalPipe
from msrun.cluster.messages import Message, pack_hosts, pack_text
from msrun.cluster.protocol import Finding, HostJob, HostPart, HostReport, ReachResult, protocol
from msrun.errors import MsrunError, RendezvousTimeout
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet.agent_link import AgentLink
from msrun.launch.fleet.agents import ANSWER_S, CLOSE_S, Agents
from msrun.launch.fleet.fleet_plan import spec_of_host
from msrun.launch.fleet.log_collector import LogCollector
from msrun.launch.fleet.opener import HostOpener
from msrun.launch.preflight.fleet_checks import (
    LOOPBACK,
    HostAnswer,
    LauncherFacts,
    check_reach,
    choose_master_address,
    compare_hosts,
    describe_finding,
    fleet_error,
    printable_record,
)
from msrun.launch.preflight.host_look import read_sources, shown_word
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.assignment import assign_hosts
from msrun.planning.hosts.forwarded import explain_kept_secrets, forwarded_environment
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.record_json import decode_record
from msrun.planning.spec import LaunchSpec, is_loopback
from ranktable.files import MAX_BYTES, read_text
from ranktable.hosts.brackets import fold

WAITING_LINE_S = 5.0
AFTER_LOSS_S = 1.0
"""How long the others may take to answer once a host that was reached has gone: what ends one often ends several."""
SHOWN_NAMES = 6


@dataclass(frozen=True)
class ReadyHosts:
    """Hosts that are ready to start together."""

    master: tuple[str, int]
    """Numeric address and port of the scheduler's store, on node 0; port 0 when there is one host."""
    hosts: tuple[HostAssignment, ...]
    """By node_rank, with the names and addresses that they have themselves."""
    shared: frozenset[int]
    """Node ranks of those that see the launcher's log directory."""
    warnings: tuple[str, ...] = field(default=())
    folders: Mapping[int, int] = field(default_factory=dict)
    """Node rank -> number of the log directory, of hosts where msrun was typed."""

    def parts(self, spec: LaunchSpec, job_id: str, master_port: int) -> Iterator[HostPart]:
        """Yield what each host is told when it is to plan or to run its part, in the order of their node_rank."""
        table = None if spec.is_joined else spec.rank_table_file  # each of those has it
        hosts = pack_hosts(self.hosts if len(self.hosts) > 1 else ())
        text = pack_text(read_text(table, MAX_BYTES) if table else "")
        for host, entry in zip(self.hosts, spec.host_entries, strict=True):
            is_own = entry.has_come and host.node_rank == spec.node_rank
            own = spec_of_host(spec, host) if is_own or not entry.has_come else None
            if own is not None and is_own:
                own = replace(own, rank_table_file=spec.rank_table_file, settings=spec.settings)
            yield HostPart(
                job_id,
                host.node_rank,
                own,
                self.master[0],
                master_port,
                use_shared=host.node_rank in self.shared,
                hosts=hosts,
                rank_table=text,
                first_attempt=spec.first_attempt,
                max_restarts=spec.max_restarts,
                folder=self.folders.get(host.node_rank, 0),
            )


class Preparation:
    """The way to all hosts of a job, for all of its starts. A context that gives their agents; leaving it ends them.

    Whoever was of an earlier start, and is well, stays as it is.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        caller: Mapping[str, str],
        job_id: str,
        opener: HostOpener,
        signals: SignalPipe,
        events: EventLog | None,
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            opener: the way to each host; closed with the context.
            events: None for a look that starts nothing.
        """
        self._spec = spec
        self._caller = caller
        self._job_id = job_id
        self._events = events
        self._say = say
        self._assignments = assign_hosts(spec.host_entries, spec.table_hosts)
        self._agents = Agents(signals, spec.forward_signals, spec.heartbeat_time_out_s, spec.ssh.window)
        self._opener = opener
        self._known: dict[HostEntry, tuple[AgentLink, HostAnswer]] = {}
        """Hosts of this start, or of the last one."""
        self._answers: dict[int, HostAnswer | MsrunError] = {}
        self._sent_at: dict[int, float] = {}
        """When each host was reached (s since the epoch)."""
        self._loss_counts_at: float | None = None
        """When the first loss of a host that was reached counts, whoever has not answered (s of `time.monotonic`)."""
        self._reached: dict[int, ReachResult] = {}
        self._begin = time.monotonic()
        self.findings: list[Finding] = []
        """What was found, in the order in which it is to be told."""

    def __enter__(self) -> Agents:
        return self._agents

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._agents.inbox.close)
            stack.callback(self._agents.loop.opening.join, CLOSE_S)
            stack.callback(self._opener.close)  # calls off what is being connected
            stack.callback(self._agents.close)

    def run(self, spec: LaunchSpec, logs: LogCollector | None, lost: Collection[HostEntry] = ()) -> ReadyHosts:
        """Return hosts that are ready.

        Args:
            spec: what is asked of the hosts of this start.
            logs: where their logs go; None for a plan.
            lost: those of the start before without whom it goes on; whoever is wanted again is reached anew.

        Raises:
            UsageError, ClusterError: what stands against it, first of all that was found.
            RendezvousTimeout: hosts did not answer in time.
            Interrupted: a signal came.
        """
        for entry in lost:
            self._known.pop(entry, None)
        ready = self.look(spec, logs)
        error = fleet_error(self.findings, self._spec.host_entries)
        if error is not None:
            raise error
        assert ready is not None, "hosts without a fault, and no address"
        return ready

    @property
    def failed_nodes(self) -> set[int]:
        """The hosts because of which the job cannot start; empty when it is none of them."""
        return {node for finding in self.findings if finding.status == "fail" for node in finding.nodes}

    def look(self, spec: LaunchSpec, logs: LogCollector | None = None) -> ReadyHosts | None:
        """Ask all hosts that are new, and fill `findings`; None when a job could not start.

        Raises:
            Interrupted: a signal came.
        """
        self._spec, self._agents.logs = spec, logs
        self._assignments = assign_hosts(spec.host_entries, spec.table_hosts)
        self._reached, self._sent_at = {}, {}
        self._begin, self._loss_counts_at, self._agents.has_begun = time.monotonic(), None, False
        with shown_word(self._spec.log_dir) as shown:
            self._connect({} if self._spec.is_rehearsal else shown)  # whose logs are sent, as without a shared disk
            self._await_answers()
        entries = spec.host_entries
        for node, answer in self._answers.items():
            if isinstance(answer, HostAnswer):
                self._known[entries[node]] = self._agents.links[node], answer
        given = "" if is_loopback(spec.master_addr) else spec.master_addr
        facts = LauncherFacts(spec.program, __version__, given, self._own_sources(), spec.first_attempt > 0)
        self.findings = compare_hosts(entries, self._answers, facts)
        if spec.tls is not None:
            text = f"--tls_config {spec.tls.source}: not used: hosts and launcher talk over SSH; leave it out"
            self.findings.append(Finding("warn", "tls", text))
        self._note("checked", hosts=len(self._answers))
        if fleet_error(self.findings, entries) is not None:
            return None
        answers = {node: answer for node, answer in self._answers.items() if isinstance(answer, HostAnswer)}
        if len(entries) == 1:
            master = (LOOPBACK, 0)
        else:
            address = choose_master_address(entries, answers, given).address
            port = self._open_scheduler(address)
            if port == 0:
                return None
            master = (address, port)
        shared = frozenset(node for node, answer in answers.items() if answer.report.sees_log_dir)
        warnings = tuple(describe_finding(one, entries) for one in self.findings if one.status == "warn")
        return ReadyHosts(master, self._find_hosts(master[0], answers), shared, warnings)

    def _find_hosts(self, address: str, answers: Mapping[int, HostAnswer]) -> tuple[HostAssignment, ...]:
        """Return the hosts by their own names, and the addresses that they have towards node 0."""
        sources = {0: address, **{node: result.source for node, result in self._reached.items()}}
        sources |= {node: entry.address for node, entry in enumerate(self._spec.host_entries) if entry.is_rehearsed}
        return tuple(
            replace(
                assignment, name=answers[assignment.node_rank].report.host_name, address=sources[assignment.node_rank]
            )
            for assignment in self._assignments
        )

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self, shown: Mapping[str, str]) -> None:
        spec = self._spec
        if kept := explain_kept_secrets(self._caller, spec.forward_env, dict(spec.env)):
            self._say(kept)
        known = {entry: kept for entry, kept in self._known.items() if kept[0].is_open}
        links, new = [], []
        self._answers = {}
        for node, entry in enumerate(spec.host_entries):
            if entry in known:
                links.append(known[entry][0])
                self._answers[node] = known[entry][1]
            else:
                new.append(self._link(node, entry, shown))
                links.append(new[-1])
        for link in self._agents.links:
            if link not in links:
                link.dismiss()
                self._agents.others.append(link)
        self._agents.links, self._known = links, {}
        for link in new:
            link.start()

    def host_job(self, number: int, node: int, entry: HostEntry, shown: Mapping[str, str]) -> HostJob:
        """Return what a host is told first; `shown` as in `HostJob`."""
        spec = self._spec
        return HostJob(
            protocol=protocol(),
            version=__version__,
            job_id=self._job_id,
            number=number,
            spec=spec_of_host(spec, self._assignments[node]),
            environment=forwarded_environment(self._caller, spec.forward_env),
            silence_s=spec.heartbeat_time_out_s,
            will_run=self._agents.logs is not None,
            can_resume=self._opener.can_resume(entry),
            shown=shown,
            master_name=spec.master_addr if node == 0 and not is_loopback(spec.master_addr) else "",
        )

    def _link(self, node: int, entry: HostEntry, shown: Mapping[str, str]) -> AgentLink:
        number = next(self._agents.numbers)
        job = self.host_job(number, node, entry, shown)
        code = self._opener.code(entry, job.environment, number, partial(self._agents.sizes_of, number))
        return self._agents.make_link(entry, partial(self._opener.open, entry), code, job, number)

    def _await_answers(self) -> None:
        handlers = {
            "opened": self._on_opened,
            "checked": self._on_checked,
            "lost": self._on_lost,
        }
        limit_s = self._spec.cluster_time_out_s
        deadline = self._begin + limit_s if limit_s >= 0 else None
        total = len(self._agents.links)
        line = (WAITING_LINE_S, lambda: self._say(self._describe_answers()))
        is_all = self._agents.hear(
            lambda: len(self._answers) == total or self._loss_counts_at is not None,
            handlers,
            deadline=deadline,
            every=line,
            on_loss=self._refuse,
        )
        if self._loss_counts_at is not None:
            limit = self._loss_counts_at
            self._agents.hear(lambda: len(self._answers) == total, handlers, deadline=limit, on_loss=self._refuse)
        elif not is_all:
            for node, link in enumerate(self._agents.links):
                why = "; connected, but its agent says nothing: it is slow to start, or stopped" if link.is_open else ""
                late = RendezvousTimeout(f"--cluster_time_out {limit_s}: no answer in time{why}")
                self._answers.setdefault(node, late)

    def _on_lost(self, node: int, message: Message) -> None:
        """A host has gone: that takes the place of its answer."""
        has_answered, is_run = isinstance(self._answers.get(node), HostAnswer), self._agents.logs is not None
        self._refuse(node, self._agents.explain_loss(message, node))
        if self._loss_counts_at is None and (has_answered or (is_run and node in self._sent_at)):  # --check shows all
            self._loss_counts_at = time.monotonic() + AFTER_LOSS_S

    def _refuse(self, node: int, error: MsrunError) -> None:
        """A host cannot take part; of several reasons the first counts."""
        if not isinstance(self._answers.get(node), MsrunError):
            self._answers[node] = error

    def _describe_answers(self) -> str:
        links = self._agents.links
        missing = [link.entry.name for node, link in enumerate(links) if node not in self._answers]
        lost = [link.entry.name for node, link in enumerate(links) if isinstance(self._answers.get(node), MsrunError)]
        count = len(links) - len(missing) - len(lost)
        return f"{count} of {len(links)} hosts answered{_listed('missing', missing)}{_listed('failed', lost)}"

    def _on_opened(self, node: int, message: Message) -> None:
        self._sent_at[node] = message["at"]
        self._note("connected", node_rank=node, host=self._spec.host_entries[node].name, connect_s=message["seconds"])

    def _on_checked(self, node: int, message: Message) -> None:
        report = decode_record(HostReport, printable_record(message["report"]))
        address = self._agents.links[node].address
        self._answers[node] = HostAnswer(report, self._sent_at[node], time.time(), address)
        self._note("agent_up", node_rank=node)

    def _on_reached(self, node: int, message: Message) -> None:
        self._reached[node] = decode_record(ReachResult, printable_record(message["result"]))

    def _own_sources(self) -> tuple[tuple[str, str], ...]:
        try:
            return tuple(read_sources(self._spec.program, self._spec.working_directory))
        except OSError:
            return ()

    # -- the scheduler ------------------------------------------------------------------------------------------------

    def _open_scheduler(self, address: str) -> int:
        """Return the port on which node 0 listens, once all others have reached it; 0 when that failed."""
        entries, links = self._spec.host_entries, self._agents.links
        said = self._agents.open_store(0, address, self._spec.master_port, self._lose, self._has_failed)
        if not said.get("port"):
            text = said.get("error")
            code = contract.EXIT_USAGE if text else contract.EXIT_CLUSTER
            if not self._has_failed():
                self._add_failure("master_port", text or "does not open the scheduler's port", (0,), code)
            return 0
        port, deadline = int(said["port"]), time.monotonic() + ANSWER_S
        for link in links[1:]:
            link.send("reach", address=address, port=port)
        self._agents.hear(
            lambda: len(self._reached) == len(links) - 1 or self._has_failed(),
            {"reached": self._on_reached},
            deadline=deadline,
            on_loss=self._lose,
        )
        silent = tuple(node for node in range(1, len(links)) if node not in self._reached)
        if silent and not self._has_failed():
            self._add_failure("scheduler", f"did not say in {ANSWER_S:g} s whether it can be reached", silent)
        self.findings += check_reach(entries, self._reached, address, port)
        return 0 if self._has_failed() else port

    def _lose(self, node: int, error: MsrunError) -> None:
        self._add_failure("host", str(error), (node,), error.exit_code)

    def _add_failure(self, name: str, text: str, nodes: Sequence[int], exit_code: int = contract.EXIT_CLUSTER) -> None:
        self.findings.insert(0, Finding("fail", name, text, exit_code, tuple(nodes)))

    def _has_failed(self) -> bool:
        return fleet_error(self.findings, self._spec.host_entries) is not None

    def _note(self, kind: str, **fields: object) -> None:
        if self._events is not None:
            self._events.note(kind, fields)


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f", {what}: {fold(names[:SHOWN_NAMES])}{more}" if names else ""
