"""The hosts of a job: the way to them for all of its starts, what is ready then, and the plan that each of them makes.

They are reached from here, or come (`joined_hosts`). Before a job starts on hosts of a list, all are reached at once,
asked what they are, compared, and let reach node 0. That goes for --dry_run and --check, too, which start nothing."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Self

from msrun import __version__, contract
from msrun.agent.signals import SignalPipe
from msrun.cluster.host_report import Finding, HostReport, ReachResult
from msrun.cluster.messages import Message, pack_hosts, pack_text
from msrun.cluster.protocol import HostJob, HostPart, protocol
from msrun.errors import ClusterError, MsrunError, RendezvousTimeout
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet.agents import ANSWER_S, CLOSE_S, LOSSES, AgentLink, Agents
from msrun.launch.job import Start
from msrun.launch.preflight.checks import inspect_host, read_sources, shown_word
from msrun.launch.preflight.fleet_checks import (
    HostAnswer,
    LauncherFacts,
    check_reach,
    choose_master_address,
    compare_hosts,
    describe_finding,
    fleet_error,
    order_findings,
    printable_record,
)
from msrun.launch.remote.logs import LogCollector
from msrun.launch.transport.opener import HostOpener
from msrun.launch.transport.pipe import agent_command
from msrun.planning.build import plan_agent, plan_job
from msrun.planning.hosts import HostAssignment, HostEntry, HostPool, assign_hosts
from msrun.planning.masking import explain_kept_secrets, forwarded_environment
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.record import Record, decode_record, encode_record
from msrun.planning.spec import LOOPBACK, LaunchSpec, is_loopback
from ranktable.files import MAX_BYTES, read_text
from ranktable.hosts.brackets import fold

WAITING_LINE_S = 5.0
AFTER_LOSS_S = 1.0  # how long others may take to answer after a loss: what ends one often ends several
SHOWN_NAMES = 6
PLANNED_JOB = "JOB"  # stands for the id that a run chooses, so that two plans of a job are the same
OF_LAUNCHER = frozenset({"log_dir", "disk"})  # what the launcher needs of its own host: room for all logs


def spec_of_host(spec: LaunchSpec, assignment: HostAssignment) -> LaunchSpec:
    """Return what is asked of one host; only the launcher's own has the user's table and settings, too."""
    entry = spec.host_entries[assignment.node_rank]
    is_own = entry.has_come and assignment.node_rank == spec.node_rank
    return replace(
        spec,
        host_entries=(),
        stands_for=entry if entry.is_rehearsed else None,
        table_hosts=(assignment,),
        local_worker_num=len(assignment.ranks),
        node_rank=assignment.node_rank if len(spec.host_entries) > 1 else -1,
        token="",
        tls=None,
        rank_table_file=spec.rank_table_file if is_own else None,
        settings=spec.settings if is_own else (),
        tail_ranks=(),
    )


def ranks_of_hosts(spec: LaunchSpec) -> dict[int, tuple[int, ...]]:
    return {assignment.node_rank: assignment.ranks for assignment in assign_hosts(spec.host_entries, spec.table_hosts)}


class ReadyHosts(Record):
    """Hosts that are ready to start together."""

    master: tuple[str, int]  # address and port of the store, on node 0; port 0 when there is one host
    hosts: tuple[HostAssignment, ...]  # by node_rank, with the names and addresses that they have themselves
    shared: frozenset[int]  # node ranks of those that see the launcher's log directory
    warnings: tuple[str, ...] = field(default=())
    folders: Mapping[int, int] = field(default_factory=dict)  # node rank -> number of its log directory, where typed

    def parts(self, spec: LaunchSpec, job_id: str, master_port: int) -> Iterator[HostPart]:
        """Yield what each host is told when it is to plan or to run its part, in the order of their node_rank."""
        table = None if spec.is_joined else spec.rank_table_file  # each of those has it
        hosts = pack_hosts(self.hosts if len(self.hosts) > 1 else ())
        text = pack_text(read_text(table, MAX_BYTES) if table else "")
        for host, entry in zip(self.hosts, spec.host_entries, strict=True):
            has_own = entry.has_come and host.node_rank != spec.node_rank
            yield HostPart(
                job_id,
                host.node_rank,
                None if has_own else spec_of_host(spec, host),
                self.master[0],
                master_port,
                use_shared=host.node_rank in self.shared,
                hosts=hosts,
                rank_table=text,
                first_attempt=spec.first_attempt,
                max_restarts=spec.max_restarts,
                folder=self.folders.get(host.node_rank, 0),
            )


class Hosts(ABC):
    """The hosts of a job. A context; leaving it ends their agents. Who is well stays as he is from start to start."""

    pool: HostPool  # from whom the hosts of each start are chosen

    def __init__(self, spec: LaunchSpec, start: Start, signals: SignalPipe, **given: Any) -> None:
        """`given`: as for `Agents`."""
        self._spec, self._start, self.signals, self._say = spec, start, signals, start.say
        self.agents = Agents(signals, spec.forward_signals, spec.heartbeat_time_out_s, **given)
        self._opener: HostOpener | None = None  # the way to each; closed with this object
        self.failed_nodes: set[int] = set()  # because of which the last `run` has raised; empty: none

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.agents.loop.opening.join, CLOSE_S)
            if self._opener is not None:
                stack.callback(self._opener.close)  # calls off what is being connected
            stack.callback(self.agents.close)

    @abstractmethod
    def run(self, spec: LaunchSpec, logs: LogCollector | None, lost: Collection[HostEntry] = ()) -> ReadyHosts:
        """Return hosts that are ready. `spec`: what is asked of the hosts of this start. `logs`: where their logs go;
        None for a plan. `lost`: those of the start before without whom it goes on; whoever is wanted again is reached
        anew. Raises UsageError, ClusterError: what stands against it, first of all that was found. Raises
        RendezvousTimeout: hosts did not answer in time. Raises Interrupted: a signal came."""

    @abstractmethod
    def note_started(self, spec: LaunchSpec, regroup: Callable[[str], None]) -> None:
        """The job runs on hosts of `spec` from now on; `regroup` starts it again, on those that have come, and why."""

    def _link(self, spec: LaunchSpec, host: HostAssignment, environment: Mapping[str, str], **given: Any) -> AgentLink:
        """Return a link to a host of a start that is reached from here; `given` as for `HostJob`."""
        assert self._opener is not None, "there is a way"
        opener, number = self._opener, next(self.agents.numbers)
        entry = spec.host_entries[host.node_rank]
        job = HostJob(
            protocol=protocol(),
            job_id=self._start.job_id,
            number=number,
            spec=spec_of_host(spec, host),
            environment=environment,
            silence_s=spec.heartbeat_time_out_s,
            can_resume=opener.can_resume(entry),
            **given,
        )
        own = {} if job.is_launchers_host else environment  # whose agent has this process's
        way = opener.way(entry, own, number)
        return self.agents.make_link(entry, way, job, number)


class ListedHosts(Hosts):
    """Hosts of a list, or of a rehearsal: reached from here."""

    def __init__(
        self, spec: LaunchSpec, start: Start, opener: HostOpener, signals: SignalPipe, events: EventLog | None
    ) -> None:
        """`events`: None for a look that starts nothing."""
        super().__init__(spec, start, signals, connects_at_a_time=spec.ssh.window)
        self._events, self._opener = events, opener
        self.pool = HostPool(spec.host_entries, spec.spares, spec.min_hosts)
        self._known: dict[HostEntry, AgentLink] = {}  # of hosts of this start, or of the last one, and spare ones
        self._answers: dict[int, HostAnswer | MsrunError] = {}
        self.agents.on_other = self._on_spare
        self._word = contextlib.ExitStack()  # kept in the log directory until all spare hosts have looked for it
        self._loss_counts_at: float | None = None  # when the first loss counts, whoever has not answered
        self._reached: dict[int, ReachResult] = {}
        self.findings: list[Finding] = []  # what was found, in the order in which it is to be told

    def __exit__(self, *error: Any) -> None:
        with self._word:
            super().__exit__(*error)

    def run(self, spec: LaunchSpec, logs: LogCollector | None, lost: Collection[HostEntry] = ()) -> ReadyHosts:
        for entry in lost:
            self._known.pop(entry, None)
        ready = self.look(spec, logs)
        self.failed_nodes = {node for finding in self.findings if finding.status == "fail" for node in finding.nodes}
        if (error := fleet_error(self.findings, spec.host_entries)) is not None:
            raise error
        assert ready is not None, "hosts without a fault, and no address"
        return ready

    def look(self, spec: LaunchSpec, logs: LogCollector | None = None) -> ReadyHosts | None:
        """Ask all hosts that are new, and fill `findings`; None when a job could not start. Raises Interrupted."""
        self._spec, agents, entries = spec, self.agents, spec.host_entries
        agents.logs, agents.has_begun = logs, False
        self._reached, self._loss_counts_at = {}, None
        hosts = assign_hosts(entries, spec.table_hosts)
        with shown_word(spec.log_dir) as shown:
            begin = time.monotonic()
            self._connect(hosts, {} if spec.is_rehearsal else shown)  # whose logs are sent, as without a shared disk
            self._await_answers(begin)
        answers = {node: answer for node, answer in self._answers.items() if isinstance(answer, HostAnswer)}
        self._known |= {entries[node]: agents.links[node] for node in answers}
        given, sources = "" if is_loopback(spec.master_addr) else spec.master_addr, tuple[tuple[str, str], ...]()
        with contextlib.suppress(OSError):
            sources = tuple(read_sources(spec.program, spec.working_directory))
        facts = LauncherFacts(spec.program, __version__, given, sources, spec.first_attempt > 0)
        self.findings = compare_hosts(entries, self._answers, facts)
        if spec.tls is not None:
            text = f"--tls_config {spec.tls.source}: not used: hosts and launcher talk over SSH; leave it out"
            self.findings.append(Finding("warn", "tls", text))
        self._note("checked", hosts=len(self._answers))
        if self._has_failed():
            return None
        master = (LOOPBACK, 0)
        if len(entries) > 1:
            address = choose_master_address(entries, answers, given).address
            master = address, self._open_scheduler(address)
            if not master[1]:
                return None
        addresses = {0: master[0], **{node: result.source for node, result in self._reached.items()}}
        addresses |= {node: entry.address for node, entry in enumerate(entries) if entry.is_rehearsed}
        return ReadyHosts(
            master,
            tuple(
                replace(host, name=answers[host.node_rank].report.host_name, address=addresses[host.node_rank])
                for host in hosts
            ),
            frozenset(node for node, answer in answers.items() if answer.report.sees_log_dir),
            tuple(describe_finding(one, entries) for one in self.findings if one.status == "warn"),
        )

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self, hosts: Sequence[HostAssignment], shown: Mapping[str, str]) -> None:
        spec, agents = self._spec, self.agents
        if kept := explain_kept_secrets(self._start.caller, spec.forward_env, dict(spec.env)):
            self._say(kept)
        environment = forwarded_environment(self._start.caller, spec.forward_env)
        links, new = [], []
        self._answers = {}
        for host, entry in zip(hosts, spec.host_entries, strict=True):
            link = self._known.get(entry)
            if link is not None and link.answer is not None and link.is_open:
                self._answers[host.node_rank] = link.answer
            elif link is None or link.answer is not None:
                name = spec.master_addr if host.node_rank == 0 and not is_loopback(spec.master_addr) else ""
                will_run = agents.logs is not None
                link = self._link(spec, host, environment, will_run=will_run, shown=shown, master_name=name)
                new.append(link)
            links.append(link)
        for link in agents.links:
            if link not in links:
                link.dismiss()
                agents.others.append(link)
        agents.links = links
        agents.others = [link for link in agents.others if link not in links]
        for link in new:
            link.start()

    def _await_answers(self, begin: float) -> None:
        links, limit_s = self.agents.links, self._spec.cluster_time_out_s
        handlers = {"opened": self._on_opened, "checked": self._on_checked, "lost": self._on_lost}

        def is_all() -> bool:
            return len(self._answers) == len(links)

        has_come = self.agents.hear(
            lambda: is_all() or self._loss_counts_at is not None,
            handlers,
            deadline=begin + limit_s if limit_s >= 0 else None,
            every=(WAITING_LINE_S, self._tell_answers),
            on_loss=self._refuse,
        )
        if self._loss_counts_at is not None:
            self.agents.hear(is_all, handlers, deadline=self._loss_counts_at, on_loss=self._refuse)
        elif not has_come:
            for node, link in enumerate(links):
                why = "; connected, but its agent says nothing: it is slow to start, or stopped" if link.is_open else ""
                late = RendezvousTimeout(f"--cluster_time_out {limit_s}: no answer in time{why}")
                self._answers.setdefault(node, late)

    def _on_lost(self, node: int, message: Message) -> None:
        """A host has gone: that takes the place of its answer."""
        has_answered, is_run = isinstance(self._answers.get(node), HostAnswer), self.agents.logs is not None
        link = self.agents.links[node]
        self._refuse(node, self.agents.explain_loss(message, link))
        if self._loss_counts_at is None and (has_answered or (is_run and link.opened_at)):  # --check shows all
            self._loss_counts_at = time.monotonic() + AFTER_LOSS_S

    def _refuse(self, node: int, error: MsrunError) -> None:
        """A host cannot take part; of several reasons the first counts."""
        if not isinstance(self._answers.get(node), MsrunError):
            self._answers[node] = error

    def _tell_answers(self) -> None:
        names = [link.entry.name for link in self.agents.links]
        missing = [name for node, name in enumerate(names) if node not in self._answers]
        lost = [name for node, name in enumerate(names) if isinstance(self._answers.get(node), MsrunError)]
        count = len(names) - len(missing) - len(lost)
        self._say(f"{count} of {len(names)} hosts answered{_listed('missing', missing)}{_listed('failed', lost)}")

    def _on_opened(self, node: int, message: Message) -> None:
        self._note("connected", node_rank=node, host=self._spec.host_entries[node].name, connect_s=message["seconds"])

    def _on_checked(self, node: int, message: Message) -> None:
        self._answers[node] = self._take_answer(self.agents.links[node], message)
        self._note("agent_up", node_rank=node)

    def _take_answer(self, link: AgentLink, message: Message) -> HostAnswer:
        report = decode_record(HostReport, printable_record(message["report"]))
        link.answer = answer = HostAnswer(report, link.opened_at, time.time(), link.address)
        return answer

    # -- spare hosts --------------------------------------------------------------------------------------------------

    def note_started(self, spec: LaunchSpec, regroup: Callable[[str], None]) -> None:
        """Have the spare hosts ready: one that is needed then starts as fast as those that stay."""
        del regroup  # nobody comes by himself
        environment = forwarded_environment(self._start.caller, spec.forward_env)
        new = [entry for entry in spec.spares if entry not in self._known]
        shown = self._word.enter_context(shown_word(spec.log_dir)) if new and not spec.is_rehearsal else {}
        for entry in new:
            there = replace(spec, host_entries=(*spec.host_entries[:-1], entry))  # in the place of any
            link = self._link(there, assign_hosts(there.host_entries)[-1], environment, will_run=True, shown=shown)
            self._known[entry] = link
            self.agents.others.append(link)
            link.start()

    def _on_spare(self, link: AgentLink, message: Message) -> None:
        if self._known.get(link.entry) is not link:
            return
        if message["type"] == "checked":
            self._take_answer(link, message)
        elif message["type"] in LOSSES:
            self._known.pop(link.entry)
            reason = str(self.agents.explain_loss(message, link)).removeprefix(f"{link.entry.name}: ")
            self._say(f"spare host {link.entry.name}, which is tried again when it is needed: {reason}")
        if all(known.answer for known in self._known.values()):
            self._word.close()

    # -- the scheduler ------------------------------------------------------------------------------------------------

    def _open_scheduler(self, address: str) -> int:
        """Return the port on which node 0 listens, once all others have reached it; 0 when that failed."""
        entries, links = self._spec.host_entries, self.agents.links
        said = self.agents.open_store(0, address, self._spec.master_port, self._lose, self._has_failed)
        if not said.get("port"):
            text = said.get("error")
            code = contract.EXIT_USAGE if text else contract.EXIT_CLUSTER
            if not self._has_failed():
                self._add_failure("master_port", text or "does not open the scheduler's port", (0,), code)
            return 0

        def on_reached(node: int, message: Message) -> None:
            self._reached[node] = decode_record(ReachResult, printable_record(message["result"]))

        port, deadline = int(said["port"]), time.monotonic() + ANSWER_S
        for link in links[1:]:
            link.send("reach", address=address, port=port)
        self.agents.hear(
            lambda: len(self._reached) == len(links) - 1 or self._has_failed(),
            {"reached": on_reached},
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
        self.findings.append(Finding("fail", name, text, exit_code, tuple(nodes)))

    def _has_failed(self) -> bool:
        return fleet_error(self.findings, self._spec.host_entries) is not None

    def _note(self, kind: str, **fields: object) -> None:
        if self._events is not None:
            self._events.note(kind, fields)


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f", {what}: {fold(names[:SHOWN_NAMES])}{more}" if names else ""


# -- their plans ------------------------------------------------------------------------------------------------------


Planned = tuple[HostPlan, list[str], str]  # what a host has decided to run, its notes, and its kind of devices


def read_planned(message: Message) -> Planned:
    return decode_record(HostPlan, message["host"]), [str(note) for note in message["notes"]], str(message["target"])


def assemble_plan(
    spec: LaunchSpec, planned: Mapping[int, Planned], job_id: str, master: tuple[str, int], forwarded: Mapping[str, str]
) -> LaunchPlan:
    """Return the job's plan as this launcher shows it: logs by their names here. `forwarded`: variables from here."""
    entries, targets = spec.host_entries, [target for _, _, target in planned.values() if target]
    hosts = {node: _at_home(planned[node][0], entries[node], spec.log_dir) for node in sorted(planned)}
    fleet = tuple(
        replace(one, name=hosts[one.node_rank].name, address=hosts[one.node_rank].address)
        for one in assign_hosts(entries, spec.table_hosts)
        if one.node_rank in hosts
    )
    return plan_job(
        spec,
        [*hosts.values()],
        job_id=job_id,
        run_dir=str(Path(tempfile.gettempdir(), f"msrun-{job_id}{f'-{spec.node_rank}' if spec.is_joined else ''}")),
        master=master,
        target=(targets[0] if targets else "", f"as found on {hosts[0].name}" if 0 in hosts else ""),
        notes=_merge_notes({node: notes for node, (_, notes, _) in planned.items()}, entries),
        fleet=fleet if len(entries) > 1 else (),
        forwarded=forwarded,
    )


