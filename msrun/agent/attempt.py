"""One start of the whole job: what takes part beside the workers, and how it ended. A job without restarts has one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field
from pathlib import Path

from msrun import contract
from msrun.agent.evidence import explain_limit
from msrun.agent.own_file import read_end
from msrun.agent.processes.process_control import describe_status, exit_code_of, is_stopped, kill_descendants
from msrun.agent.processes.server_handle import (
    FIRST_SERVER_ID,
    MINDSPORE_SCHEDULER_ID,
    SCHEDULER_ID,
    ProcessSpec,
    server_index,
)
from msrun.cluster.failure import FailureReport
from msrun.cluster.membership import Membership
from msrun.errors import ClusterError, HangTimeout, MsrunError, OwnProcessLost, RendezvousTimeout, ServerFailed
from msrun.planning.environment import restored_environment
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.program import Program
from msrun.planning.record import Record

SERVER_PROGRAM = Program("module", "msrun.server")  # what a parameter server runs in place of the user's program
MINDSPORE_SCHEDULER = Program("executable", sys.executable, ("-c", "from mindspore.communication import init; init()"))
"""MindSpore's own, at which the workers of real MindSpore meet. MindSpore makes it of the user's script: in a process
with MS_ROLE=MS_SCHED `init()` serves and never returns. It needs no more than that call (tried with 2.10), so nothing
of the user's runs in it."""


class Attempt(Record, frozen=False):
    """One start of the job on this host. Owned by the agent's event loop."""

    number: int  # 0 for the first start of the job, whatever hosts it was on
    membership: Membership
    fault: MsrunError | None = None  # why msrun itself ended the attempt; None when the workers ended it
    doing: Mapping[int, str] = field(default_factory=dict)
    """What each running worker was doing when the attempt failed, as far as it is known."""
    left: frozenset[int] = frozenset()  # ranks that ran still when the first one failed, but had left the world
    lagging: tuple[int, ...] = ()  # ranks that the others waited for when msrun ended a hanging attempt
    are_workers_asked_for: bool = False  # each of them may have started
    begins_idle: bool = False  # it failed elsewhere while this host prepares, and starts no worker here
    has_reported: bool = False  # the coordinator knows how it has failed here
    has_ended: bool = False  # the coordinator knows that nothing runs here any more
    peak_bytes: dict[int, float] = field(default_factory=dict)  # peak resident memory per ended worker

    @property
    def has_failed(self) -> bool:
        return self.fault is not None or self.membership.first_failure is not None

    @property
    def is_bearable(self) -> bool:
        """Whether the way in which the attempt has failed leaves room for another."""
        return self.fault is None or isinstance(
            self.fault, HangTimeout | RendezvousTimeout | OwnProcessLost | ServerFailed
        )

    @property
    def guilty(self) -> tuple[int, ...]:
        """The rank that failed first here, or those that the others waited for."""
        first = self.membership.first_failure if self.fault is None else None
        return (first.global_rank,) if first is not None else self.lagging

    def end_reason(self) -> str:
        if self.fault is not None:
            return str(self.fault)
        first = self.membership.first_failure
        if first is None:
            return "all workers ended with exit code 0"
        return f"rank {first.global_rank} failed first: {describe_status(first.wait_status)}"


class HostResult(Record):
    """What happened on one host."""

    attempts: tuple[Attempt, ...]  # every start of the job, in order; the last one decides
    survivors: tuple[int, ...]  # processes that could not be ended (uninterruptible sleep)
    report: FailureReport | None = None  # how the job failed, as the coordinator has it; None: it did not

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]


def scheduler_log(plan: LaunchPlan) -> str:
    return f"{plan.log_dir}/{contract.SCHEDULER_LOG}"


def scheduler_spec(plan: LaunchPlan) -> ProcessSpec:
    return ProcessSpec(SCHEDULER_ID, scheduler_log(plan), cpus=plan.hosts[0].scheduler_cpus)


def error_file(plan: LaunchPlan, global_rank: int, attempt: int) -> str:
    """Return the path of the file in which a worker may leave its exception."""
    return f"{plan.run_dir}/error_{global_rank}_{attempt}.json"


def worker_specs(
    plan: LaunchPlan, host: HostPlan, caller: Mapping[str, str], *, attempt: int, use_exec: bool
) -> list[ProcessSpec]:
    """Return the workers of a host, and the servers that are started anew with them, as processes to start."""
    env = {**restored_environment(caller), contract.TORCHELASTIC_RESTART_COUNT: str(attempt)}
    servers = [
        ProcessSpec(FIRST_SERVER_ID - server.index, server.log_path, SERVER_PROGRAM, use_exec, {**env, **server.env})
        for server in host.servers
    ]
    if host.mindspore_scheduler:
        given = {**env, **host.mindspore_scheduler}
        servers.append(
            ProcessSpec(MINDSPORE_SCHEDULER_ID, scheduler_log(plan), MINDSPORE_SCHEDULER, use_exec=True, env=given)
        )
    workers = [
        ProcessSpec(
            worker.global_rank,
            worker.log_path,
            host.program.of_worker(worker.global_rank, worker.local_rank, host.node_rank),
            use_exec,
            {**env, **worker.env, contract.TORCHELASTIC_ERROR_FILE: error_file(plan, worker.global_rank, attempt)},
            worker.cpus,
            worker.memory_nodes,
            error_log_path=worker.error_log_path,
        )
        for worker in host.workers
    ]
    return [*servers, *workers]


