"""One start of a job on many hosts that are ready: they are coordinated from here until all have ended.

The launcher is the coordinator. It speaks with each agent over the connection that it has made to it, and no host opens
a port for that.
"""

from __future__ import annotations

import base64
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from msrun import contract
from msrun.agent.observer import Observers, OwnFaults
from msrun.cluster.coordinator import REPORTS, Coordinator
from msrun.cluster.failure import JobFailure, fault_of_job, merge_failures, read_failure
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.messages import Message
from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.launch.console import Console, say
from msrun.launch.directory.jobs import publish
from msrun.launch.directory.log_directory import EventLog, describe_removed, write_private
from msrun.launch.failure import at_home, hide_secrets, write_failure
from msrun.launch.fleet.agent_link import SALVAGE_S
from msrun.launch.fleet.agents import OF_LAUNCHER, Agents
from msrun.launch.fleet.fleet_plan import HostPlans, keep_attempt, ranks_of_hosts
from msrun.launch.fleet.log_collector import LogCollector
from msrun.launch.fleet.preparation import ReadyHosts
from msrun.launch.fleet.record import FleetRecord, NotUnderstood
from msrun.launch.job import JobResult
from msrun.launch.preflight.fleet_checks import FAR_SKEW_S, describe_skew
from msrun.launch.rank_table_file import write_rank_table
from msrun.launch.terminal import UserTerminal
from msrun.planning.hosts.assignment import HostPool
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.ranks import count_workers
from msrun.planning.record_json import encode_record
from msrun.planning.spec import LaunchSpec

TICK_S = 0.2
END_S = 15.0
"""How long past its grace a host may take to end before it is given up."""


