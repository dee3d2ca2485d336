"""Standard streams that the caller has closed: the job runs as with /dev/null in their place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, wait_until

CLOSINGS = ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- 2>&-", "<&- >&- 2>&-"]


def closing(streams: str) -> tuple[str, ...]:
    """Return `python -m msrun` in a shell that closes streams first."""
    return ("sh", "-c", f'exec "$0" -m msrun "$@" {streams}', sys.executable)


@pytest.mark.parametrize("streams", one_fast(*reversed(CLOSINGS)))
def test_a_good_job_ends_well(msrun: JobRunner, workers: Path, tmp_path: Path, streams: str) -> None:
    finished = msrun.run("--worker_num=2", workers / "end.py", "all", "0", cwd=tmp_path, command=closing(streams))
    assert finished.code == 0, finished.stderr
    assert [event["event"] for event in finished.events].count("exited") == 2


def test_a_bad_job_ends_with_its_own_status(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    closed = closing("<&- >&- 2>&-")
    assert msrun.run("--worker_num=2", workers / "end.py", "all", "9", cwd=tmp_path, command=closed).code == 9


@pytest.mark.parametrize("streams", one_fast(*reversed(CLOSINGS)))
def test_a_detached_job_ends_well(msrun: JobRunner, workers: Path, tmp_path: Path, streams: str) -> None:
    started = msrun.start(
        "--worker_num=2", "--join=False", workers / "end.py", "all", "0", cwd=tmp_path, command=closing(streams)
    )
    finished = started.finish()
    assert finished.code == 0, finished.stderr
    wait_until(lambda: finished.events and finished.events[-1]["event"] == "over", "the job is over")
    msrun.prove_nothing_left()
    assert [event["event"] for event in finished.events].count("exited") == 2
    assert not (finished.log_dir / "failure.json").exists()
