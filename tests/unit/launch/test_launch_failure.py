"""The report of a failure: ranks folded, the first named, the others accounted for."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from msrun.agent.attempt import Attempt, HostResult
from msrun.cluster.failure import merge_failures, read_report
from msrun.cluster.membership import Membership
from msrun.errors import HangTimeout, Interrupted, MsrunError, PeerFailed
from msrun.launch.failure import build_failure, render_failure, report_failure, write_failure
from msrun.planning.build import build_plan
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.plan import LaunchPlan
from msrun.planning.program import Program
from msrun.planning.record_json import encode_record
from msrun.planning.spec import LaunchSpec


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
        membership.told()
    for rank, status in ends.items():
        membership.exited(rank, status, 12.5)
        if membership.is_stopping:
            membership.told()
    return HostResult((Attempt(0, membership, fault),), ())


def test_job_that_ended_well_has_no_failure(plan: LaunchPlan) -> None:
    assert build_failure(plan, result(plan, dict.fromkeys(range(4), 0))) is None


def test_first_failure_is_named_with_host_signal_log_and_excerpt(plan: LaunchPlan) -> None:
    Path(plan.workers[2].log_path).write_text("one\ntwo\n")
    failure = build_failure(plan, result(plan, {1: 0, 2: signal.SIGKILL, 0: signal.SIGTERM, 3: signal.SIGTERM}))
    assert failure is not None and failure.first_failure is not None
    assert failure.exit_code == 137
    assert failure.reason == ("rank 2 on node-a failed first: signal SIGKILL, after 2.5 s")
    assert (failure.first_failure.pid, failure.first_failure.signal, failure.first_failure.exit_code) == (
        102,
        "SIGKILL",
        None,
    )
    assert render_failure(failure).splitlines() == [
        f"  log: {plan.workers[2].log_path} (pid 102)",
        "  | one",
        "  | two",
        "  ranks 0, 3 stopped by msrun",
        "  rank 1 finished",
    ]


def test_what_the_reader_has_seen_already_is_not_quoted_again(plan: LaunchPlan) -> None:
    Path(plan.workers[2].log_path).write_text("one\ntwo\n")
    failure = build_failure(plan, result(plan, {1: 0, 2: signal.SIGKILL, 0: signal.SIGTERM, 3: signal.SIGTERM}))
    assert failure is not None
    first, *others = render_failure(failure, shown_ranks=(0, 2)).splitlines()
    assert first == f"  log: {plan.workers[2].log_path} (pid 102), shown above"
    assert others == ["  ranks 0, 3 stopped by msrun", "  rank 1 finished"]


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
    assert failure.exit_code == 130


def test_failure_file_has_the_fields_of_the_contract(plan: LaunchPlan) -> None:
    failure = build_failure(plan, result(plan, {0: 3 << 8, **dict.fromkeys(range(1, 4), signal.SIGTERM)}))
    assert failure is not None
    write_failure(plan, failure)
    path = Path(plan.log_dir, "failure.json")
    written = json.loads(path.read_text())
    assert set(written) == {"job_id", "exit_code", "reason", "first_failure", "lagging", "others", "attempts"}
    assert set(written["first_failure"]) == {
        "global_rank", "local_rank", "host", "pid", "exit_code", "signal", "hint", "run_time_s", "log", "excerpt",
    }  # fmt: skip
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [other["global_rank"] for other in written["others"]] == [1, 2, 3]


def several(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan as that of node 1 of several hosts."""
    hosts = tuple(HostAssignment(node, "node-a", f"10.0.0.{node + 1}", (), ()) for node in range(2))
    return replace(plan, fleet=hosts, hosts=(replace(plan.hosts[0], node_rank=1, place=hosts[1].describe()),))


