"""The report of a failure: ranks folded, the first named, the others accounted for."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from failure_reports import failure_of, worker_of
from plans import small_plan

from msrun.agent.attempt import Attempt, HostResult
from msrun.cluster.failure import merge_failures, read_report
from msrun.cluster.membership import Membership
from msrun.errors import HangTimeout, Interrupted, PeerFailed
from msrun.launch.failure import at_home, build_failure, hide_secrets, render_failure, report_failure, write_failure
from msrun.planning.hosts import HostAssignment
from msrun.planning.record import encode_record

TERM = int(signal.SIGTERM)
STUCK = HangTimeout("--hang_time_out 3: no progress")
INTERRUPTED = Interrupted("stopped by SIGINT", signal.SIGINT)


@pytest.fixture
def plan(tmp_path):
    return small_plan(tmp_path, 4)


def others(*ranks):
    """Return the ends of the other workers, which msrun stops."""
    return {rank: TERM for rank in range(4) if rank not in ranks}


def result(ends, fault=None):
    """Return that of four workers that ended so, in this order, when the first failure was seen at once."""
    membership = started()
    if fault:
        membership.told()
    for rank, status in ends.items():
        membership.exited(rank, status, 12.5)
        if membership.is_stopping:
            membership.told()
    return HostResult((Attempt(0, membership, fault),), ())


def started():
    membership = Membership(range(4))
    for rank in range(4):
        membership.started(rank, 100 + rank, 10.0)
    return membership


def failure_in(plan, outcome):
    if isinstance(outcome, Membership):
        outcome = HostResult((Attempt(0, outcome),), ())
    failure = build_failure(plan, outcome)
    assert failure is not None
    return failure


def write(plan, rank, text):
    Path(plan.workers[rank].log_path).write_text(text)


def test_job_that_ended_well_has_no_failure(plan):
    assert build_failure(plan, result(dict.fromkeys(range(4), 0))) is None


def test_first_failure_is_named_with_host_signal_log_and_what_is_not_shown_yet(plan):
    write(plan, 2, "one\ntwo\n")
    failure = failure_in(plan, result({1: 0, 2: signal.SIGKILL, 0: TERM, 3: TERM}))
    first = failure.first_failure
    assert first is not None and (first.pid, first.signal, first.exit_code) == (102, "SIGKILL", None)
    assert (failure.exit_code, failure.reason) == (137, "rank 2 on h failed first: signal SIGKILL, after 2.5 s")
    log, rest = f"  log: {first.log} (pid 102)", ["  ranks 0, 3 stopped by msrun", "  rank 1 finished"]
    assert render_failure(failure).splitlines() == [log, "  | one", "  | two", *rest]
    assert render_failure(failure, shown_ranks=(0, 2)).splitlines() == [f"{log}, shown above", *rest]


def test_fault_of_msrun_itself_names_no_worker(plan):
    failure = failure_in(plan, result(others(), INTERRUPTED))
    assert (failure.exit_code, failure.reason, failure.first_failure) == (130, "stopped by SIGINT", None)
    assert render_failure(failure) == ""


def test_failure_file_has_the_fields_of_the_contract(plan):
    failure = failure_in(plan, result({0: 3 << 8, **others(0)}))
    assert "  | (the log is empty)" in render_failure(failure)
    write_failure(plan, failure)
    path = Path(plan.log_dir, "failure.json")
    written = json.loads(path.read_text())
    assert set(written) == {"job_id", "exit_code", "reason", "first_failure", "lagging", "others", "attempts"}
    assert set(written["first_failure"]) == {
        "global_rank", "local_rank", "host", "pid", "exit_code", "signal", "hint", "run_time_s", "log", "excerpt",
    }  # fmt: skip
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [other["global_rank"] for other in written["others"]] == [1, 2, 3]


def several(plan):
    """Return the plan as that of node 1 of several hosts."""
    hosts = tuple(HostAssignment(node, "node-a", f"10.0.0.{node + 1}", (), ()) for node in range(2))
    return replace(plan, fleet=hosts, hosts=(replace(plan.hosts[0], node_rank=1, place=hosts[1].describe()),))


def test_failure_of_one_host_is_the_same_on_all_of_them(plan):
    there = several(plan)
    write(plan, 2, "last words\n")
    attempt = result({2: 7 << 8, **others(2)}).last
    report = read_report(json.loads(json.dumps(encode_record(report_failure(there, attempt)))))
    reason = "rank 2 on node 1 (node-a, 10.0.0.2) failed first: exit code 7, after 2.5 s"
    assert (report.failure.reason, report.failure.exit_code) == (reason, 7)
    assert (report.node_rank, report.is_hang, report.failure.others) == (1, False, [])

    write(plan, 2, "")  # another host, where the log is not
    here = merge_failures(report.failure, [failure_in(plan, result(others(), PeerFailed(reason, 7)))])
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
def test_coordinator_is_told_that_a_rank_misses_one_of_another_host(plan, words, before, lost_peer):
    write(plan, 2, f"{words}\n")
    attempt = result({**before, 2: 1 << 8, **others(2, *before)}).last
    assert report_failure(several(plan), attempt).lost_peer is lost_peer


@pytest.mark.parametrize(("fault", "is_hang", "exit_code"), [(STUCK, True, 124), (INTERRUPTED, False, 130)])
def test_fault_of_one_host_of_several_names_the_host(plan, fault, is_hang, exit_code):
    attempt = result(others(), fault).last
    report = report_failure(several(plan), attempt)
    assert report.failure.reason == f"node 1 (node-a, 10.0.0.2): {fault}"
    assert (report.is_hang, report.failure.exit_code, report.failure.guilty) == (is_hang, exit_code, ())
    assert report_failure(plan, attempt).failure.reason == str(fault), "there is one host only"


def test_hint_of_the_worker_and_what_the_others_were_doing_are_told(plan):
    outcome = result({2: signal.SIGKILL, **others(2)})
    outcome.last.membership.members[2].hint = "likely out of memory"
    outcome.last.doing = dict.fromkeys((0, 1), "step 4, waits in all_reduce for 1.0 s")
    failure = failure_in(plan, outcome)
    assert failure.reason.endswith("signal SIGKILL, likely out of memory, after 2.5 s")
    assert failure.first_failure is not None and failure.first_failure.hint == "likely out of memory"
    text = render_failure(failure)
    assert "  ranks 0-1 stopped by msrun (step 4, waits in all_reduce for 1.0 s)" in text
    assert "  rank 3 stopped by msrun" in text


def test_worker_that_failed_by_itself_before_it_was_told_is_listed_as_failed_too(plan):
    membership = started()
    membership.exited(3, 7 << 8, 12.0)
    membership.exited(1, signal.SIGSEGV, 12.03)
    membership.told()
    for rank in (0, 2):
        membership.exited(rank, TERM, 12.1)
    failure = failure_in(plan, membership)
    assert failure.first_failure is not None and failure.first_failure.global_rank == 3
    assert "  rank 1 failed 0.03 s later (signal SIGSEGV)" in render_failure(failure)
    assert "  ranks 0, 2 stopped by msrun" in render_failure(failure)


@pytest.mark.parametrize(
    ("words", "late_s", "is_named"),
    [
        ("RuntimeError: Connection closed by peer [127.0.0.1]:4", -0.5, True),
        ("RuntimeError: write: Broken pipe", -0.5, True),
        ("RuntimeError: Connection reset by peer", 0.2, True),  # reported just after the failure: it came before
        ("RuntimeError: Connection reset by peer", 3.0, False),
        ("ValueError: no such file", -0.5, False),
    ],
)
def test_rank_that_had_ended_well_before_a_lost_connection_is_named(plan, words, late_s, is_named):
    write(plan, 0, f"{words}\n")
    membership = started()
    if late_s < 0:
        membership.exited(1, 0, 12.5 + late_s)
    membership.exited(0, 1 << 8, 12.5)
    if late_s > 0:
        membership.told()
        membership.exited(1, 0, 12.5 + late_s)
    assert ("rank 1 exited early (code 0); " in failure_in(plan, membership).reason) is is_named


@pytest.mark.parametrize(("status", "is_named"), [(None, True), (TERM, True), (0, True), (3 << 8, False)])
def test_rank_that_had_left_the_world_before_a_lost_connection_is_named(plan, status, is_named):
    write(plan, 0, "RuntimeError: Socket closed\n")
    membership = started()
    membership.exited(0, 1 << 8, 12.5)
    if status == 3 << 8:
        membership.exited(1, status, 13.0)
    membership.told()
    if status in (0, TERM):
        membership.exited(1, status, 20.0)
    failure = failure_in(plan, HostResult((Attempt(0, membership, left=frozenset({1})),), ()))
    assert ("rank 1 left the job early; " in failure.reason) is is_named


def test_hang_shows_the_ranks_that_held_the_others_up(plan):
    write(plan, 1, "last words\n")
    outcome = result({1: 0, **others(1)}, STUCK)
    outcome.last.lagging = (1,)
    failure = failure_in(plan, outcome)
    assert (failure.exit_code, failure.first_failure) == (124, None)
    assert [(worker.global_rank, worker.exit_code) for worker in failure.lagging] == [(1, 0)]
    shown = [f"  rank 1, log: {plan.workers[1].log_path} (pid 101)", "  | last words"]
    assert render_failure(failure).splitlines()[:2] == shown


def test_earlier_attempts_are_listed(plan):
    first, last = result({2: 9 << 8, **others(2)}).last, result({0: 7 << 8, **others(0)}).last
    failure = failure_in(plan, HostResult((first, last), ()))
    assert failure.exit_code == 7
    assert failure.attempts == [{"attempt": 0, "reason": "rank 2 failed first: exit code 9", "run_time_s": 2.5}]
    assert "  attempt 0 before, which ran 2.5 s: rank 2 failed first: exit code 9" in render_failure(failure)


def test_result_of_a_host_names_the_logs_here_and_hides_what_only_the_launcher_knows():
    told = replace(worker_of(3), excerpt=["token abcdef refused"])
    failure = at_home(replace(failure_of(3), first_failure=told, lagging=[worker_of(4)]), Path("/home/me/log_output"))
    hidden = hide_secrets(failure, ["abcdef"]).first_failure
    assert hidden is not None and hidden.excerpt == ["token ******** refused"]
    assert (hidden.log, failure.lagging[0].log) == tuple(f"/home/me/log_output/worker_{rank}.log" for rank in (3, 4))
