"""Why a job died, from what its agent has seen: for the coordinator, for people, and as `failure.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from msrun import contract
from msrun.agent.attempt import Attempt, HostResult
from msrun.agent.processes.process_control import describe_status, exit_code_of, signal_name
from msrun.cluster.failure import FailureReport, JobFailure, WorkerFailure, merge_failures
from msrun.cluster.membership import Member, WorkerState
from msrun.errors import HangTimeout
from msrun.launch.directory.log_directory import publish_file, write_private
from msrun.launch.directory.worker_log import read_excerpt
from msrun.planning.hosts import name_ranks
from msrun.planning.masking import hide_values
from msrun.planning.plan import LaunchPlan

LOST_PEER = (  # what torch's backends say, in small letters, when another rank has gone
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "peer closed the connection",
    "socket closed",
    "socket unexpectedly closed",
    "remote worker crashing",
    "broken pipe",
    "socket timeout",
    " has ended while rank ",
    " has left the group while rank ",
)
LATE_S = 0.5  # how long after a failure a rank's good end may be reported and have come before it all the same
SHOWN_LAGGING = 3


def build_failure(plan: LaunchPlan, result: HostResult) -> JobFailure | None:
    """Return why the job failed, or None when it did not."""
    attempt = result.last
    if not attempt.has_failed:
        return None
    members = attempt.membership.members
    first = attempt.membership.first_failure if attempt.fault is None else None
    told_of = {first.global_rank} if first else set(attempt.lagging)
    others = [_other(attempt, member, first) for rank, member in sorted(members.items()) if rank not in told_of]
    earlier = [_summary(past) for past in result.attempts[:-1]]
    if first is None:
        assert attempt.fault is not None
        lagging = [_report(plan, members[rank], "") for rank in attempt.lagging]
        return JobFailure(plan.job_id, attempt.fault.exit_code, str(attempt.fault), None, lagging, others, earlier)
    failure = _report(plan, first, first.hint)
    early = _ended_early(attempt, first, failure.excerpt)
    reason = (
        f"{early}{'; ' if early else ''}rank {failure.global_rank} on {failure.host} "
        f"{'then failed' if early else 'failed first'}: {describe_status(first.wait_status)}"
        f"{f', {failure.hint}' if failure.hint else ''}, after {failure.run_time_s:.1f} s"
    )
    return JobFailure(plan.job_id, exit_code_of(first.wait_status), reason, failure, [], others, earlier)


def failure_of_job(plan: LaunchPlan, result: HostResult) -> JobFailure | None:
    """Return why the job failed: for the reason that the coordinator told all hosts, if it did."""
    failure = build_failure(plan, result)
    return merge_failures(result.report.failure, [failure]) if failure and result.report else failure


def report_failure(plan: LaunchPlan, attempt: Attempt) -> FailureReport:
    """Return how an attempt failed on this host, for the coordinator."""
    failure = build_failure(plan, HostResult((attempt,), ()))
    assert failure is not None, "an attempt that has not failed"
    host, first = plan.hosts[0], attempt.membership.first_failure
    failure = replace(failure, others=[])  # how they end is not known yet
    if failure.first_failure is None:
        if plan.fleet:
            failure = replace(failure, reason=f"{host.where}: {failure.reason}")
        return FailureReport(failure, host.node_rank, is_hang=isinstance(attempt.fault, HangTimeout))
    assert first is not None, "a failed worker that is none"
    excerpt = failure.first_failure.excerpt
    lost_peer = _has_lost_peer(excerpt) and not _ended_early(attempt, first, excerpt)
    return FailureReport(failure, host.node_rank, lost_peer=lost_peer)


def _report(plan: LaunchPlan, member: Member, hint: str) -> WorkerFailure:
    host, worker = next((h, w) for h in plan.hosts for w in h.workers if w.global_rank == member.global_rank)
    has_ended = member.state not in (WorkerState.PLANNED, WorkerState.RUNNING)
    code = os.waitstatus_to_exitcode(member.wait_status) if has_ended else None
    return WorkerFailure(
        global_rank=member.global_rank,
        local_rank=worker.local_rank,
        host=host.where,
        pid=member.pid,
        exit_code=code if code is not None and code >= 0 else None,
        signal=signal_name(-code) if code is not None and code < 0 else None,
        hint=hint,
        run_time_s=round(member.ended_at - member.started_at, 3) if has_ended else 0.0,
        log=worker.last_words_path,
        excerpt=[hide_values(line, plan.secrets) for line in read_excerpt(Path(worker.last_words_path))],
    )


def _other(attempt: Attempt, member: Member, first: Member | None) -> dict[str, int | str]:
    state = "not started" if member.state is WorkerState.PLANNED else member.state.value
    if member.state is WorkerState.FAILED:
        later = f" {member.ended_at - first.ended_at:.2f} s later" if first is not None else ""
        state = f"failed{later} ({describe_status(member.wait_status)})"
    elif member.state is WorkerState.STOPPED and member.hint:
        state += f" ({member.hint})"
    return {"global_rank": member.global_rank, "state": state, "doing": attempt.doing.get(member.global_rank, "")}


def _ended_early(attempt: Attempt, first: Member, excerpt: list[str]) -> str:
    """Return who had finished while the failed worker still needed them, if its last words tell so."""
    members = attempt.membership.members
    done = [
        member
        for member in members.values()
        if member.state is WorkerState.DONE and (member.ended_itself or member.ended_at - first.ended_at < LATE_S)
    ]
    left = [
        rank for rank in attempt.left if members[rank] not in done and members[rank].state is not WorkerState.FAILED
    ]
    if not (done or left) or not _has_lost_peer(excerpt):
        return ""
    if left:
        return f"{name_ranks([*left, *(member.global_rank for member in done)])} left the job early"
    return f"{name_ranks(member.global_rank for member in done)} exited early (code 0)"


def _has_lost_peer(excerpt: list[str]) -> bool:
    text = "\n".join(excerpt).lower()
    return any(words in text for words in LOST_PEER)


def _summary(attempt: Attempt) -> dict[str, int | float | str]:
    members = attempt.membership.members.values()
    begin = min((member.started_at for member in members if member.started_at), default=0.0)
    end = max((member.ended_at for member in members), default=begin)
    return {"attempt": attempt.number, "reason": attempt.end_reason(), "run_time_s": round(max(0.0, end - begin), 3)}


def render_attempt(
    plan: LaunchPlan, attempt: int, global_ranks: Sequence[int], shown_ranks: Collection[int] = ()
) -> str:
    """Return the ends of these ranks' kept logs, of an attempt that is over; `shown_ranks`: see `render_failure`."""
    logs = {worker.global_rank: Path(worker.last_words_path) for worker in plan.workers}
    lines: list[str] = []
    for rank in [rank for rank in global_ranks if rank in logs][:SHOWN_LAGGING]:
        kept = logs[rank].with_name(contract.attempt_log_name(logs[rank].name, attempt))
        excerpt = read_excerpt(kept if kept.exists() else logs[rank])  # it is renamed after this, or was before
        is_above = bool(excerpt) and rank in shown_ranks
        lines += [f"  rank {rank}, log: {kept}{', shown above' if is_above else ''}"]
        lines += [] if is_above else _quoted([hide_values(line, plan.secrets) for line in excerpt])
    return "\n".join(lines)


