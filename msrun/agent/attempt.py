"""One start of the whole job: who took part, how it ended. A job without restarts has one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msrun import contract
from msrun.agent.logs.rotated_log import rename_log
from msrun.agent.processes.process_control import describe_status
from msrun.agent.processes.process_spec import FIRST_SERVER_ID, MINDSPORE_SCHEDULER_ID, SCHEDULER_ID, ProcessSpec
from msrun.cluster.failure import FailureReport
from msrun.cluster.membership import Membership
from msrun.errors import ClusterError, HangTimeout, MsrunError, OwnProcessLost, RendezvousTimeout, ServerFailed
from msrun.planning.environment import restored_environment
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.program import Program

SERVER_PROGRAM = Program("module", "msrun.runtime.server")
"""What a parameter server runs in place of the user's program."""
MINDSPORE_SCHEDULER = Program("executable", sys.executable, ("-c", "from mindspore.communication import init; init()"))
"""MindSpore's own, at which the workers of real MindSpore meet. MindSpore makes it of the user's script: in a process
with MS_ROLE=MS_SCHED `init()` serves and never returns. It needs no more than that call (tried with 2.10), so nothing
of the user's runs in it."""


@dataclass
class Attempt:
    """One start of the job on this host. Owned by the agent's event loop."""

    number: int  # 0 for the first start
    membership: Membership
    fault: MsrunError | None = None  # why msrun itself ended the attempt; None when the workers ended it
    doing: Mapping[int, str] = field(default_factory=dict)
    """What each running worker was doing when the attempt failed, as far as it is known."""
    left: frozenset[int] = frozenset()
    """Ranks that ran still when the first one failed, but had left the world: the end of their program, as a rule."""
    lagging: tuple[int, ...] = ()  # ranks that the others waited for when msrun ended a hanging attempt
    are_workers_asked_for: bool = False  # each of them may have started
    begins_idle: bool = False
    """It has failed elsewhere while this host prepares, which goes on, and starts no worker of it."""
    has_reported: bool = False  # the coordinator knows how it has failed here
    has_ended: bool = False  # the coordinator knows that nothing runs here any more
    peak_bytes: dict[int, float] = field(default_factory=dict)  # peak resident memory per ended worker

    @property
    def has_failed(self) -> bool:
        """Whether a worker failed or msrun had to end the attempt."""
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
        """Return how the attempt ended, in one line."""
        if self.fault is not None:
            return str(self.fault)
        first = self.membership.first_failure
        if first is None:
            return "all workers ended with exit code 0"
        return f"rank {first.global_rank} failed first: {describe_status(first.wait_status)}"


@dataclass(frozen=True)
class HostResult:
    """What happened on one host."""

    attempts: tuple[Attempt, ...]  # every start of the job, in order; the last one decides
    survivors: tuple[int, ...]  # processes that could not be ended (uninterruptible sleep)
    report: FailureReport | None = None
    """How the job failed, as the coordinator has it; None when it did not fail, or nobody could say."""

    @property
    def last(self) -> Attempt:
        """The attempt that the job ended with."""
        return self.attempts[-1]


def scheduler_log(plan: LaunchPlan) -> str:
    """Return the path of the scheduler's log."""
    return f"{plan.log_dir}/{contract.SCHEDULER_LOG}"


def scheduler_spec(plan: LaunchPlan) -> ProcessSpec:
    """Return the scheduler as a process to start."""
    return ProcessSpec(SCHEDULER_ID, scheduler_log(plan), cpus=plan.hosts[0].scheduler_cpus)


def error_file(plan: LaunchPlan, global_rank: int, attempt: int) -> str:
    """Return the path of the file in which a worker may leave its exception."""
    return f"{plan.run_dir}/error_{global_rank}_{attempt}.json"


def worker_specs(
    plan: LaunchPlan, host: HostPlan, caller: Mapping[str, str], *, attempt: int, use_exec: bool
) -> list[ProcessSpec]:
    """Return the workers of a host, and the servers that are started anew with them, as processes to start."""
    env = {**restored_environment(caller), contract.TORCHELASTIC_RESTART_COUNT: str(host.first_attempt + attempt)}
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


def late_start(plan: LaunchPlan, host: HostPlan, missing: list[int], log: str) -> RendezvousTimeout:
    """Return who was not started in time; `log`: where more is said."""
    return RendezvousTimeout(
        f"--cluster_time_out {plan.cluster_time_out_s}: {len(missing)} of {len(host.workers)} workers were not started "
        f"in time on {host.name} (ranks {', '.join(map(str, missing))}); {log}"
    )


def keep_logs(logs: Iterable[str], attempt: int) -> None:
    """Move the logs of an attempt that is over out of the way: `worker_3.log` to `worker_3.attempt_0.log`. Raises
    ClusterError: one cannot be moved."""
    for log in logs:
        path = Path(log)
        kept = path.with_name(contract.attempt_log_name(path.name, attempt))
        try:
            rename_log(log, str(kept))
        except OSError as error:
            raise ClusterError(f"cannot move a log to {kept} ({error.strerror})") from None
