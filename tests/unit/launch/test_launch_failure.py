"""The report of a failure: ranks folded, the first named, the others accounted for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.agent.supervisor import HostResult
from msrun.cluster.membership import Membership
from msrun.errors import Interrupted, MsrunError
from msrun.launch.failure import build_failure, fold_ranks, render_failure, write_failure
from msrun.planning.host import HostFacts
from msrun.planning.plan import LaunchPlan, build_plan
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 5], "0-2, 5"),
        ([5, 1, 0], "0-1, 5"),
        ([1, 3, 5], "1, 3, 5"),
    ],
)
def test_ranks_are_folded(ranks: list[int], text: str) -> None:
    assert fold_ranks(ranks) == text


@given(st.sets(st.integers(0, 2000)))
def test_folded_ranks_unfold_to_the_same(ranks: set[int]) -> None:
    unfolded: list[int] = []
    for run in filter(None, fold_ranks(list(ranks)).split(", ")):
        first, _, last = run.partition("-")
        unfolded += range(int(first), int(last or first) + 1)
    assert unfolded == sorted(ranks)


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    spec = LaunchSpec(
        program=Program("script", "/train.py"),
        worker_num=4,
        local_worker_num=4,
        working_directory=tmp_path,
        log_dir=tmp_path,
    )
    host = HostFacts("node-a", "127.0.0.1", (0,))
    return build_plan(spec, host, caller={}, job_id="JOB", run_dir="/tmp/r", master_port=1)


def result(plan: LaunchPlan, ends: dict[int, int], fault: MsrunError | None = None) -> HostResult:
    membership = Membership(worker.global_rank for worker in plan.workers)
    for worker in plan.workers:
        membership.started(worker.global_rank, 100 + worker.global_rank, 10.0)
    if fault:
        membership.stop()
    for rank, status in ends.items():
        membership.exited(rank, status, 12.5)
    return HostResult(membership, fault, (), {})


def test_job_that_ended_well_has_no_failure(plan: LaunchPlan) -> None:
    assert build_failure(plan, result(plan, dict.fromkeys(range(4), 0))) is None


def test_first_failure_is_named_with_host_signal_hint_log_and_excerpt(plan: LaunchPlan) -> None:
    Path(plan.workers[2].log_path).write_text("one\ntwo\n")
    failure = build_failure(plan, result(plan, {1: 0, 2: signal.SIGKILL, 0: signal.SIGTERM, 3: signal.SIGTERM}))
    assert failure is not None and failure.first_failure is not None
    assert failure.exit_code == 137
    assert failure.reason == (
        "rank 2 on node-a failed first: signal SIGKILL, if you did not kill it, likely out of memory, after 2.5 s"
    )
    assert (failure.first_failure.pid, failure.first_failure.signal, failure.first_failure.exit_code) == (
        102,
        "SIGKILL",
        None,
    )
    assert render_failure(failure).splitlines() == [
        f"  log: {plan.workers[2].log_path} (pid 102)",
        "  | one",
        "  | two",
        "  others stopped by msrun: 0, 3",
        "  others done: 1",
    ]


def test_empty_log_is_said_to_be_empty(plan: LaunchPlan) -> None:
    failure = build_failure(plan, result(plan, {0: 3 << 8, **dict.fromkeys(range(1, 4), signal.SIGTERM)}))
    assert failure is not None
    assert "  | (the log is empty)" in render_failure(failure)


def test_fault_of_msrun_itself_names_no_worker(plan: LaunchPlan) -> None:
    fault = Interrupted("stopped by SIGINT", signal.SIGINT)
    failure = build_failure(plan, result(plan, dict.fromkeys(range(4), signal.SIGTERM), fault))
    assert failure is not None
    assert (failure.exit_code, failure.reason, failure.first_failure) == (130, "stopped by SIGINT", None)
    assert render_failure(failure) == ""
    assert failure.to_error().exit_code == 130


def test_failure_file_has_the_fields_of_the_contract(plan: LaunchPlan) -> None:
    failure = build_failure(plan, result(plan, {0: 3 << 8, **dict.fromkeys(range(1, 4), signal.SIGTERM)}))
    assert failure is not None
    write_failure(plan, failure)
    path = Path(plan.log_dir, "failure.json")
    written = json.loads(path.read_text())
    assert set(written) == {"job_id", "exit_code", "reason", "first_failure", "others"}
    assert set(written["first_failure"]) == {
        "global_rank", "local_rank", "host", "pid", "exit_code", "signal", "hint", "run_time_s", "log", "excerpt",
    }  # fmt: skip
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [other["global_rank"] for other in written["others"]] == [1, 2, 3]
