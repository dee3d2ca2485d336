"""What becomes of a job of several hosts: the first failure counts, and nobody is left waiting."""

import random
from dataclasses import replace

import pytest
from failure_reports import failure_of, reason_of, worker_of
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.cluster.coordinator import ORDERS, REPORTS, Coordinator
from msrun.cluster.failure import FailureReport, fault_of_job, merge_failures, read_failure, read_report
from msrun.cluster.membership import RestartPolicy
from msrun.planning.hosts import HostEntry, HostPool
from msrun.planning.record import encode_record


def coordinator(count=2, restarts=0, first_attempt=0):
    """Return that of hosts with ten ranks each."""
    ranks = {node: tuple(range(10 * node, 10 * node + 10)) for node in range(count)}
    return Coordinator("JOB", ranks, RestartPolicy(restarts, first_attempt=first_attempt))


def report(node_rank=0, *, can_restart=True, exit_code=7, lost_peer=False):
    failure = failure_of(10 * node_rank, exit_code)
    return FailureReport(failure, node_rank, can_restart=can_restart, lost_peer=lost_peer)


def failed(job, attempt, told):
    return job.hear(told.node_rank, {"type": "failed", "attempt": attempt, "report": encode_record(told)})


def done(job, node, attempt, rank, **more):
    return job.hear(node, {"type": "done", "attempt": attempt, "rank": rank, **more})


def ended(job, node, attempt, **more):
    more["report"] = encode_record(more["report"]) if more.get("report") else None
    return job.hear(node, {"type": "ended", "attempt": attempt, "can_continue": True, **more})


def ready(job, node, attempt):
    return job.hear(node, {"type": "ready", "attempt": attempt})


def kinds(orders):
    return [order["type"] for order in orders]


def test_first_failure_stops_all_and_the_second_changes_nothing():
    job = coordinator()
    (stop,) = failed(job, 0, report(1))
    assert stop == {"type": "stop", "attempt": 0, "report": encode_record(report(1)), "goes_on": False}
    assert failed(job, 0, report(0)) == []
    assert ended(job, 0, 0) == []
    (over,) = ended(job, 1, 0)
    assert over == {"type": "over", "report": encode_record(report(1)), "goes_on": False}


def test_ranks_of_other_hosts_that_had_ended_well_are_named_where_one_is_missed():
    lost = report(0, lost_peer=True)
    job = coordinator(3, restarts=1)
    for node, rank in ((0, 0), (2, 25), (1, 13), (1, 12)):
        done(job, node, 0, rank)
    done(job, 2, 7, 26)  # words of another attempt
    (stop,) = failed(job, 0, lost)
    who = "ranks 12-13, 25 on node 1-2"
    assert reason_of(stop) == f"{who} exited early (code 0); rank 0 failed"
    assert read_report(stop["report"]) == job.report
    for node in range(3):
        ended(job, node, 0)
    (stop,) = failed(job, 1, lost)
    assert reason_of(stop) == "rank 0 failed"


@pytest.mark.parametrize(("restarts", "can_restart", "goes_on"), [(1, True, True), (1, False, False), (0, True, False)])
def test_hosts_know_at_once_whether_the_job_will_start_again(restarts, can_restart, goes_on):
    job = coordinator(2, restarts)
    (stop,) = failed(job, 0, replace(report(1, can_restart=can_restart), is_unfit=goes_on))
    assert stop["goes_on"] is goes_on and job.losses == ({1: "rank 10 failed"} if goes_on else {})


@pytest.mark.parametrize(("node_rank", "reason"), [(0, "rank 15 on node 1 exited early (code 0); {}"), (1, "{}")])
def test_failure_is_told_as_its_host_knows_it_in_the_end(node_rank, reason):
    """From logs that are whole; ranks that have finished since are no cause of it."""
    job = coordinator()
    if not node_rank:
        done(job, 1, 0, 15)
    failed(job, 0, report(node_rank, lost_peer=True))
    done(job, 1 - node_rank, 0, 16 - 10 * node_rank)
    late = FailureReport(replace(failure_of(10 * node_rank), reason="its last words"), can_restart=True)
    other = FailureReport(replace(failure_of(10), reason="another"), can_restart=True)
    ended(job, 1 - node_rank, 0, report=other)
    (over,) = ended(job, node_rank, 0, report=late)
    assert reason_of(over) == reason.format("its last words")
    assert over["report"]["node_rank"] == node_rank


def test_hosts_hear_once_of_a_rank_that_never_joined_and_its_failure_is_told_at_the_last_hosts_end():
    job = coordinator(2, restarts=1)
    assert done(job, 1, 0, 13) == []
    assert done(job, 1, 0, 12, has_come=False) == [{"type": "absent", "attempt": 0, "ranks": [12]}]
    assert done(job, 1, 0, 14, has_come=False) == []
    assert done(job, 1, 5, 16, has_come=False) == [], "words of another attempt"
    assert ended(job, 1, 0, come=[13])[0]["report"]["failure"]["exit_code"] == 3
    (over,) = ended(job, 0, 0, come=[0])
    assert over["type"] == "over", "starting again would not help"
    assert reason_of(over).startswith("ranks 12, 14 ended with exit code 0 without joining the world")


