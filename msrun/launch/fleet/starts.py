"""A job over many hosts from here: its start, and those that follow on other hosts when some are lost."""

from __future__ import annotations

import contextlib
import secrets
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from msrun import contract
from msrun.agent.logs.rotated_log import LogRotation
from msrun.agent.observer import OwnFaults
from msrun.agent.signals import SignalPipe
from msrun.cluster.failure import JobFailure
from msrun.errors import ClusterError, UsageError
from msrun.launch.console import say
from msrun.launch.directory.jobs import new_job_id, publish
from msrun.launch.directory.lock import JobLock
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.failure import write_failure
from msrun.launch.fleet.agents import Agents
from msrun.launch.fleet.fleet_job import FleetRun
from msrun.launch.fleet.fleet_plan import ranks_of_hosts
from msrun.launch.fleet.joined_hosts import JoinedHosts
from msrun.launch.fleet.log_collector import LogCollector, own_logs
from msrun.launch.fleet.opener import HostOpener
from msrun.launch.fleet.preparation import Preparation, ReadyHosts
from msrun.launch.job import JobResult
from msrun.launch.terminal import UserTerminal
from msrun.planning.hosts.assignment import MAX_FAILURES, HostPool
from msrun.planning.hosts.forwarded import forwarded_environment
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.plan import LaunchPlan
from msrun.planning.spec import LaunchSpec

NO_ADDRESS = "127.0.0.1"
"""What --master_addr says when it was not given."""


def run_fleet_job(
    spec: LaunchSpec,
    caller: Mapping[str, str],
    *,
    quiet: bool = False,
    is_last: bool = False,
    job_id: str = "",
    on_directory: Callable[[str, Path], None] = lambda _id, _folder: None,
    joined: JoinedHosts | None = None,
) -> JobResult:
    """Run a job on the hosts of `spec.host_entries` to its end. Other arguments as `launch.job.run_job`.

    Args:
        joined: hosts that have come by themselves; entered, and left, by the caller.

    Raises:
        UsageError: the log directory cannot be used, or a host cannot do what is asked.
        ClusterError: a host cannot be reached, or does not fit the others; nothing was started anywhere.
        Interrupted: a signal came before the job began.
    """
    job_id = job_id or new_job_id()
    if spec.server_num and not spec.server_token:
        spec = replace(spec, server_token=secrets.token_hex(32))
    with contextlib.ExitStack() as stack:
        forward, limit_s = (*spec.forward_signals, signal.SIGTSTP), spec.time_limit_s
        own_signals = SignalPipe(forward, ignore_afterwards=is_last, time_limit_s=limit_s)
        signals = joined.signals if joined else stack.enter_context(own_signals)
        stack.enter_context(JobLock(spec.log_dir, job_id)).take()
        events = EventLog(spec.log_dir / contract.EVENTS_JSONL)
        publish(spec.log_dir, job_id, (), spec.log_keep_jobs)
        stack.callback(events.close)
        faults = OwnFaults(spec.log_dir, partial(say, quiet=False), found_in=str(spec.log_dir))
        stack.enter_context(faults.named())
        stack.enter_context(faults)
        starts = JobStarts(spec, caller, job_id, signals, events, faults, quiet=quiet, joined=joined)
        return starts.run(lambda: on_directory(job_id, spec.log_dir))


class Hosts(Protocol):
    """The way to the hosts of a job, for all of its starts."""

    @property
    def failed_nodes(self) -> set[int]:
        """The hosts because of which the last `run` has raised; empty when it is none of them."""

    def run(self, spec: LaunchSpec, logs: LogCollector, lost: Collection[HostEntry] = ()) -> ReadyHosts:
        """Return hosts that are ready for a start; as `Preparation.run`."""