def test_failure_of_one_host_is_the_same_on_all_of_them(plan: LaunchPlan) -> None:
    there = several(plan)
    Path(plan.workers[2].log_path).write_text("last words\n")
    attempt = result(there, {2: 7 << 8, **dict.fromkeys((0, 1, 3), signal.SIGTERM)}).last
    report = read_report(json.loads(json.dumps(encode_record(report_failure(there, attempt)))))
    reason = "rank 2 on node 1 (node-a, 10.0.0.2) failed first: exit code 7, after 2.5 s"
    assert (report.failure.reason, report.failure.exit_code) == (reason, 7)
    assert (report.node_rank, report.is_hang, report.failure.others) == (1, False, [])

    Path(plan.workers[2].log_path).write_text("")  # another host, where the log is not
    stopped = build_failure(plan, result(plan, dict.fromkeys(range(4), signal.SIGTERM), PeerFailed(reason, 7)))
    assert stopped is not None
    here = merge_failures(report.failure, [stopped])
    assert (here.reason, here.exit_code) == (reason, 7)
    assert here.first_failure is not None and here.first_failure.excerpt == ["last words"]
    assert here.first_failure.host == "node 1 (node-a, 10.0.0.2)"
    assert [other["global_rank"] for other in here.others] == [0, 1, 3]


@pytest.mark.parametrize(
    ("words", "before", "lost_peer"),
    [
        ("Connection closed by peer [10.0.0.3]:4", {}, True),
        ("Connection closed by peer [10.0.0.3]:4", {0: 0}, False),  # it was one of this host, which the reason names
        ("ValueError: no such file", {}, False),
    ],
)
def test_coordinator_is_told_that_a_rank_misses_one_of_another_host(
    plan: LaunchPlan, words: str, before: dict[int, int], lost_peer: bool
) -> None:
    Path(plan.workers[2].log_path).write_text(f"{words}\n")
    statuses = {**before, 2: 1 << 8, **dict.fromkeys({0, 1, 3} - before.keys(), signal.SIGTERM)}
    attempt = result(several(plan), statuses).last
    assert report_failure(several(plan), attempt).lost_peer is lost_peer


@pytest.mark.parametrize(
    ("fault", "is_hang", "exit_code"),
    [(HangTimeout("stuck"), True, 124), (Interrupted("stopped by SIGINT", signal.SIGINT), False, 130)],
)
def test_fault_of_one_host_of_several_names_the_host(
    plan: LaunchPlan, fault: MsrunError, is_hang: bool, exit_code: int
) -> None:
    attempt = result(plan, dict.fromkeys(range(4), signal.SIGTERM), fault).last
    report = report_failure(several(plan), attempt)
    assert report.failure.reason == f"node 1 (node-a, 10.0.0.2): {fault}"
    assert (report.is_hang, report.failure.exit_code, report.failure.guilty) == (is_hang, exit_code, ())
    assert report_failure(plan, attempt).failure.reason == str(fault), "there is one host only"


def test_hint_of_the_worker_is_part_of_the_reason(plan: LaunchPlan) -> None:
    outcome = result(plan, {2: signal.SIGKILL, **dict.fromkeys((0, 1, 3), signal.SIGTERM)})
    outcome.last.membership.members[2].hint = "likely out of memory: the kernel says so"
    failure = build_failure(plan, outcome)
    assert failure is not None and failure.first_failure is not None
    assert failure.reason.endswith("signal SIGKILL, likely out of memory: the kernel says so, after 2.5 s")
    assert failure.first_failure.hint == "likely out of memory: the kernel says so"


def test_worker_that_failed_by_itself_before_it_was_told_is_listed_as_failed_too(plan: LaunchPlan) -> None:
    membership = Membership(range(4))
    for rank in range(4):
        membership.started(rank, 100 + rank, 10.0)
    membership.exited(3, 7 << 8, 12.0)
    membership.exited(1, signal.SIGSEGV, 12.03)
    membership.told()
    for rank in (0, 2):
        membership.exited(rank, signal.SIGTERM, 12.1)
    failure = build_failure(plan, HostResult((Attempt(0, membership),), ()))
    assert failure is not None and failure.first_failure is not None
    assert failure.first_failure.global_rank == 3
    assert "  rank 1 failed 0.03 s later (signal SIGSEGV)" in render_failure(failure)
    assert "  ranks 0, 2 stopped by msrun" in render_failure(failure)


def test_what_the_others_were_doing_is_told(plan: LaunchPlan) -> None:
    outcome = result(plan, {2: 1 << 8, **dict.fromkeys((0, 1, 3), signal.SIGTERM)})
    outcome.last.doing = {0: "step 4, waits in all_reduce for 1.0 s", 1: "step 4, waits in all_reduce for 1.0 s"}
    failure = build_failure(plan, outcome)
    assert failure is not None
    text = render_failure(failure)
    assert "  ranks 0-1 stopped by msrun (step 4, waits in all_reduce for 1.0 s)" in text
    assert "  rank 3 stopped by msrun" in text


