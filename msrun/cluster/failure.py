"""Why a job failed: as `failure.json` has it (schema in `msrun.contract`), and as hosts and coordinator tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from msrun import contract
from msrun.planning.record import Record, decode_record

MAX_TEXT = 4096
MAX_OTHERS = 1 << 16


class WorkerFailure(Record):
    """A worker that failed first, or that the others waited for."""

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

    @property
    def how(self) -> str:
        """How it ended: "exit code 7", "signal SIGKILL"."""
        return f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"


class JobFailure(Record):
    """Why the job as a whole failed."""

    job_id: str
    exit_code: int
    reason: str
    first_failure: WorkerFailure | None
    lagging: list[WorkerFailure]
    others: list[dict[str, int | str]]
    attempts: list[dict[str, int | float | str]]

    @property
    def guilty(self) -> tuple[WorkerFailure, ...]:
        """The worker that failed first, or those that the others waited for."""
        return (self.first_failure,) if self.first_failure else tuple(self.lagging)

    def change_workers(self, change: Callable[[WorkerFailure], WorkerFailure]) -> JobFailure:
        """Return the same failure with each of the `guilty` replaced by what `change` makes of it."""
        first = change(self.first_failure) if self.first_failure else None
        return replace(self, first_failure=first, lagging=[change(worker) for worker in self.lagging])


class FailureReport(Record):
    """What a host tells of the failure of an attempt; of the first one, what all hosts are told."""

    failure: JobFailure
    node_rank: int = -1  # whose failure it is; -1: the coordinator's own word
    is_hang: bool = False  # the workers run still, and wait for ever
    can_restart: bool = False
    is_unfit: bool = False  # the host itself cannot start again, between two attempts
    lost_peer: bool = False  # the worker's last words are that another rank has gone, and that one was not of its host
    signum: int = 0  # the signal that ended the job on that host; 0 when it was none


def fault_of_job(job_id: str, reason: str, exit_code: int) -> JobFailure:
    return JobFailure(job_id, exit_code, reason, None, [], [], [])


def read_failure(value: object) -> JobFailure:
    """Return the failure in a message of another host, cut to size. Raises ValueError: there is none in it."""
    return _checked(decode_record(JobFailure, value))


def read_report(value: object) -> FailureReport:
    """Return the report in a message of another host, cut to size. Raises ValueError: there is none in it."""
    report = decode_record(FailureReport, value)
    return replace(report, failure=_checked(report.failure))


def _checked(failure: JobFailure) -> JobFailure:
    if len(failure.others) > MAX_OTHERS or not all(type(other.get("global_rank")) is int for other in failure.others):
        raise ValueError("it names a worker without a rank, or too many")
    exit_code = failure.exit_code if 0 < failure.exit_code < 256 else contract.EXIT_CLUSTER
    return replace(failure, exit_code=exit_code, reason=failure.reason[:MAX_TEXT])


def merge_failures(failure: JobFailure, hosts: Iterable[JobFailure]) -> JobFailure:
    """Return the job's failure with what its hosts know of their own workers. `failure`: the coordinator's: it says
    what the reason is. `hosts`: as each host has seen the end. Each knows how its workers ended, and the one whose
    worker it is has read that worker's log again since."""
    found = list(hosts)
    newest = {worker.global_rank: worker for host in found for worker in host.guilty}
    failure = failure.change_workers(lambda worker: newest.pop(worker.global_rank, worker))
    told_of = {worker.global_rank for worker in failure.guilty}
    others = {other["global_rank"]: other for host in found for other in host.others}
    for rank, worker in newest.items():  # first on its host, but not of the job
        others.setdefault(rank, {"global_rank": rank, "state": f"failed ({worker.how})", "doing": ""})
    attempts = next((host.attempts for host in found if host.attempts), failure.attempts)
    kept = [others[rank] for rank in sorted(others) if rank not in told_of]
    return replace(failure, others=kept, attempts=attempts)
