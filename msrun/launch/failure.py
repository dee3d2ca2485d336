"""JobFailure: why a job died, as text for people and as `failure.json` (schema in `msrun.contract`)."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from msrun import contract
from msrun.agent.supervisor import HostResult
from msrun.agent.wait_status import describe_status, exit_code_of, signal_name
from msrun.cluster.membership import Member
from msrun.errors import MsrunError, WorkerFailed
from msrun.launch.log_directory import write_private
from msrun.launch.worker_log import read_excerpt
from msrun.planning.plan import LaunchPlan


@dataclass(frozen=True)
class WorkerFailure:
    """The first worker that failed."""

    global_rank: int
    local_rank: int
    host: str
    pid: int
    exit_code: int | None
    signal: str | None
    hint: str
    run_time_s: float
    log: str
    excerpt: list[str]


@dataclass(frozen=True)
class JobFailure:
    """Why the job as a whole failed."""

    job_id: str
    exit_code: int
    reason: str
    first_failure: WorkerFailure | None
    others: list[dict[str, int | str]]

    def to_error(self) -> MsrunError:
        """Return the error that the command line reports."""
        return WorkerFailed(self.reason, self.exit_code)


def build_failure(plan: LaunchPlan, result: HostResult) -> JobFailure | None:
    """Return why the job failed, or None when it did not."""
    first = result.membership.first_failure
    if first is None and result.fault is None:
        return None
    others: list[dict[str, int | str]] = [
        {"global_rank": rank, "state": member.state.value}
        for rank, member in sorted(result.membership.members.items())
        if member is not first
    ]
    if first is None:
        fault = result.fault
        assert fault is not None
        return JobFailure(plan.job_id, fault.exit_code, str(fault), None, others)
    failure = _worker_failure(plan, first)
    reason = (
        f"rank {failure.global_rank} on {failure.host} failed first: {describe_status(first.wait_status)}"
        f"{', ' + failure.hint if failure.hint else ''}, after {failure.run_time_s:.1f} s"
    )
    return JobFailure(plan.job_id, exit_code_of(first.wait_status), reason, failure, others)


def _worker_failure(plan: LaunchPlan, member: Member) -> WorkerFailure:
    host, worker = next(
        (host, worker) for host in plan.hosts for worker in host.workers if worker.global_rank == member.global_rank
    )
    code = os.waitstatus_to_exitcode(member.wait_status)
    return WorkerFailure(
        global_rank=member.global_rank,
        local_rank=worker.local_rank,
        host=host.name,
        pid=member.pid,
        exit_code=code if code >= 0 else None,
        signal=signal_name(-code) if code < 0 else None,
        hint="if you did not kill it, likely out of memory" if code == -signal.SIGKILL else "",
        run_time_s=round(member.ended_at - member.started_at, 3),
        log=worker.log_path,
        excerpt=read_excerpt(Path(worker.log_path)),
    )


def write_failure(plan: LaunchPlan, failure: JobFailure) -> None:
    """Write `failure.json` into the log directory."""
    write_private(Path(plan.log_dir) / contract.FAILURE_JSON, json.dumps(asdict(failure), indent=2) + "\n")


def render_failure(failure: JobFailure) -> str:
    """Return the report for the console: what failed, the end of its log, what the others did."""
    worker = failure.first_failure
    if worker is None:
        return ""
    lines = [f"  log: {worker.log} (pid {worker.pid})"]
    lines += [f"  | {line}" for line in worker.excerpt] or ["  | (the log is empty)"]
    states: dict[str, list[int]] = {}
    for other in failure.others:
        states.setdefault(str(other["state"]), []).append(int(other["global_rank"]))
    for state, ranks in states.items():
        lines.append(f"  others {state}: {fold_ranks(ranks)}")
    return "\n".join(lines)


def fold_ranks(ranks: list[int]) -> str:
    """Return ranks as text with runs folded: [0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