@pytest.mark.parametrize("words", ["Connection closed by peer [127.0.0.1]:4", "write: Broken pipe"])
def test_rank_that_had_ended_well_before_a_lost_connection_is_named(plan: LaunchPlan, words: str) -> None:
    Path(plan.workers[0].log_path).write_text(f"RuntimeError: {words}\n")
    membership = Membership(range(4))
    for rank in range(4):
        membership.started(rank, 100 + rank, 10.0)
    membership.exited(1, 0, 12.0)
    membership.exited(0, 1 << 8, 12.5)
    failure = build_failure(plan, HostResult((Attempt(0, membership),), ()))
    assert failure is not None
    assert "rank 1 exited early (code 0); rank " in failure.reason


@pytest.mark.parametrize(("late_s", "is_named"), [(0.2, True), (3.0, False)])
def test_good_end_that_is_reported_just_after_the_failure_came_before_it(
    plan: LaunchPlan, late_s: float, is_named: bool
) -> None:
    Path(plan.workers[0].log_path).write_text("RuntimeError: Connection reset by peer\n")
    membership = Membership(range(4))
    for rank in range(4):
        membership.started(rank, 100 + rank, 10.0)
    membership.exited(0, 1 << 8, 12.5)
    membership.told()
    membership.exited(1, 0, 12.5 + late_s)
    failure = build_failure(plan, HostResult((Attempt(0, membership),), ()))
    assert failure is not None
    assert ("rank 1 exited early (code 0); " in failure.reason) is is_named


@pytest.mark.parametrize(
    ("status", "is_named"), [(None, True), (int(signal.SIGTERM), True), (0, True), (3 << 8, False)], ids=str
)
def test_rank_that_had_left_the_world_before_a_lost_connection_is_named(
    plan: LaunchPlan, status: int | None, is_named: bool
) -> None:
    Path(plan.workers[0].log_path).write_text("RuntimeError: Socket closed\n")
    membership = Membership(range(4))
    for rank in range(4):
        membership.started(rank, 100 + rank, 10.0)
    membership.exited(0, 1 << 8, 12.5)
    if status == 3 << 8:
        membership.exited(1, status, 13.0)
    membership.told()
    if status in (0, signal.SIGTERM):
        membership.exited(1, status, 20.0)
    failure = build_failure(plan, HostResult((Attempt(0, membership, left=frozenset({1})),), ()))
    assert failure is not None
    assert ("rank 1 left the job early; " in failure.reason) is is_named


def test_failure_of_its_own_blames_nobody_who_ended_well(plan: LaunchPlan) -> None:
    Path(plan.workers[0].log_path).write_text("ValueError: no such file\n")
    failure = build_failure(plan, result(plan, {1: 0, 0: 1 << 8, 2: signal.SIGTERM, 3: signal.SIGTERM}))
    assert failure is not None
    assert "waiting for" not in failure.reason


def test_hang_shows_the_ranks_that_held_the_others_up(plan: LaunchPlan) -> None:
    Path(plan.workers[1].log_path).write_text("last words\n")
    outcome = result(plan, dict.fromkeys(range(4), signal.SIGTERM), HangTimeout("--hang_time_out 3: no progress"))
    outcome.last.lagging = (1,)
    failure = build_failure(plan, outcome)
    assert failure is not None
    assert (failure.exit_code, failure.first_failure) == (124, None)
    assert [worker.global_rank for worker in failure.lagging] == [1]
    assert render_failure(failure).splitlines()[:2] == [
        f"  rank 1, log: {plan.workers[1].log_path} (pid 101)",
        "  | last words",
    ]


def test_earlier_attempts_are_listed(plan: LaunchPlan) -> None:
    first = result(plan, {2: 9 << 8, **dict.fromkeys((0, 1, 3), signal.SIGTERM)}).last
    last = result(plan, {0: 7 << 8, **dict.fromkeys((1, 2, 3), signal.SIGTERM)}).last
    failure = build_failure(plan, HostResult((first, last), ()))
    assert failure is not None
    assert failure.exit_code == 7
    assert failure.attempts == [{"attempt": 0, "reason": "rank 2 failed first: exit code 9", "run_time_s": 2.5}]
    assert "  attempt 0 before: rank 2 failed first: exit code 9, after 2.5 s" in render_failure(failure)