def keep_logs(logs: Iterable[str], attempt: int) -> None:
    """Rename the logs of an attempt that is over, `worker_3.log` to `worker_3.attempt_0.log` (ClusterError)."""
    for log in logs:
        kept = contract.attempt_log_name(log, attempt)
        try:
            with contextlib.suppress(FileNotFoundError):  # there is none
                Path(log).rename(kept)
        except OSError as error:
            raise ClusterError(f"cannot move a log to {kept} ({error.strerror})") from None


LAST_WORDS_BYTES = 2048
_OWN_NAMES = {SCHEDULER_ID: "scheduler", MINDSPORE_SCHEDULER_ID: "mindspore_scheduler"}


class OwnProcesses:
    """Which processes of msrun run beside the workers; an attempt cannot go on without them."""

    def __init__(self, plan: LaunchPlan, home: str) -> None:
        """`home`: the folder where the user finds `scheduler.log`; empty where it goes with the job."""
        self._plan = plan
        self._home = home
        self._pids: dict[int, int] = {}
        self._stopped_since: dict[int, float] = {}

    @property
    def scheduler_runs(self) -> bool:
        return SCHEDULER_ID in self._pids

    def forget(self) -> None:
        """All of them are gone; others will be started in their place."""
        self._pids.clear()

    def started(self, process_id: int, pid: int, tell: Callable[..., None]) -> None:
        index = server_index(process_id)
        if index is not None:
            tell("server", index=index, pid=pid)
        else:
            self._pids[process_id] = pid
            tell(_OWN_NAMES[process_id], pid=pid)

    def exited(self, process_id: int, wait_status: int, *, do_workers_run: bool, has_begun: bool) -> MsrunError | None:
        """Record an end and return why the attempt cannot go on; None when no worker needs it any more. `has_begun`: a
        rank has joined the world or reported progress. Before that, what ends by itself, such as for want of a package
        or of memory, would end again."""
        self._pids.pop(process_id, None)
        how = describe_status(wait_status)
        index = server_index(process_id)
        if index is not None:
            name = f"{contract.server_name(index)}.log"
            where = "" if self._plan.fleet else f" on {self._plan.hosts[0].where}"  # of several, the report names it
            log = f"{self._home}/{name}" if self._home else name
            what = f"server {index}{where} failed first: {how}; its log: {log}"
            return ServerFailed(what, exit_code_of(wait_status)) if do_workers_run else None
        kind, limit = self._judge(wait_status, has_begun=has_begun)
        if process_id == MINDSPORE_SCHEDULER_ID:  # it ends with 0 when all workers have said that they leave
            what = f"MindSpore's scheduler ended ({how}); {self.describe_log()}"
            return kind(what) if wait_status and do_workers_run else None
        return kind(f"the scheduler ended ({how}{', ' if limit else ''}{limit}); {self.describe_log()}")

    def server_ended(self, wait_status: int | None, *, has_begun: bool) -> ClusterError:
        """Return why the attempt cannot go on without its fork server; `wait_status` None: it is not known."""
        kind, limit = self._judge(wait_status, has_begun=has_begun)
        why = f" ({limit})" if limit else ""
        return kind(f"the fork server ended unexpectedly{why}; every worker was stopped with it")

    def _judge(self, wait_status: int | None, *, has_begun: bool) -> tuple[type[ClusterError], str]:
        """Return what the end of one is for the job, and the limit that has made it."""
        if wait_status is None:
            return OwnProcessLost, ""
        limit = explain_limit(wait_status, scheduler_log(self._plan))
        is_final = not has_begun and (bool(limit) or not os.WIFSIGNALED(wait_status))
        return ClusterError if is_final else OwnProcessLost, limit

    def look_for_stopped(self, server_pid: int, now: float, limit_s: float) -> OwnProcessLost | None:
        """Return which of them has been stopped by a signal for too long; None when none has, as far as was looked."""
        names = {pid: f"the {_OWN_NAMES[process_id].replace('_', ' ')}" for process_id, pid in self._pids.items()}
        stopped = {pid: name for pid, name in {server_pid: "the fork server", **names}.items() if is_stopped(pid)}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_since.items():
            if now - since >= limit_s:
                how_long = f"has been stopped by a signal for {now - since:.0f} s"
                return OwnProcessLost(f"{stopped[pid]} (pid {pid}) {how_long}")
        return None

    def describe_log(self) -> str:
        """Return where the user finds `scheduler.log`, or its last line where it will be gone when he looks."""
        if not Path(self._plan.log_dir).is_dir():
            return f"the log directory {self._plan.log_dir} was removed: leave it there while the job runs"
        if self._home:
            return f"its log: {self._home}/{contract.SCHEDULER_LOG}"
        lines = read_end(scheduler_log(self._plan), LAST_WORDS_BYTES).split(b"\n")
        last = next((line for line in reversed(lines) if line.strip()), b"").decode("utf-8", "backslashreplace")
        return f"its last words: {last.strip()}" if last else "it said nothing"

    def end_orphans(self, strangers: Collection[int], limit_s: float) -> list[int]:
        """End what is left of a job whose fork server is gone, the scheduler last; returns what survived."""
        kill_descendants(limit_s, [*strangers, self._pids.get(SCHEDULER_ID, 0)])
        return kill_descendants(limit_s, strangers)
