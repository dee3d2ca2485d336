"""A job over many hosts from here: its start, and those that follow on other hosts when some are lost.

The launcher is the coordinator. It speaks with each agent over the connection that it has to it, and no host opens a
port for that."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msrun import contract
from msrun.agent.attempt import keep_logs
from msrun.agent.log_file import LogLimit
from msrun.agent.observer import Observers, OwnFaults
from msrun.cluster.coordinator import REPORTS, Coordinator
from msrun.cluster.failure import JobFailure, fault_of_job, merge_failures, read_failure
from msrun.cluster.membership import Membership, RestartPolicy, WorkerState
from msrun.cluster.messages import Message, NotUnderstood
from msrun.cluster.protocol import MOMENTS, read_moment
from msrun.errors import ClusterError, MsrunError, UsageError, refused_as
from msrun.launch.console import Console, say
from msrun.launch.directory.log_directory import EventLog, JobLock, describe_removed, publish, write_private
from msrun.launch.failure import at_home, hide_secrets, write_failure
from msrun.launch.fleet.agents import NO_NODE, SALVAGE_S
from msrun.launch.fleet.hosts import (
    Hosts,
    ListedHosts,
    Planned,
    ReadyHosts,
    assemble_plan,
    ranks_of_hosts,
    read_planned,
)
from msrun.launch.fleet.joined_hosts import JoinedHosts
from msrun.launch.job import JobResult, Start, job_signals
from msrun.launch.preflight.fleet_checks import FAR_SKEW_S, describe_skew
from msrun.launch.rank_table_file import write_rank_table
from msrun.launch.remote.logs import LogCollector, own_logs
from msrun.launch.transport.opener import HostOpener
from msrun.planning.hosts import MAX_FAILURES, HostEntry, count_workers
from msrun.planning.masking import forwarded_environment
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.record import encode_record
from msrun.planning.spec import LOOPBACK, LaunchSpec

TICK_S = 0.2
END_S = 15.0  # how long past its grace a host may take to end before it is given up
_ONCE = frozenset({"stopping", "hang", "waiting"})  # told by every host; the first one is the job's
_AS_THEY_ARE = frozenset({"server", "signal", "note", "lingering"})
_OF_ALL = frozenset({"running", "restarting"})  # moments that have come when they have on every host


class FleetRecord:
    """What happens on all hosts, as one job's moments. Owned by the launcher's loop."""

    def __init__(self, ranks: Mapping[int, tuple[int, ...]], observers: Observers) -> None:
        """`ranks`: node_rank -> global ranks there."""
        self._ranks, self._observers = dict(ranks), observers
        self._told: set[str] = set()
        self._restart: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self.membership = Membership(rank for ranks in self._ranks.values() for rank in ranks)

    def note(self, node_rank: int, kind: str, value: Mapping[str, Any]) -> None:
        """Take a moment of one host; of an unknown kind it is left out (NotUnderstood: no host says this)."""
        if node_rank not in self._ranks or kind not in MOMENTS:
            return
        try:
            fields = read_moment(kind, value)
        except ValueError as error:
            raise NotUnderstood(str(error)) from None
        if kind in ("started", "exited"):
            if fields["global_rank"] in self._ranks[node_rank]:
                self._note_worker(kind, fields)
        elif kind in _AS_THEY_ARE or (kind in _ONCE and kind not in self._told):
            self._told.add(kind)
            self._observers.tell(kind, **fields)
        elif kind not in _ONCE and kind not in _OF_ALL:
            self._observers.tell(f"host_{kind}", node_rank=node_rank, **fields)

    def lost(self, node_rank: int) -> None:
        """A host will tell no more."""
        self._ranks.pop(node_rank, None)

    def restart(self, attempt: int, delay_s: float, reason: str, global_ranks: Sequence[int]) -> None:
        """The coordinator starts the job again, because of these ranks; observers hear of it when all are ready."""
        self._restart = {"attempt": attempt, "delay_s": delay_s, "reason": reason, "global_ranks": list(global_ranks)}
        self._told.clear()
        self._begin()

    def start(self) -> None:
        """All hosts are ready to start again."""
        self._observers.tell("restarting", **self._restart)

    def _note_worker(self, kind: str, fields: Mapping[str, Any]) -> None:
        rank, membership = fields["global_rank"], self.membership
        if kind == "started":
            membership.started(rank, fields["pid"], 0.0)
        else:
            membership.ended(rank, WorkerState(fields["state"]), fields["status"])
        self._observers.tell(kind, **fields)
        if kind == "started" and "running" not in self._told and not membership.count(WorkerState.PLANNED):
            self._told.add("running")
            self._observers.tell("running", world_size=len(membership.members))


class FleetRun:
    """One start of a job on hosts that are ready, to its result, or to the loss of hosts. Use once."""

    def __init__(
        self,
        job: FleetJob,
        spec: LaunchSpec,
        ready: ReadyHosts,
        logs: LogCollector,
        on_directory: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._spec, self._ready, self._logs, self._on_directory = job, spec, ready, logs, on_directory
        self._agents, self._events, self._clock = job.hosts.agents, job.events, clock
        self._planned: dict[int, Planned] = {}
        self._results: dict[int, JobFailure | None] = {}
        self._survivors: list[int] = []
        self.late_losses: set[int] = set()  # hosts lost when those of the next start were chosen already
        self.end_reason = ""  # why the job has ended on these hosts, where it goes on elsewhere
        self._ended: set[int] = set()  # hosts of which nothing more is to come
        self._fault: MsrunError | None = None  # the first: a host lost, or the launcher's own failure
        self._give_up_at: float | None = None
        self._restarted_at = 0.0  # when hosts were told to begin the newest attempt (s since the epoch)
        self.plan: LaunchPlan | None = None  # of the job on these hosts, once all have said theirs
        self._started_at = self._clock()
        self._display: Console | None = None
        self._ranks = ranks_of_hosts(spec)
        policy = RestartPolicy.of(spec, spec.first_attempt)
        self.coordinator = Coordinator(job.job_id, self._ranks, policy, pool=job.hosts.pool)
        self._observers = Observers([job.events], job.faults)
        self._record = FleetRecord(self._ranks, self._observers)

    def start(self) -> None:
        agents, (address, port) = self._agents, self._ready.master
        self._started_at, agents.has_begun = self._clock(), True
        for link, part in zip(agents.links, self._ready.parts(self._spec, self._job.job_id, port), strict=True):
            link.begin()
            link.send("run", part=encode_record(part))
        self._events.note("agents_started", {"hosts": len(agents.links), "master": f"{address}:{port}"})

    def finish(self) -> JobResult | None:
        """Wait until every host has ended its part, and return how the job ended; None when it goes on elsewhere."""
        links = self._agents.links
        self._hear(lambda: len(self._ended) == len(links))
        end = self._clock() + 2 * SALVAGE_S  # afterwards the logs of silent hosts are those of another attempt
        self._hear(lambda: self._clock() >= end or not any(link.is_salvaging for link in links))
        if not self.coordinator.goes_on or self._agents.interrupt is not None:
            return self._conclude()
        self._end_attempt()
        return None

    def set_logs_aside(self) -> None:
        """Rename the logs and traces of an attempt after which the job goes on elsewhere, and keep the plan that names
        its ranks. Raises ClusterError: one cannot be renamed, or the plan cannot be written."""
        folder, attempt = self._spec.log_dir, self.coordinator.begun
        kept = folder / contract.attempt_plan_name(attempt)
        with refused_as(f"cannot start again: cannot write {kept}", kind=ClusterError):
            if self.plan is not None:
                write_private(kept, json.dumps(self.plan.to_json(), indent=2) + "\n")
        names = [contract.trace_file_name(rank) for ranks in self._ranks.values() for rank in ranks]
        names += [Path(path).name for host, _, _ in self._planned.values() for path in host.log_paths]
        keep_logs([str(folder / name) for name in (*names, contract.SCHEDULER_LOG)], attempt)

    def _hear(self, is_done: Callable[[], bool]) -> None:
        handlers = {
            "planned": self._on_planned,
            "event": lambda node, m: self._record.note(node, str(m["moment"]), m["fields"]),
            **dict.fromkeys(REPORTS, self._on_report),
            "result": self._on_result,
            "logs_end": self._on_logs_end,
            "lost": lambda node, m: self._lose(node, self._agents.explain_loss(m, self._agents.links[node])),
            "error": lambda node, m: self._lose(node, self._explain(node, m)),  # it could not begin, or failed itself
            "fault": lambda node, m: self._fail(self._explain(node, m)),  # all hosts end by their own means
            "cut": lambda node, m: self._events.note("cut", {"node_rank": node, "reason": m["reason"]}),
            "resumed": lambda node, _: self._events.note("resumed", {"node_rank": node}),
        }
        self._agents.hear(
            is_done,
            handlers,
            every=(TICK_S, self._tick),
            on_fault=lambda error: self._fail(self._job.faults.end_of_job(error)),
        )

    # -- what hosts say -----------------------------------------------------------------------------------------------

    def _on_planned(self, node_rank: int, message: Message) -> None:
        planned = read_planned(message)
        self._check_own(node_rank, planned[0])
        self._planned[node_rank] = planned
        if len(self._planned) == len(self._spec.host_entries):
            self._write_plan()

    def _assemble(self) -> LaunchPlan:
        forwarded = forwarded_environment(self._job.start.caller, self._spec.forward_env)
        return assemble_plan(self._spec, self._planned, self._job.job_id, self._ready.master, forwarded)

    def _check_own(self, node_rank: int, host: HostPlan) -> None:
        """A host speaks of its own workers and logs; of others it is not believed."""
        ranks = tuple(worker.global_rank for worker in host.workers)
        names = [Path(path).name for worker in host.workers for path in worker.log_paths]
        if host.node_rank != node_rank or ranks != self._ranks[node_rank]:
            raise NotUnderstood("its plan is that of another host")
        if not all(self._logs.is_own(node_rank, name) for name in names):
            raise NotUnderstood("its plan names the logs of another host")

    def _write_plan(self) -> None:
        plan = self.plan = self._assemble()
        job, folder = self._job, self._spec.log_dir
        self._display = Console(self._spec, plan, job.faults, quiet=job.start.quiet)
        try:
            with refused_as(f"--log_dir {plan.log_dir}: cannot write", at=folder):
                write_private(folder / contract.PLAN_JSON, json.dumps(plan.to_json(), indent=2) + "\n")
                if self._spec.rank_table_file is None:
                    write_rank_table(plan)
                own = [log for log in plan.log_paths if Path(log).parent == folder]  # not those of node_1
                publish(folder, job.job_id, own, self._spec.log_keep_jobs)
            self._display.open_metrics()
        except UsageError as error:
            self._fail(error)
        self._observers.add(self._display.observers)  # moments before the plan are in the event log alone
        where = f"{len(plan.hosts)} hosts" if len(plan.hosts) > 1 else plan.hosts[0].where
        job.say(f"{count_workers(plan.world_size)} on {where}, logs in {plan.log_dir}")
        for note in (*self._ready.warnings, *plan.notes):
            job.say(note)
        self._on_directory()

    def _on_report(self, node_rank: int, message: Message) -> None:
        orders, clock_s = [], float(message.get("clock_s", 0.0))
        if message["type"] == "ready" and (
            skew := describe_skew(clock_s - time.time(), clock_s - self._restarted_at, FAR_SKEW_S)
        ):
            name = self._spec.host_entries[node_rank].name
            reason = f"{name}: cannot start again: {skew}; start chrony or ntpd there"
            orders = self.coordinator.fail(reason, node_rank=node_rank, is_unfit=True)
        self.coordinator.may_go_on = self._agents.interrupt is None
        self._give(orders or self.coordinator.hear(node_rank, message))

    def _on_result(self, node_rank: int, message: Message) -> None:
        if not self.coordinator.is_over:
            raise NotUnderstood("it has the result of a job that is not over")
        value = message["failure"]
        self._results[node_rank] = self._at_home(read_failure(value)) if value is not None else None
        self._survivors += [pid for pid in message["survivors"] if type(pid) is int]

    def _on_logs_end(self, node_rank: int, _: Message) -> None:
        if node_rank not in self._results and node_rank not in self._ended:
            raise NotUnderstood("its logs end before it has said how its part has ended")
        self._ended.add(node_rank)

    def _explain(self, node_rank: int, message: Message) -> MsrunError:
        link = None if node_rank == NO_NODE else self._agents.links[node_rank]
        name = f"{self._spec.host_entries[node_rank].name}: " if link else ""
        return self._agents.explain_loss({**message, "text": f"{name}{message['text']}"}, link)

    def _lose(self, node_rank: int, fault: MsrunError) -> None:
        """Nothing more is to be expected of a host."""
        if node_rank not in self._ended and node_rank not in self._results:
            self._note_fault(fault)
            self._record.lost(node_rank)
            if self.coordinator.goes_on and node_rank not in self.coordinator.losses:
                self.late_losses.add(node_rank)
            self._give(self.coordinator.lost(node_rank, str(fault), fault.exit_code))
        self._ended.add(node_rank)

    # -- what hosts are told ------------------------------------------------------------------------------------------

    def _give(self, orders: Iterable[Message]) -> None:
        for order in orders:
            self._agents.tell_all(order["type"], **{name: order[name] for name in order if name != "type"})
            if order["type"] == "stop":
                self._limit_end()
            elif order["type"] == "start":
                self._record.start()
            elif order["type"] == "restart":
                self._give_up_at, self._restarted_at = None, time.time()
                self._note_attempt(order["attempt"] - 1, order["reason"])
                self._record.restart(order["attempt"], order["delay_s"], order["reason"], order["ranks"])

    # -- the end ------------------------------------------------------------------------------------------------------

    def regroup(self, reason: str) -> None:
        """Start again at once, on the hosts that have come by now."""
        self._give(self.coordinator.fail(reason, can_restart=True))

    def _fail(self, fault: MsrunError) -> None:
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
        for node, link in enumerate(self._agents.links):
            if self._give_up_at is not None and now >= self._give_up_at and node not in self._ended:
                self._lose(node, ClusterError(f"{link.entry.name}: did not end its part of the job in time"))
        self._let_hosts_leave()
        self._observers.tick(self._record.membership)

    def _let_hosts_leave(self) -> None:
        """Take what `msrun drain` has asked for."""
        folder = self._spec.log_dir / contract.DRAIN
        for request in folder.iterdir() if folder.exists() else ():
            request.unlink(missing_ok=True)
            for node, link in enumerate(self._agents.links):
                names = [link.entry.name, *([self._planned[node][0].name] if node in self._planned else [])]
                if not link.is_over and unquote(request.name) in names:
                    link.send("signal", signum=int(signal.SIGTERM))

    def _note_attempt(self, number: int, reason: str) -> None:
        now, attempts = self._clock(), self._job.attempts
        if attempts and attempts[-1]["attempt"] == number:  # the next one could not begin
            attempts[-1]["reason"] = f"{attempts[-1]['reason']}; then {reason}"
        else:
            attempts.append({"attempt": number, "reason": reason, "run_time_s": round(now - self._started_at, 3)})
        self._started_at = now

    def _end_attempt(self) -> None:
        """Say that the job goes on elsewhere."""
        lost, report, attempt = self.coordinator.losses, self.coordinator.report, self.coordinator.begun
        guilty = [worker.global_rank for worker in report.failure.guilty] if report else []
        ranks = sorted(rank for node in lost for rank in self._ranks[node]) if lost else guilty
        reason = self.end_reason = "; ".join(lost.values()) or (report.failure.reason if report else "")
        self._note_attempt(attempt, reason)
        self._events.note(
            "restarting", {"attempt": attempt + 1, "delay_s": 0.0, "reason": reason, "global_ranks": ranks}
        )
        if self._display is not None:
            self._display.pause()

    def _conclude(self) -> JobResult:
        failure, problem = self._find_failure(), ""
        plan = self.plan or self._assemble()
        self._events.note("over", {"reason": failure.reason if failure else "all workers ended with exit code 0"})
        if failure is not None:
            failure = hide_secrets(replace(failure, attempts=self._job.attempts), plan.secrets)
            problem = write_failure(plan, failure)
        if problem := describe_removed(self._spec.log_dir, self._events.folder) or problem:
            self._job.say(problem)
        if self._display is not None:
            self._display.finish(failure, self._record.membership, self.coordinator.begun)
        if self._logs.fault:
            self._job.say(f"logs are not complete: {self._logs.fault}")
        return JobResult(plan, failure, tuple(self._survivors))

    def _find_failure(self) -> JobFailure | None:
        """Return why the job failed; that the user has ended it comes before everything."""
        interrupt, report = self._agents.interrupt, self.coordinator.report
        found = [failure for _, failure in sorted(self._results.items()) if failure is not None]
        fault = interrupt or (self._fault if report is None else None)  # then a result, or logs, are missing
        if fault is not None:
            return merge_failures(fault_of_job(self._job.job_id, str(fault), fault.exit_code), found)
        if report is not None:
            return merge_failures(self._at_home(report.failure), found)
        return merge_failures(found[0], found) if found else None

    def _at_home(self, failure: JobFailure) -> JobFailure:
        return failure if self._spec.is_joined else at_home(failure, self._spec.log_dir)


class FleetJob:
    """A job on the hosts of a list, or on those that have come: its starts, each on hosts that the pool has chosen."""

    def __init__(self, spec: LaunchSpec, start: Start, hosts: Hosts, events: EventLog, faults: OwnFaults) -> None:
        self._spec, self.start, self.job_id, self.hosts = spec, start, start.job_id, hosts
        self.events, self.faults, self.say = events, faults, start.say
        self.attempts: list[dict[str, int | float | str]] = []  # those that are over, as of `JobFailure`
        self._restarts = 0
        self._plan: LaunchPlan | None = None  # of the last start that got as far

    def run(self, on_directory: Callable[[], None]) -> JobResult:
        """Run the job to its end. Arguments and errors as `run_fleet_job`; use once."""
        lost: list[HostEntry] = []
        while True:
            with contextlib.ExitStack() as of_start:
                result, lost = self._start(self._asked(), lost, on_directory, of_start)
            if result is not None:
                return result

    def _start(
        self, spec: LaunchSpec, lost: list[HostEntry], on_directory: Callable[[], None], stack: contextlib.ExitStack
    ) -> tuple[JobResult | None, list[HostEntry]]:
        """Return how the job ended, or None and the hosts that were lost when it is to start again, on other hosts."""
        hosts, pool = self.hosts, self.hosts.pool
        limit = LogLimit(spec.log_max_bytes, spec.log_keep) if spec.log_max_bytes else None
        own = own_logs(spec.worker_log_name, ranks_of_hosts(spec), spec.server_num, home=max(spec.node_rank, 0))
        logs = LogCollector(spec.log_dir, limit, own, spec.max_restarts, spec.first_attempt)
        stack.callback(logs.close)
        try:
            ready = hosts.run(spec, logs, lost)
        except (UsageError, ClusterError) as error:
            if not self._restarts or not hosts.failed_nodes:
                raise
            lost = [spec.host_entries[node] for node in hosts.failed_nodes]
            if pool.lose(lost):
                self._say_choice(str(error))
                return None, lost
            return self._end_with_too_few(str(error)), []
        run = FleetRun(self, spec, ready, logs, on_directory if self._plan is None else lambda: None)
        run.start()
        hosts.note_started(spec, run.regroup)
        result = run.finish()
        self._plan = run.plan or self._plan
        if result is not None:
            is_ended = hosts.agents.interrupt is not None or run.coordinator.begun >= self._spec.max_restarts
            if run.coordinator.losses and pool.min_hosts and not is_ended:
                self._say_too_few()
            return result, []
        run.set_logs_aside()
        self._restarts = run.coordinator.begun + 1
        lost = [spec.host_entries[node] for node in run.coordinator.losses]
        late = [spec.host_entries[node] for node in run.late_losses]
        self.say(run.end_reason)
        if late and not pool.lose(late):
            return self._end_with_too_few("; ".join(f"lost {entry.name}" for entry in late)), []
        self._say_choice(f"restart {run.coordinator.begun + 1} of {self._spec.max_restarts}")
        return None, [*lost, *late]

    def _asked(self) -> LaunchSpec:
        spec, chosen = self._spec, self.hosts.pool.chosen
        worker_num = sum(entry.slots for entry in chosen)
        return replace(
            spec,
            host_entries=chosen,
            spares=self.hosts.pool.waiting,
            worker_num=worker_num,
            tail_ranks=tuple(rank for rank in spec.tail_ranks if rank < worker_num),
            max_restarts=spec.max_restarts - self._restarts,
            first_attempt=self._restarts,
            master_addr=spec.master_addr if chosen[0] == spec.host_entries[0] else LOOPBACK,
            node_rank=chosen.index(spec.host_entries[spec.node_rank]) if spec.is_joined else spec.node_rank,
            table_hosts=spec.table_hosts if chosen == spec.host_entries else (),
        )

    def _end_with_too_few(self, why: str) -> JobResult:
        assert self._plan is not None, "there was a start before"
        self._say_too_few()
        reason = f"{self.attempts[-1]['reason']}; then {why}; fewer than {self.hosts.pool.min_hosts} hosts are left"
        failure = JobFailure(self.job_id, contract.EXIT_CLUSTER, reason, None, [], [], self.attempts)
        self.events.note("over", {"reason": reason})
        if problem := write_failure(self._plan, failure):
            self.say(problem)
        return JobResult(self._plan, failure, ())

    def _say_too_few(self) -> None:
        few = f"fewer than {self.hosts.pool.min_hosts} hosts are left (--min_hosts)"
        self.say(f"not started again: {few}{self._left_out()}")

    def _say_choice(self, what: str) -> None:
        names = ", ".join(entry.name for entry in self.hosts.pool.chosen)
        self.say(f"{what}: starting again on {names}{self._left_out()}")

    def _left_out(self) -> str:
        pool = self.hosts.pool
        failed = ", ".join(entry.name for entry in pool.left_out if not (entry in pool.gone or entry.has_come))
        gone = ", ".join(entry.name for entry in pool.left_out if entry in pool.gone)
        said = f"; left out, failed {MAX_FAILURES} times: {failed}" if failed else ""
        return said + (f"; left by a signal: {gone}" if gone else "")


def run_fleet_job(spec: LaunchSpec, start: Start, joined: JoinedHosts | None = None) -> JobResult:
    """Run a job on the hosts of `spec.host_entries` to its end. `joined`: hosts that have come by themselves; entered,
    and left, by the caller. Raises UsageError: the log directory cannot be used, or a host cannot do what is asked.
    Raises ClusterError: a host cannot be reached, or does not fit the others; nothing was started anywhere. Raises
    Interrupted: a signal came before the job began."""
    job_id = start.job_id
    if spec.server_num and not spec.server_token:
        spec = replace(spec, server_token=secrets.token_hex(32))
    with contextlib.ExitStack() as stack:
        signals = joined.signals if joined else stack.enter_context(job_signals(spec))
        stack.enter_context(JobLock(spec.log_dir, job_id)).take()
        events = EventLog(spec.log_dir / contract.EVENTS_JSONL)
        publish(spec.log_dir, job_id, (), spec.log_keep_jobs)
        stack.callback(events.close)
        faults = OwnFaults(spec.log_dir, partial(say, quiet=False), found_in=str(spec.log_dir))
        stack.enter_context(faults.named())
        stack.enter_context(faults)
        hosts: Hosts
        if joined is None:
            opener = HostOpener(spec, job_id, start.say)
            hosts = stack.enter_context(ListedHosts(spec, start, opener, signals, events))
        else:
            hosts = joined
            joined.begin(events)
        job = FleetJob(spec, start, hosts, events, faults)
        return job.run(lambda: start.on_directory(job_id, spec.log_dir))