class FleetRun:
    """A job from its start on all hosts to its result, or to the loss of hosts. Use once."""

    def __init__(
        self,
        spec: LaunchSpec,
        job_id: str,
        agents: Agents,
        ready: ReadyHosts,
        logs: LogCollector,
        events: EventLog,
        forwarded: Mapping[str, str],
        faults: OwnFaults,
        *,
        quiet: bool,
        earlier: Sequence[dict[str, int | float | str]] = (),
        pool: HostPool | None = None,
        terminal: UserTerminal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            forwarded: variables that the hosts got from here.
            earlier: the attempts on other hosts, as `JobFailure` has them.
            pool: as `Coordinator`.
            terminal: it, or standard input, belongs to a rank; closed by the caller.
        """
        self.attempts = list(earlier)
        """Those that are over, of other hosts and of these."""
        self._clock = clock
        self._spec = spec
        self._job_id = job_id
        self._agents = agents
        self._ready = ready
        self._logs = logs
        self._events = events
        self._faults = faults
        self._quiet = quiet
        self._plans = HostPlans(spec, job_id, forwarded, self._check_own)
        self._results: dict[int, JobFailure | None] = {}
        self._survivors: list[int] = []
        self.late_losses: set[int] = set()
        """Hosts that were lost when it was decided already on which ones the job goes on."""
        self.end_reason = ""
        """Why the job has ended on these hosts, where it goes on elsewhere."""
        self._ended: set[int] = set()
        """Hosts of which nothing more is to come."""
        self._fault: MsrunError | None = None
        """A host was lost, or the launcher could not do its part: the first of that."""
        self._give_up_at: float | None = None
        self._restarted_at = 0.0
        """When hosts were told to begin the newest attempt (s since the epoch)."""
        self._plan: LaunchPlan | None = None
        self._started_at = self._clock()
        self._display: Console | None = None
        self._terminal = terminal
        if terminal is not None:
            agents.stop_self = terminal.stop_process
        self._ranks = ranks_of_hosts(spec)
        policy, has_begun = RestartPolicy.of(spec), spec.first_attempt > 0
        self.coordinator = Coordinator(job_id, self._ranks, policy, has_begun=has_begun, pool=pool)
        self._observers = Observers([events], faults)
        self._record = FleetRecord(self._ranks, self._observers)

    def start(self, on_directory: Callable[[], None]) -> None:
        """Tell all agents to begin.

        Args:
            on_directory: called when the log directory holds the job's plan.
        """
        agents, ready = self._agents, self._ready
        self._on_directory = on_directory
        self._started_at = self._clock()
        address, port = ready.master
        agents.has_begun, parts = True, ready.parts(self._spec, self._job_id, port)
        for link, part in zip(agents.links, parts, strict=True):
            link.begin()
            link.send("run", part=encode_record(part))
        self._events.note("agents_started", {"hosts": len(agents.links), "master": f"{address}:{port}"})

    def finish(self) -> JobResult | None:
        """Wait until every host has ended its part, and return how the job ended; None when it goes on elsewhere."""
        self._hear(self._is_over)
        if self.coordinator.goes_on and self._agents.interrupt is None:
            self._await_salvage()
            self._end_attempt()
            return None
        return self._conclude()

    def _await_salvage(self) -> None:
        """Wait until what silent hosts have left is here: afterwards their logs are those of another attempt."""
        links, end = self._agents.links, time.monotonic() + 2 * SALVAGE_S
        while any(link.is_salvaging for link in links) and time.monotonic() < end:
            self._agents.hear(lambda: False, {}, deadline=self._clock() + TICK_S)

    @property
    def plan(self) -> LaunchPlan | None:
        """The plan of the job on these hosts; None as long as not all have said what they will run."""
        return self._plan

    @property
    def restarts(self) -> int:
        """How often the job has started again, on other hosts before and on these."""
        return self._spec.first_attempt + self.coordinator.begun

    def set_logs_aside(self) -> None:
        """Rename the logs of an attempt after which the job goes on elsewhere, and keep the plan that names its ranks.

        Raises:
            ClusterError: one cannot be renamed.
        """
        traces = [contract.trace_file_name(rank) for ranks in self._ranks.values() for rank in ranks]
        logs = [Path(path).name for host in self._plans.hosts.values() for path in host.log_paths]
        keep_attempt(self._spec.log_dir, self.restarts, self._plan, [*traces, *logs, contract.SCHEDULER_LOG])

    def _hear(self, is_done: Callable[[], bool]) -> None:
        handlers = {
            "planned": self._on_planned,
            "event": lambda node, m: self._record.note(node, str(m["moment"]), m["fields"]),
            **dict.fromkeys(REPORTS, self._on_report),
            "result": self._on_result,
            "shown": lambda node, m: self._terminal_of(node).show(base64.b64decode(m["data"], validate=True)),
            "taken": lambda node, m: self._terminal_of(node).taken(int(m["count"])),
            "logs_end": lambda node, _: self._ended.add(node),
            "broken": self._on_broken,
            "lost": self._on_lost,
            "error": self._on_error,
            "fault": self._on_fault,
            "cut": lambda node, m: self._events.note("cut", {"node_rank": node, "reason": m["reason"]}),
            "resumed": lambda node, _: self._events.note("resumed", {"node_rank": node}),
        }
        self._agents.hear(
            is_done,
            handlers,
            every=(TICK_S, self._tick),
            on_fault=lambda error: self._fail(self._faults.end_of_job(error)),
        )

    def _is_over(self) -> bool:
        return len(self._ended) == len(self._agents.links)

    # -- what hosts say -----------------------------------------------------------------------------------------------

    def _on_planned(self, node_rank: int, message: Message) -> None:
        self._plans.take(node_rank, message)
        if self._plans.is_whole:
            self._write_plan()

    def _check_own(self, node_rank: int, host: HostPlan) -> None:
        """A host speaks of its own workers and logs; of others it is not believed."""
        ranks = tuple(worker.global_rank for worker in host.workers)
        names = [Path(path).name for worker in host.workers for path in worker.log_paths]
        if host.node_rank != node_rank or ranks != self._ranks[node_rank]:
            raise NotUnderstood("its plan is that of another host")
        if not all(self._logs.is_own(node_rank, name) for name in names):
            raise NotUnderstood("its plan names the logs of another host")

    def _write_plan(self) -> None:
        plan = self._plan = self._plans.assemble(self._ready.master)
        try:
            write_private(self._spec.log_dir / contract.PLAN_JSON, json.dumps(plan.to_json(), indent=2) + "\n")
            if self._spec.rank_table_file is None:
                write_rank_table(plan)
            own = [log for log in plan.log_paths if Path(log).parent == self._spec.log_dir]  # not those of node_1
            publish(self._spec.log_dir, self._job_id, own, self._spec.log_keep_jobs)
        except OSError as error:
            self._fail(UsageError(f"--log_dir {plan.log_dir}: cannot write {error.filename} ({error.strerror})"))
        except UsageError as error:
            self._fail(error)
        self._display = Console(self._spec, plan, self._faults, quiet=self._quiet, terminal=self._terminal)
        try:
            self._display.open_metrics()
        except UsageError as error:
            self._fail(error)
        self._observers.add(self._display.observers)  # moments before the plan are in the event log alone
        self._say(f"{count_workers(plan.world_size)} on {_hosts_in_words(plan)}, logs in {plan.log_dir}")
        for note in (*self._ready.warnings, *plan.notes):
            self._say(note)
        self._on_directory()

    def _terminal_of(self, node_rank: int) -> UserTerminal:
        if self._terminal is None or self._spec.interactive_rank not in self._ranks[node_rank]:
            raise ValueError("no rank of it has the terminal")
        return self._terminal

    def _on_report(self, node_rank: int, message: Message) -> None:
        orders = []
        if message["type"] == "ready" and (skew := self._describe_skew(float(message["clock_s"]))):
            name = self._spec.host_entries[node_rank].name
            reason = f"{name}: cannot start again: {skew}; start chrony or ntpd there"
            orders = self.coordinator.unfit(node_rank, reason)
        self.coordinator.may_go_on = self._agents.interrupt is None
        self._give(orders or self.coordinator.hear(node_rank, message))

    def _describe_skew(self, clock_s: float) -> str:
        return describe_skew(clock_s - time.time(), clock_s - self._restarted_at, FAR_SKEW_S)

    def _on_result(self, node_rank: int, message: Message) -> None:
        value = message["failure"]
        self._results[node_rank] = self._at_home(read_failure(value)) if value is not None else None
        self._survivors += [pid for pid in message["survivors"] if type(pid) is int]

    def _on_error(self, node_rank: int, message: Message) -> None:
        """The agent could not begin its part, or has failed itself."""
        text, code = f"{self._spec.host_entries[node_rank].name}: {message['text']}", message["exit_code"]
        self._lose(node_rank, UsageError(text) if code == contract.EXIT_USAGE else ClusterError(text))
        self._ended.add(node_rank)

    def _on_fault(self, node_rank: int, message: Message) -> None:
        """A thread of msrun has failed, there or here: the job ends, as far as it can by all hosts' own means."""
        name = "" if node_rank == OF_LAUNCHER else f"{self._spec.host_entries[node_rank].name}: "
        self._fail(ClusterError(f"{name}{message['text']}"))

    def _on_broken(self, node_rank: int, message: Message) -> None:
        """The agent has ended before its time; what it has left is fetched before it is lost."""
        self._lose(node_rank, self._agents.explain_loss(message, node_rank))

    def _on_lost(self, node_rank: int, message: Message) -> None:
        self._on_broken(node_rank, message)
        self._ended.add(node_rank)

    def _lose(self, node_rank: int, fault: MsrunError) -> None:
        """Nothing more is to be expected of a host, unless it has told how its part ended."""
        if node_rank in self._ended or node_rank in self._results:
            return
        self._note_fault(fault)
        self._record.lost(node_rank)
        if self.coordinator.goes_on and node_rank not in self.coordinator.losses:
            self.late_losses.add(node_rank)
        self._give(self.coordinator.lost(node_rank, str(fault), fault.exit_code))

    # -- what hosts are told ------------------------------------------------------------------------------------------

    def _give(self, orders: Iterable[Message]) -> None:
        """Pass the coordinator's orders on to all hosts, and do what they mean here."""
        for order in orders:
            self._agents.tell_all(order["type"], **{name: order[name] for name in order if name != "type"})
            if order["type"] == "stop":
                self._limit_end()
            elif order["type"] == "restart":
                self._give_up_at, self._restarted_at = None, time.time()
                number = order["attempt"] + self._spec.first_attempt
                self._note_attempt(number - 1, order["reason"])
                self._record.restart(number, order["delay_s"], order["reason"], order["ranks"])

    # -- the end ------------------------------------------------------------------------------------------------------

    def regroup(self, reason: str) -> None:
        """Start again at once, on the hosts that have come by now."""
        self._give(self.coordinator.regroup(reason))

    def _fail(self, fault: MsrunError) -> None:
        """The launcher cannot do its part."""
        self._note_fault(fault)
        self._give(self.coordinator.fail(str(fault), fault.exit_code))

    def _note_fault(self, fault: MsrunError) -> None:
        if self._fault is None:
            self._fault = fault
            self._events.note("fault", {"reason": str(fault)})

    def _limit_end(self) -> None:
        if self._give_up_at is None:
            self._give_up_at = self._clock() + self._spec.grace_s + END_S

    def _tick(self) -> None:
        now = self._clock()
        if self._agents.interrupt is not None:
            self.coordinator.may_go_on = False
            self._limit_end()
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up()
        self._let_hosts_leave()
        self._observers.tick(self._record.membership)

    def _let_hosts_leave(self) -> None:
        """Take what `msrun drain` has asked for."""
        folder = self._spec.log_dir / contract.DRAIN
        for request in folder.iterdir() if folder.exists() else ():
            request.unlink(missing_ok=True)
            for node, link in enumerate(self._agents.links):
                own = self._plans.hosts.get(node)
                if not link.is_over and unquote(request.name) in (link.entry.name, own.name if own else ""):
                    link.send("signal", signum=int(signal.SIGTERM))

    def _give_up(self) -> None:
        for node, link in enumerate(self._agents.links):
            if node not in self._ended:
                self._lose(node, ClusterError(f"{link.entry.name}: did not end its part of the job in time"))
                self._ended.add(node)

    def _note_attempt(self, number: int, reason: str) -> None:
        now = self._clock()
        if self.attempts and self.attempts[-1]["attempt"] == number:  # the next one could not begin
            self.attempts[-1]["reason"] = f"{self.attempts[-1]['reason']}; then {reason}"
        else:
            self.attempts.append({"attempt": number, "reason": reason, "run_time_s": round(now - self._started_at, 3)})
        self._started_at = now

    def _end_attempt(self) -> None:
        """Say that the job goes on elsewhere."""
        lost, report = self.coordinator.losses, self.coordinator.report
        ranks = sorted(rank for node in lost for rank in self._ranks[node])
        reason = "; ".join(lost.values()) or (report.failure.reason if report else "")
        if not lost and report:
            ranks = [worker.global_rank for worker in report.failure.guilty]
        self.end_reason = reason
        self._note_attempt(self.restarts, reason)
        self._events.note(
            "restarting", {"attempt": self.restarts + 1, "delay_s": 0.0, "reason": reason, "global_ranks": ranks}
        )
        if self._display is not None:
            self._display.pause()

    def _conclude(self) -> JobResult:
        failure, problem = self._find_failure(), ""
        plan = self._plan or self._plans.assemble(self._ready.master)
        self._events.note("over", {"reason": failure.reason if failure else "all workers ended with exit code 0"})
        if failure is not None:
            failure = hide_secrets(replace(failure, attempts=self.attempts), plan.secrets)
            problem = write_failure(plan, failure)
        if problem := describe_removed(self._spec.log_dir, self._events.folder) or problem:
            self._say(problem)
        if self._display is not None:
            self._display.finish(failure, self._record.membership, self.restarts)
        if self._logs.fault:
            self._say(f"logs are not complete: {self._logs.fault}")
        return JobResult(plan, failure, tuple(self._survivors))

    def _find_failure(self) -> JobFailure | None:
        """Return why the job failed; that the user has ended it comes before everything."""
        interrupt, report = self._agents.interrupt, self.coordinator.report
        found = [failure for _, failure in sorted(self._results.items()) if failure is not None]
        if interrupt is not None:
            failure = fault_of_job(self._job_id, str(interrupt), interrupt.exit_code)
        elif report is not None:
            failure = self._at_home(report.failure)
        elif self._fault is not None:  # after the last worker's end: a result, or logs, are missing
            failure = fault_of_job(self._job_id, str(self._fault), self._fault.exit_code)
        elif found:
            failure = found[0]
        else:
            return None
        return merge_failures(failure, found)

    def _at_home(self, failure: JobFailure) -> JobFailure:
        return failure if self._spec.is_joined else at_home(failure, self._spec.log_dir)

    def _say(self, text: str) -> None:
        say(text, quiet=self._quiet)


def _hosts_in_words(plan: LaunchPlan) -> str:
    count = len(plan.hosts)
    return plan.hosts[0].where if count == 1 else f"{count} hosts"