def _at_home(host: HostPlan, entry: HostEntry, log_dir: Path) -> HostPlan:
    if entry.has_come:  # its logs stay there
        return host
    workers = tuple(
        replace(
            worker,
            log_path=str(log_dir / Path(worker.log_path).name),
            error_log_path=worker.error_log_path and str(log_dir / Path(worker.error_log_path).name),
        )
        for worker in host.workers
    )
    servers = tuple(replace(server, log_path=str(log_dir / Path(server.log_path).name)) for server in host.servers)
    place = host.place or f"{entry.name} ({host.name})"
    return replace(host, workers=workers, servers=servers, place=place, agent=plan_agent(entry, agent_command))


def _merge_notes(notes: Mapping[int, Sequence[str]], entries: Sequence[HostEntry]) -> tuple[str, ...]:
    said: dict[str, list[str]] = {}
    for node_rank, texts in sorted(notes.items()):
        for text in texts:
            said.setdefault(text, []).append(entries[node_rank].name)
    return tuple(
        text if len(names) == len(entries) else f"{names[0]}{' and others' if len(names) > 1 else ''}: {text}"
        for text, names in said.items()
    )


# -- what a job would do, without starting it -------------------------------------------------------------------------


@contextlib.contextmanager
def _reached(spec: LaunchSpec, start: Start) -> Iterator[ListedHosts]:
    opener = HostOpener(spec, start.job_id, start.say)
    with SignalPipe() as signals, ListedHosts(spec, start, opener, signals, None) as hosts:
        yield hosts


