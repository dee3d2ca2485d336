"""What hosts tell their coordinator of a failure."""

from msrun.cluster.failure import FailureReport, JobFailure, WorkerFailure, fault_of_job
from msrun.planning.record import encode_record


def fault_of(node_rank, reason, exit_code, **more):
    """Return a failure that is no worker's."""
    return FailureReport(fault_of_job("JOB", reason, exit_code), node_rank, **more)


def worker_of(global_rank, exit_code=7):
    log = f"/x/worker_{global_rank}.log"
    return WorkerFailure(global_rank, 0, "h", 77, exit_code, None, "", 1.5, log, ["last words"])


def failure_of(global_rank, exit_code=7):
    return JobFailure("JOB", exit_code, f"rank {global_rank} failed", worker_of(global_rank, exit_code), [], [], [])


def failed(attempt, report):
    """Return it as a message."""
    return {"type": "failed", "attempt": attempt, "report": encode_record(report)}


def reason_of(order):
    """Return why the coordinator ends the job, from its order."""
    return str(order["report"]["failure"]["reason"])