@pytest.mark.parametrize(
    ("lost_peer", "has_ended", "is_cause"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_lost_host_is_why_a_rank_has_missed_another_just_before(lost_peer, has_ended, is_cause):
    job = coordinator(3, restarts=5)
    failure = replace(failure_of(0), reason="rank 0 failed first: exit code 7")
    failed(job, 0, FailureReport(failure, 0, can_restart=True, lost_peer=lost_peer))
    if has_ended:
        ended(job, 2, 0)
    job.lost(2, "lost node 2")
    ended(job, 0, 0)
    (over,) = ended(job, 1, 0)
    told = over["report"]["failure"]
    if is_cause:
        assert (told["reason"], told["exit_code"]) == ("lost node 2; rank 0 then failed: exit code 7", 3)
    else:
        assert (told["reason"], told["exit_code"]) == ("rank 0 failed first: exit code 7", 7)


@pytest.mark.parametrize("first", [0, 2], ids=["the first hosts", "other hosts"])
def test_all_hosts_start_again_together(first):
    job = coordinator(2, restarts=1, first_attempt=first)
    failed(job, first, report(0))
    ended(job, 0, first)
    again = first + 1
    assert ended(job, 1, first) == [
        {"type": "restart", "attempt": again, "delay_s": 0.0, "reason": "rank 0 failed", "ranks": [0]}
    ]
    assert failed(job, first, report(1)) == [] and ended(job, 0, first) == []  # words of the last attempt
    assert ready(job, 1, again) == [] and ready(job, 1, again) == []
    assert ready(job, 0, again) == [{"type": "start", "attempt": again}]
    failed(job, again, report(1))
    ended(job, 0, again)
    assert kinds(ended(job, 1, again)) == ["over"]


@pytest.mark.parametrize("why", ["cannot be repeated", "a host cannot go on", "a host is lost", "ended well"])
def test_job_does_not_start_again_when(why):
    job = coordinator(2, restarts=3)
    if why != "ended well":
        failed(job, 0, report(0, can_restart=why != "cannot be repeated"))
    ended(job, 0, 0, can_continue=why != "a host cannot go on")
    last = job.lost(1, "gone") if why == "a host is lost" else ended(job, 1, 0)
    assert kinds(last)[-1] == "over"


GOOD = encode_record(report(3))


def test_report_is_cut_to_size_and_is_that_of_the_host_which_tells_it():
    job = coordinator()
    long = {**GOOD, "failure": {**GOOD["failure"], "reason": "x" * 10**5}}
    job.hear(1, {"type": "failed", "attempt": 0, "report": long})
    assert job.report is not None and job.report.node_rank == 1 and len(job.report.failure.reason) == 4096
    for code, expected in ((0, 3), (1, 1), (255, 255), (256, 3)):
        assert read_failure({**GOOD["failure"], "exit_code": code}).exit_code == expected
    failure = {**GOOD["failure"], "others": [{"global_rank": "0"}]}
    with pytest.raises(ValueError, match="names a worker without a rank, or too many"):
        job.hear(1, {"type": "failed", "attempt": 0, "report": {**GOOD, "failure": failure}})


EVENTS = st.tuples(st.sampled_from(["lost", *sorted(REPORTS)]), st.integers(0, 3), st.booleans())


@settings(max_examples=150)
@given(st.lists(EVENTS, max_size=40), st.integers(0, 2))
def test_any_life_of_hosts_keeps_the_laws(events, restarts):
    job = coordinator(4, restarts)
    orders = []
    for kind, node, flag in events:
        if kind == "lost":
            orders += job.lost(node, f"lost {node}")
            continue
        more = {"report": encode_record(report(node, can_restart=flag)), "rank": 10 * node, "can_continue": flag}
        orders += job.hear(node, {"type": kind, "attempt": job.attempt, "has_come": flag, **more})
    for attempt in range(job.attempt, restarts + 1):  # then all hosts end what they do
        for node in range(4):
            orders += ended(job, node, attempt)
    assert job.is_over
    told = kinds(orders)
    assert set(told) <= ORDERS
    assert told.count("over") == 1 and told[-1] == "over"
    assert told.count("restart") <= restarts
    attempts = [order["attempt"] for order in orders if order["type"] == "stop"]
    assert attempts == sorted(set(attempts))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_life_with_losses_goes_on_while_hosts_and_restarts_are_left(seed):
    """Hosts fail, leave and are lost at any moment; the model counts hosts and restarts, and knows nothing else."""
    rng = random.Random(seed)
    entries = [HostEntry(f"h{number}", 1, (0,)) for number in range(rng.randint(1, 5))]
    size, restarts = rng.randint(1, len(entries)), rng.randint(0, 2)
    pool = HostPool(entries[:size], entries[size:], rng.randint(0, size))
    ranks = {node: (node,) for node in range(size)}
    job = Coordinator("JOB", ranks, RestartPolicy(restarts), pool=pool)
    left, can_continue = set(ranks), True
    lost = set()
    leaves = set()
    while not job.is_over:
        node, event = rng.choice(sorted(left)), rng.choice(("end", "end", "fail", "lose", "leave"))
        if event == "fail":
            job.hear(node, {"type": "failed", "attempt": job.attempt, "report": encode_record(report(0))})
            can_continue = can_continue and rng.random() < 0.8
        elif event == "leave":
            by_signal = replace(report(0, can_restart=False), signum=15)
            job.hear(node, {"type": "failed", "attempt": job.attempt, "report": encode_record(by_signal)})
            lost.add(node)
            leaves.add(node)
        elif event == "lose":
            orders = job.lost(node, f"h{node} is lost")
            lost.add(node)
            left.discard(node)
        if event in ("end", "leave") and not job.is_over and node in left:
            said = {"type": "ended", "attempt": job.attempt, "can_continue": can_continue, "come": [], "report": None}
            orders = job.hear(node, said)
            left.discard(node)
            if kinds(orders)[-1:] == ["restart"]:
                assert not lost, "no host has gone"
                left, can_continue = set(ranks), True
                for other in ranks:
                    ready(job, other, job.attempt)
    may = bool(lost) and job.begun < restarts and pool.min_hosts > 0
    enough = len(entries) - len(leaves) >= pool.min_hosts
    assert job.goes_on == (may and enough), (lost, leaves, restarts, job.begun)
    assert set(job.losses) == lost and job.leaving == leaves
    if job.goes_on:
        assert not {entries[node] for node in leaves} & set(pool.chosen) and len(pool.chosen) >= pool.min_hosts


FIRST = failure_of(3)


def other(rank):
    return {"global_rank": rank, "state": "stopped by msrun", "doing": ""}


def stopped(*ranks, attempts=0):
    """Return what a host has seen whose workers were stopped because of another's."""
    earlier = [{"attempt": number, "reason": "x"} for number in range(attempts)]
    return replace(fault_of_job("JOB", FIRST.reason, 7), others=[other(rank) for rank in ranks], attempts=earlier)


def test_others_of_all_hosts_are_told_of_once_and_in_their_order():
    merged = merge_failures(FIRST, [stopped(4, 5, attempts=1), replace(FIRST, others=[other(2)]), stopped(0, 1)])
    assert merged.first_failure == FIRST.first_failure and merged.reason == FIRST.reason
    assert [entry["global_rank"] for entry in merged.others] == [0, 1, 2, 4, 5]
    assert merged.attempts == [{"attempt": 0, "reason": "x"}]


def test_worker_that_failed_first_on_its_host_alone_is_one_of_the_others():
    merged = merge_failures(FIRST, [FIRST, failure_of(6, 9)])
    assert merged.others == [{"global_rank": 6, "state": "failed (exit code 9)", "doing": ""}]
    killed = replace(worker_of(6), exit_code=None, signal="SIGKILL")
    merged = merge_failures(FIRST, [replace(stopped(), lagging=[killed])])
    assert merged.others[0]["state"] == "failed (signal SIGKILL)"


def test_ranks_that_were_waited_for_are_not_among_the_others():
    hang = replace(fault_of_job("JOB", "stuck", 124), lagging=[worker_of(3)])
    merged = merge_failures(hang, [stopped(2, 3), stopped(0)])
    assert [worker.global_rank for worker in merged.lagging] == [3]
    assert [entry["global_rank"] for entry in merged.others] == [0, 2]


def test_job_that_keeps_going_fails_by_its_first_failure_when_all_have_ended():
    job = Coordinator("JOB", {0: (0,), 1: (10,)}, RestartPolicy(1, keep_going=True))
    late = replace(report(1), failure=replace(failure_of(10), reason="its last words"))
    for attempt, kind in enumerate(("restart", "over")):
        assert failed(job, attempt, report(1)) == failed(job, attempt, report(0)) == []
        assert ended(job, 0, attempt, report=report(0)) == []
        assert kinds(orders := ended(job, 1, attempt, report=late)) == [kind]
    assert orders == [{"type": "over", "report": encode_record(late), "goes_on": False}]


def test_ranks_that_all_join_nothing_end_well():
    job = coordinator()
    for node in range(2):
        done(job, node, 0, 10 * node, has_come=False)
        orders = ended(job, node, 0, come=[])
    assert orders == [{"type": "over", "report": None, "goes_on": False}]