def ask_for_plan(spec: LaunchSpec, start: Start) -> LaunchPlan:
    """Reach and check all hosts as a run does, with its errors, and return its plan. Starts no worker."""
    job_id = start.job_id
    with _reached(spec, start) as hosts:
        ready, agents, faults = hosts.run(spec, None), hosts.agents, list[MsrunError]()
        planned: dict[int, Planned] = {}
        for link, part in zip(agents.links, ready.parts(spec, job_id, spec.master_port), strict=True):
            link.send("plan", part=encode_record(part))
        agents.hear(
            lambda: len(planned) == len(agents.links) or bool(faults),
            {"planned": lambda node, message: planned.update({node: read_planned(message)})},
            deadline=time.monotonic() + ANSWER_S,
            on_loss=lambda _, error: faults.append(error),
        )
        silent = [link.entry.name for node, link in enumerate(agents.links) if node not in planned]
        if faults or silent:
            raise faults[0] if faults else ClusterError(f"{silent[0]}: no plan of its part within {ANSWER_S:g} s")
        for warning in ready.warnings:
            start.say(warning)
    master, forwarded = (ready.master[0], spec.master_port), forwarded_environment(start.caller, spec.forward_env)
    plan = assemble_plan(spec, planned, job_id, master, forwarded)
    return decode_record(LaunchPlan, json.loads(json.dumps(encode_record(plan)).replace(job_id, PLANNED_JOB)))


def check_fleet(spec: LaunchSpec, start: Start) -> list[Finding]:
    """Return what `--check` finds, here and on the hosts. Raises Interrupted."""
    with _reached(spec, start) as hosts:
        hosts.look(spec)
    return order_findings([*inspect_launcher(spec, start.caller), *hosts.findings])


def inspect_launcher(spec: LaunchSpec, caller: Mapping[str, str]) -> list[Finding]:
    """Return what was found on this host; writes nothing."""
    return [replace(found, text=f"here: {found.text}") for found in inspect_host(spec, caller, OF_LAUNCHER)]
