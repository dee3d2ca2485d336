"""How a job over many hosts ended: the hosts' results and what the launcher knows itself, as one failure, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.errors import ClusterError, Interrupted, MsrunError
from msrun.launch.failure import JobFailure, WorkerFailure
from msrun.planning.masking import hide_values
from msrun.planning.record_json import decode_record


def read_failure(value: Any, log_dir: Path) -> JobFailure | None:
    """Return the failure in a host's result, with the logs' names here.

    Raises:
        ClusterError: it cannot be understood.
    """
    if value is None:
        return None
    try:
        failure = decode_record(JobFailure, value)
    except ValueError as error:
        raise ClusterError(f"a host's result cannot be read ({error}): install the same msrun on all hosts") from None
    if not all(type(other.get("global_rank")) is int for other in failure.others):
        raise ClusterError("a host's result names a worker without a rank: install the same msrun on all hosts")
    first = failure.first_failure
    return replace(
        failure,
        exit_code=failure.exit_code if 0 < failure.exit_code < 256 else contract.EXIT_CLUSTER,
        first_failure=_at_home(first, log_dir) if first else None,
        lagging=[_at_home(worker, log_dir) for worker in failure.lagging],
    )


def _at_home(worker: WorkerFailure, log_dir: Path) -> WorkerFailure:
    return replace(worker, log=str(log_dir / Path(worker.log).name))


def hide_secrets(failure: JobFailure, secrets: Sequence[str]) -> JobFailure:
    """Return a failure in whose excerpts of logs these values are hidden."""
    first = failure.first_failure
    return replace(
        failure,
        first_failure=_hidden(first, secrets) if first else None,
        lagging=[_hidden(worker, secrets) for worker in failure.lagging],
    )


def _hidden(worker: WorkerFailure, secrets: Sequence[str]) -> WorkerFailure:
    return replace(worker, excerpt=[hide_values(line, secrets) for line in worker.excerpt])


def combine_failures(
    job_id: str, failures: Mapping[int, JobFailure | None], fault: MsrunError | None
) -> JobFailure | None:
    """Return the job's failure; None when it finished successfully on all hosts.

    A worker that failed is the reason above all. What the launcher has seen, a lost host or a signal, comes before what
    hosts say of each other.

    Args:
        failures: node_rank -> its result; hosts that gave none are missing.
        fault: what the launcher itself knows.
    """
    found = [failure for _, failure in sorted(failures.items()) if failure is not None]
    if not found and fault is None:
        return None
    first = next((failure for failure in found if failure.first_failure or failure.lagging), None)
    others = sorted((other for failure in found for other in failure.others), key=lambda other: other["global_rank"])
    attempts = next((failure.attempts for failure in found if failure.attempts), [])
    if first is not None and not isinstance(fault, Interrupted):
        told_of = {first.first_failure.global_rank} if first.first_failure else set()
        told_of |= {worker.global_rank for worker in first.lagging}
        return replace(first, others=[o for o in others if o["global_rank"] not in told_of], attempts=attempts)
    if fault is not None:
        return JobFailure(job_id, fault.exit_code, str(fault), None, [], others, attempts)
    return replace(found[0], others=others, attempts=attempts)