class JobStarts:
    """The starts of one job, each on hosts that the pool has chosen. `run` once."""

    def __init__(
        self,
        spec: LaunchSpec,
        caller: Mapping[str, str],
        job_id: str,
        signals: SignalPipe,
        events: EventLog,
        faults: OwnFaults,
        *,
        quiet: bool,
        joined: JoinedHosts | None = None,
    ) -> None:
        self._joined = joined
        self._faults = faults
        self._spec = spec
        self._caller = caller
        self._job_id = job_id
        self._signals = signals
        self._events = events
        self._quiet = quiet
        self._pool = joined.pool if joined else HostPool(spec.host_entries, spec.spares, spec.min_hosts)
        self._restarts = 0
        self._earlier: list[dict[str, int | float | str]] = []
        """Attempts on other hosts."""
        self._plan: LaunchPlan | None = None
        """Of the last start that got as far."""

    def run(self, on_directory: Callable[[], None]) -> JobResult:
        """Run the job to its end.

        Args:
            on_directory: called when the log directory holds the plan.

        Raises:
            As `run_fleet_job`.
        """
        with contextlib.ExitStack() as stack:
            hosts: Hosts
            if self._joined is not None:
                hosts, agents = self._joined, self._joined.agents
                self._joined.begin(self._caller, self._events)
            else:
                opener = HostOpener(self._spec, self._job_id, self._say)
                made = (self._spec, self._caller, self._job_id, opener, self._signals, self._events, self._say)
                hosts = preparation = Preparation(*made)
                agents = stack.enter_context(preparation)
            lost: list[HostEntry] = []
            while True:
                with contextlib.ExitStack() as of_start:
                    spec = self._asked()
                    result, lost = self._start(spec, hosts, agents, lost, on_directory, of_start)
                if result is not None:
                    return result

    def _start(
        self,
        spec: LaunchSpec,
        hosts: Hosts,
        agents: Agents,
        lost: list[HostEntry],
        on_directory: Callable[[], None],
        stack: contextlib.ExitStack,
    ) -> tuple[JobResult | None, list[HostEntry]]:
        """Return how the job ended, or None and the hosts that were lost when it is to start again, on other hosts."""
        rotation = LogRotation(spec.log_max_bytes, spec.log_keep) if spec.log_max_bytes else None
        own = own_logs(spec.worker_log_name, ranks_of_hosts(spec), spec.server_num, home=max(spec.node_rank, 0))
        logs = LogCollector(spec.log_dir, rotation, own, spec.max_restarts, spec.first_attempt)
        stack.callback(logs.close)
        try:
            ready = hosts.run(spec, logs, lost)
        except (UsageError, ClusterError) as error:
            if not self._restarts or not hosts.failed_nodes:
                raise
            lost = [spec.host_entries[node] for node in hosts.failed_nodes]
            if self._pool.lose(lost):
                self._say_choice(str(error))
                return None, lost
            return self._end_with_too_few(str(error)), []
        run = FleetRun(
            spec,
            self._job_id,
            agents,
            ready,
            logs,
            self._events,
            forwarded_environment(self._caller, spec.forward_env),
            self._faults,
            quiet=self._quiet,
            earlier=self._earlier,
            pool=self._pool,
            terminal=self._user_terminal(spec, agents, stack),
        )
        if self._joined is not None:
            self._joined.run_of_job = run
        run.start(on_directory if self._plan is None else lambda: None)
        result = run.finish()
        self._plan = run.plan or self._plan
        if result is not None:
            is_ended = agents.interrupt is not None or run.restarts >= self._spec.max_restarts
            if run.coordinator.losses and self._pool.min_hosts and not is_ended:
                self._say(f"not started again: {self._too_few()}{self._left_out()}")
            return result, []
        run.set_logs_aside()
        self._earlier, self._restarts = run.attempts, run.restarts + 1
        lost = [spec.host_entries[node] for node in run.coordinator.losses]
        late = [spec.host_entries[node] for node in run.late_losses]
        self._say(run.end_reason)
        if late and not self._pool.lose(late):
            return self._end_with_too_few("; ".join(f"lost {entry.name}" for entry in late)), []
        self._say_choice(f"restart {run.restarts + 1} of {self._spec.max_restarts}")
        return None, [*lost, *late]

    def _asked(self) -> LaunchSpec:
        """Return what is asked of the hosts of this start."""
        spec, chosen, rank = self._spec, self._pool.chosen, self._spec.interactive_rank
        worker_num = sum(entry.slots for entry in chosen)
        return replace(
            spec,
            host_entries=chosen,
            spares=self._pool.waiting,
            worker_num=worker_num,
            tail_ranks=tuple(rank for rank in spec.tail_ranks if rank < worker_num),
            interactive_rank=rank if rank is not None and rank < worker_num else None,
            max_restarts=spec.max_restarts - self._restarts,
            first_attempt=self._restarts,
            master_addr=spec.master_addr if chosen[0] == spec.host_entries[0] else NO_ADDRESS,
            node_rank=chosen.index(spec.host_entries[spec.node_rank]) if spec.is_joined else spec.node_rank,
            table_hosts=spec.table_hosts if chosen == spec.host_entries else (),
        )

    def _user_terminal(self, spec: LaunchSpec, agents: Agents, stack: contextlib.ExitStack) -> UserTerminal | None:
        rank = spec.interactive_rank
        if rank is None:
            return None
        node = next(node for node, ranks in ranks_of_hosts(spec).items() if rank in ranks)

        def send(kind: str, **fields: object) -> None:  # by the terminal's own thread
            agents.loop.call(partial(agents.links[node].send, kind, **fields))

        terminal = UserTerminal(rank, self._say, send, has_terminal=spec.has_terminal)
        return stack.enter_context(terminal)

    def _end_with_too_few(self, why: str) -> JobResult:
        """Return the result of a job that cannot start again."""
        assert self._plan is not None, "there was a start before"
        self._say(f"not started again: {self._too_few()}{self._left_out()}")
        reason = f"{self._earlier[-1]['reason']}; then {why}; fewer than {self._pool.min_hosts} hosts are left"
        failure = JobFailure(self._job_id, contract.EXIT_CLUSTER, reason, None, [], [], self._earlier)
        self._events.note("over", {"reason": reason})
        if problem := write_failure(self._plan, failure):
            self._say(problem)
        return JobResult(self._plan, failure, ())

    def _too_few(self) -> str:
        return f"fewer than {self._pool.min_hosts} hosts are left (--min_hosts)"

    def _say_choice(self, what: str) -> None:
        names = ", ".join(entry.name for entry in self._pool.chosen)
        self._say(f"{what}: starting again on {names}{self._left_out()}")

    def _left_out(self) -> str:
        failed = ", ".join(
            entry.name for entry in self._pool.left_out if not (entry in self._pool.gone or entry.has_come)
        )
        gone = ", ".join(entry.name for entry in self._pool.left_out if entry in self._pool.gone)
        said = f"; left out, failed {MAX_FAILURES} times: {failed}" if failed else ""
        return said + (f"; left by a signal: {gone}" if gone else "")

    def _say(self, text: str) -> None:
        say(text, quiet=self._quiet)
