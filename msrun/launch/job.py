"""Run one job on this host from plan to result. Everything that the job opens or creates is closed here."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.attempt import HostResult
from msrun.agent.host.host_facts import read_host_facts
from msrun.agent.observer import Observer
from msrun.agent.processes.process_control import adopt_orphans, descendants
from msrun.agent.processes.server_handle import start_fork_server
from msrun.agent.signals import SignalPipe
from msrun.agent.supervisor import Supervisor
from msrun.agent.watch.progress_board import ProgressBoard
from msrun.cluster.membership import Membership
from msrun.cluster.messages import Channel
from msrun.cluster.rendezvous import listen
from msrun.launch.console import Console
from msrun.launch.directory.lock import JobLock
from msrun.launch.directory.log_directory import EventLog, prepare_log_directory
from msrun.launch.failure import JobFailure, build_failure, write_failure
from msrun.launch.rank_table_file import check_rank_table, write_rank_table
from msrun.planning.build import build_plan
from msrun.planning.environment import server_environment
from msrun.planning.plan import LaunchPlan
from msrun.planning.spec import LaunchSpec


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    plan: LaunchPlan
    failure: JobFailure | None
    survivors: tuple[int, ...]
    """Processes that could not be ended; empty but for hardware faults."""

    @property
    def exit_code(self) -> int:
        """What `msrun` exits with."""
        return self.failure.exit_code if self.failure else contract.EXIT_OK


def plan_dry_run(spec: LaunchSpec, caller: Mapping[str, str]) -> LaunchPlan:
    """Return the plan of a job without starting, opening or creating anything. Job id and port are chosen at start."""
    facts = read_host_facts({**caller, **dict(spec.env)})
    run_dir = str(Path(tempfile.gettempdir(), "msrun-JOB"))
    plan = build_plan(spec, facts, caller=caller, job_id="JOB", run_dir=run_dir, master_port=spec.master_port)
    _check_given_table(spec, plan)
    return plan


def new_job_id() -> str:
    """Return an id that no other job has."""
    return secrets.token_hex(8)


def run_job(
    spec: LaunchSpec,
    caller: Mapping[str, str],
    *,
    quiet: bool = False,
    is_last: bool = False,
    job_id: str = "",
    on_directory: Callable[[], None] = lambda: None,
) -> JobResult:
    """Run a one-host job to its end.

    Args:
        caller: the environment that workers inherit, usually the launcher's own.
        is_last: this process does nothing else afterwards: a signal that comes when the job is over is ignored, so that
            it cannot take the place of the job's own exit status.
        job_id: from `new_job_id`; empty = a new one.
        on_directory: called when the log directory is this job's: locked, and holding its plan and empty logs.

    Raises:
        UsageError: something is wrong that was seen before any process started.
    """
    facts = read_host_facts({**caller, **dict(spec.env)})
    job_id = job_id or new_job_id()
    strangers = frozenset(descendants(os.getpid()))  # `monitor & exec msrun` makes the monitor a child of msrun
    with contextlib.ExitStack() as stack:
        # From here on a signal never ends msrun without cleaning up.
        signals = stack.enter_context(SignalPipe(spec.forward_signals, ignore_afterwards=is_last))
        lock = stack.enter_context(JobLock(spec.log_dir, job_id))  # entered early, so that it is given up last
        listener = stack.enter_context(listen(facts.address, spec.master_port))
        run_dir = str(Path(tempfile.gettempdir(), f"msrun-{job_id}"))  # made when the fork server is ready
        stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        port = listener.getsockname()[1]
        plan = build_plan(spec, facts, caller=caller, job_id=job_id, run_dir=run_dir, master_port=port)
        _check_given_table(spec, plan)
        lock.take()
        prepare_log_directory(plan)
        write_rank_table(plan)
        on_directory()
        console = Console(plan, quiet=quiet)
        result = _run(plan, caller, signals, listener, console, strangers, stack)
        failure = build_failure(plan, result)
        if failure:
            with contextlib.suppress(OSError):  # disk full: what is printed has to do
                write_failure(plan, failure)
        restarts = len(result.attempts) - 1
        summary = f"all {plan.world_size} workers ended well{f' after restart {restarts}' if restarts else ''}"
        console.finish("" if failure else summary)
        return JobResult(plan, failure, result.survivors)


def _check_given_table(spec: LaunchSpec, plan: LaunchPlan) -> None:
    if spec.rank_table_file:
        check_rank_table(spec.rank_table_file, plan.world_size, plan.device_target)


def _run(
    plan: LaunchPlan,
    caller: Mapping[str, str],
    signals: SignalPipe,
    listener: socket.socket,
    console: Console,
    strangers: frozenset[int],
    stack: contextlib.ExitStack,
) -> HostResult:
    host = plan.hosts[0]
    events = EventLog(Path(plan.log_dir) / contract.EVENTS_JSONL)
    stack.callback(events.close)
    ours, theirs = socket.socketpair()
    scheduler = Channel(ours)
    stack.callback(scheduler.close)
    with open_scheduler_log(plan) as log, theirs:
        server = start_fork_server(
            env=server_environment(caller, host.common_env),
            working_directory=host.working_directory,
            log_fd=log.fileno(),
            scheduler_fd=theirs.fileno(),
            listener_fd=listener.fileno(),
        )
    listener.close()
    adopt_orphans()
    board = ProgressBoard(Path(plan.run_dir, "progress"), plan.world_size)
    stack.callback(board.close)
    observers: list[Observer] = [events, SchedulerRecord(scheduler, plan), console]
    return Supervisor(plan, host, server, board, observers, caller=caller, strangers=strangers).run(signals, scheduler)


def open_scheduler_log(plan: LaunchPlan) -> Any:
    """Open `scheduler.log` for the scheduler and for what imports print in the fork server."""
    return os.fdopen(
        os.open(Path(plan.log_dir) / contract.SCHEDULER_LOG, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "ab"
    )


class SchedulerRecord:
    """Forwards the moments of the job to the scheduler, which writes them down. An Observer."""

    tick_s: float | None = None

    def __init__(self, channel: Channel, plan: LaunchPlan) -> None:
        self._channel = channel
        self._plan = plan

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Pass one moment on."""
        if kind == "preparing":
            host = self._plan.hosts[0].name
            fields = {"job_id": self._plan.job_id, "world_size": self._plan.world_size, "host": host}
            kind = "job"
        if not self._channel.is_closed:
            self._channel.send({"type": kind, **fields})

    def tick(self, membership: Membership) -> None:
        """Nothing regular to pass on."""