def _quoted(excerpt: Sequence[str]) -> list[str]:
    return [f"  | {line}" for line in excerpt] or ["  | (the log is empty)"]


def write_failure(plan: LaunchPlan, failure: JobFailure) -> str:
    """Write `failure.json` into the log directory; returns why that could not be done, empty when it was."""
    path = Path(plan.log_dir) / contract.FAILURE_JSON
    try:
        write_private(path, json.dumps(asdict(failure), indent=2) + "\n")
        publish_file(path)
    except OSError as error:
        return f"{path} could not be written ({error.strerror})"
    return ""


def render_failure(failure: JobFailure, shown_ranks: Collection[int] = ()) -> str:
    """Return the report for the console; logs of `shown_ranks` were seen in the same place, and are not quoted."""
    lines: list[str] = []
    shown = [failure.first_failure] if failure.first_failure else failure.lagging[:SHOWN_LAGGING]
    for worker in shown:
        who = "" if failure.first_failure else f"rank {worker.global_rank}, "
        is_above = bool(worker.excerpt) and worker.global_rank in shown_ranks
        lines += [f"  {who}log: {worker.log} (pid {worker.pid}){', shown above' if is_above else ''}"]
        lines += [] if is_above else _quoted(worker.excerpt)
    states: dict[str, list[int]] = {}
    for other in failure.others:
        doing = f" ({other['doing']})" if other["doing"] else ""
        state = "finished" if other["state"] == WorkerState.DONE.value else other["state"]
        states.setdefault(f"{state}{doing}", []).append(int(other["global_rank"]))
    if shown:
        lines += [f"  {name_ranks(ranks)} {state}" for state, ranks in states.items()]
    lines += [
        f"  attempt {past['attempt']} before, which ran {past['run_time_s']:.1f} s: {past['reason']}"
        for past in failure.attempts
    ]
    return "\n".join(lines)


def at_home(failure: JobFailure, log_dir: Path) -> JobFailure:
    return failure.change_workers(lambda worker: replace(worker, log=str(log_dir / Path(worker.log).name)))


def hide_secrets(failure: JobFailure, secrets: Sequence[str]) -> JobFailure:
    return failure.change_workers(
        lambda worker: replace(worker, excerpt=[hide_values(line, secrets) for line in worker.excerpt])
    )
