"""How a job over many hosts ended, in the launcher's words: logs by their names here, and no secrets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msrun.cluster.failure import JobFailure
from msrun.planning.masking import hide_values


def at_home(failure: JobFailure, log_dir: Path) -> JobFailure:
    """Return a host's failure with the logs' names here."""
    return failure.change_workers(lambda worker: replace(worker, log=str(log_dir / Path(worker.log).name)))


def hide_secrets(failure: JobFailure, secrets: Sequence[str]) -> JobFailure:
    """Return a failure in whose excerpts of logs these values are hidden."""
    return failure.change_workers(
        lambda worker: replace(worker, excerpt=[hide_values(line, secrets) for line in worker.excerpt])
    )
