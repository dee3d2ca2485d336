"""One start of the whole job: who took part, how it ended. A job without restarts has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msrun import contract
from msrun.agent.logs.rotated_log import rename_log
from msrun.agent.processes.child import SCHEDULER_ID, ProcessSpec
from msrun.agent.processes.wait_status import describe_status
from msrun.cluster.membership import Membership
from msrun.errors import MsrunError
from msrun.planning.environment import restored_environment
from msrun.planning.plan import HostPlan, LaunchPlan


@dataclass
class Attempt:
    """One start of the job on this host. Owned by the agent's event loop."""

    number: int
    """0 for the first start."""
    membership: Membership
    fault: MsrunError | None = None
    """Why msrun itself ended the attempt; None when the workers ended it."""
    doing: Mapping[int, str] = field(default_factory=dict)
    """What each running worker was doing when the attempt failed, as far as it is known."""
    lagging: tuple[int, ...] = ()
    """Ranks that the others waited for when msrun ended a hanging attempt."""
    peak_bytes: dict[int, float] = field(default_factory=dict)
    """Peak resident memory per ended worker."""

    @property
    def has_failed(self) -> bool:
        """Whether a worker failed or msrun had to end the attempt."""
        return self.fault is not None or self.membership.first_failure is not None

    def end_reason(self) -> str:
        """Return how the attempt ended, in one line."""
        if self.fault is not None:
            return str(self.fault)
        first = self.membership.first_failure
        if first is None:
            return "all workers ended with exit code 0"
        return f"rank {first.global_rank} failed first: {describe_status(first.wait_status)}"


def scheduler_log(plan: LaunchPlan) -> str:
    """Return the path of the scheduler's log."""
    return f"{plan.log_dir}/{contract.SCHEDULER_LOG}"


def scheduler_spec(plan: LaunchPlan) -> ProcessSpec:
    """Return the scheduler as a process to start."""
    return ProcessSpec(SCHEDULER_ID, scheduler_log(plan), cpus=plan.hosts[0].scheduler_cpus)


def worker_specs(host: HostPlan, caller: Mapping[str, str], *, attempt: int, use_exec: bool) -> list[ProcessSpec]:
    """Return the workers of a host as processes to start."""
    restored = restored_environment(caller)
    count = {contract.TORCHELASTIC_RESTART_COUNT: str(attempt)}
    return [
        ProcessSpec(
            worker.global_rank,
            worker.log_path,
            host.program,
            use_exec,
            {**restored, **worker.env, **count},
            worker.cpus,
            worker.memory_nodes,
        )
        for worker in host.workers
    ]


def keep_logs(host: HostPlan, attempt: int) -> None:
    """Move the logs of an attempt that is over out of the way: `worker_3.log` to `worker_3.attempt_0.log`."""
    for worker in host.workers:
        path = Path(worker.log_path)
        rename_log(worker.log_path, str(path.with_name(contract.attempt_log_name(path.name, attempt))))
