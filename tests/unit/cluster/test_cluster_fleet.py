"""What becomes of a job of several hosts: the first report counts, and nobody is left waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun import contract
from msrun.cluster.fleet import Fleet, Verdict
from msrun.cluster.restart import RestartPolicy


def fleet(count: int = 2, restarts: int = 0) -> Fleet:
    return Fleet(range(count), RestartPolicy(restarts))


def verdict(node_rank: int = 0, *, can_restart: bool = True, exit_code: int = 7) -> Verdict:
    return Verdict(node_rank, f"rank of node {node_rank} failed", exit_code, "worker", exit_code << 8, can_restart)


def kinds(orders: list[dict[str, Any]]) -> list[str]:
    return [order["type"] for order in orders]


def test_job_is_over_when_the_last_host_has_ended() -> None:
    job = fleet()
    assert job.ended(1, 0, can_continue=True) == []
    assert job.ended(1, 0, can_continue=True) == []
    assert job.ended(0, 0, can_continue=True) == [{"type": "over", "verdict": None}]
    assert job.is_over


def test_first_failure_stops_all_and_the_second_changes_nothing() -> None:
    job = fleet()
    (stop,) = job.failed(0, verdict(1))
    assert stop == {"type": "stop", "attempt": 0, "verdict": verdict(1).to_json()}
    assert job.failed(0, verdict(0)) == []
    assert job.ended(0, 0, can_continue=True) == []
    (over,) = job.ended(1, 0, can_continue=True)
    assert over == {"type": "over", "verdict": verdict(1).to_json()}


def test_ranks_of_other_hosts_that_had_ended_well_are_named_where_one_is_missed() -> None:
    lost = replace(verdict(0), lost_peer=True)
    job = fleet(3, restarts=1)
    for node, rank in ((0, 0), (2, 5), (1, 3), (1, 2)):
        job.done(node, 0, rank)
    job.done(2, 7, 6)  # words of another attempt
    (stop,) = job.failed(0, lost)
    who = "rank 2-3, 5 on node 1-2"
    assert stop["verdict"]["reason"] == f"{who} exited early (code 0); rank of node 0 failed"
    assert Verdict.from_json(stop["verdict"]) == job.verdict
    for node in range(3):
        job.ended(node, 0, can_continue=True)
    (stop,) = job.failed(1, lost)
    assert stop["verdict"]["reason"] == "rank of node 0 failed"


def test_failure_of_its_own_blames_nobody_who_has_ended_well() -> None:
    job = fleet()
    job.done(1, 0, 1)
    (stop,) = job.failed(0, verdict(0))
    assert stop["verdict"]["reason"] == "rank of node 0 failed"


def test_hosts_hear_once_of_a_rank_that_never_joined_and_its_failure_is_told_at_the_last_hosts_end() -> None:
    job = fleet(2, restarts=1)
    assert job.done(1, 0, 3, has_come=True) == []
    assert job.done(1, 0, 2, has_come=False) == [{"type": "absent", "attempt": 0, "ranks": [2]}]
    assert job.done(1, 0, 4, has_come=False) == []
    assert job.done(1, 5, 6, has_come=False) == [], "words of another attempt"
    assert job.ended(1, 0, can_continue=True, come=[3])[0]["verdict"]["exit_code"] == contract.EXIT_CLUSTER
    (over,) = job.ended(0, 0, can_continue=True, come=[0])
    assert over["type"] == "over", "starting again would not help"
    assert over["verdict"]["reason"].startswith("rank 2, 4 ended with exit code 0 without joining the world")


def test_ranks_that_all_join_nothing_end_well() -> None:
    job = fleet()
    for node in range(2):
        job.done(node, 0, node, has_come=False)
        orders = job.ended(node, 0, can_continue=True, come=[])
    assert orders == [{"type": "over", "verdict": None}]


def test_lost_host_stops_the_others_and_is_not_waited_for() -> None:
    job = fleet(3, restarts=5)
    (stop,) = job.lost(2, "lost node 2")
    assert (stop["verdict"]["reason"], stop["verdict"]["exit_code"]) == ("lost node 2", contract.EXIT_CLUSTER)
    assert job.lost(2, "again") == []
    job.ended(0, 0, can_continue=True)
    assert kinds(job.ended(1, 0, can_continue=True)) == ["over"]


def test_all_hosts_start_again_together() -> None:
    job = fleet(2, restarts=1)
    job.failed(0, verdict(0))
    job.ended(0, 0, can_continue=True)
    assert job.ended(1, 0, can_continue=True) == [{"type": "restart", "attempt": 1, "delay_s": 0.0}]
    assert job.failed(0, verdict(1)) == [] and job.ended(0, 0, can_continue=True) == []  # words of the last attempt
    assert job.ready(1, 1) == [] and job.ready(1, 1) == []
    assert job.ready(0, 1) == [{"type": "start", "attempt": 1}]
    job.failed(1, verdict(1))
    job.ended(0, 1, can_continue=True)
    assert kinds(job.ended(1, 1, can_continue=True)) == ["over"]


@pytest.mark.parametrize("why", ["cannot be repeated", "a host cannot go on", "a host is lost", "ended well"])
def test_job_does_not_start_again_when(why: str) -> None:
    job = fleet(2, restarts=3)
    if why != "ended well":
        job.failed(0, verdict(0, can_restart=why != "cannot be repeated"))
    job.ended(0, 0, can_continue=why != "a host cannot go on")
    last = job.lost(1, "gone") if why == "a host is lost" else job.ended(1, 0, can_continue=True)
    assert kinds(last)[-1] == "over"


def test_failure_while_hosts_wait_to_start_again_ends_the_job() -> None:
    job = fleet(2, restarts=3)
    job.failed(0, verdict(0))
    job.ended(0, 0, can_continue=True)
    job.ended(1, 0, can_continue=True)
    job.ready(0, 1)
    assert kinds(job.failed(1, verdict(1, can_restart=False, exit_code=130))) == ["stop"]
    job.ended(0, 1, can_continue=False)
    (over,) = job.ended(1, 1, can_continue=False)
    assert over["verdict"]["exit_code"] == 130


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"exit_code": 0},
        {"exit_code": 1000, "wait_status": "9", "worker": [], "node_rank": -7},
        {"reason": "x" * 10**5, "worker": {str(number): 0 for number in range(99)}},
    ],
)
def test_verdict_of_any_shape_is_one_that_a_host_can_end_with(value: object) -> None:
    read = Verdict.from_json(value)
    assert 0 < read.exit_code < 256 and len(read.reason) <= 4096 and read.wait_status is None and read.worker is None
    assert Verdict.from_json(read.to_json()) == read


def test_verdict_survives_the_wire() -> None:
    assert Verdict.from_json(verdict(3).to_json()) == verdict(3)


EVENTS = st.tuples(st.sampled_from(["failed", "ended", "lost", "ready"]), st.integers(0, 3), st.booleans())


@settings(max_examples=150)
@given(st.lists(EVENTS, max_size=40), st.integers(0, 2))
def test_any_life_of_hosts_keeps_the_laws(events: list[tuple[str, int, bool]], restarts: int) -> None:
    job = fleet(4, restarts)
    orders: list[dict[str, Any]] = []
    for kind, node, flag in events:
        if kind == "failed":
            orders += job.failed(job.attempt, verdict(node, can_restart=flag))
        elif kind == "ended":
            orders += job.ended(node, job.attempt, can_continue=flag)
        elif kind == "lost":
            orders += job.lost(node, f"lost {node}")
        else:
            orders += job.ready(node, job.attempt)
    for attempt in range(job.attempt, restarts + 1):  # then all hosts end what they do
        for node in range(4):
            orders += job.ended(node, attempt, can_continue=True)
    assert job.is_over
    told = kinds(orders)
    assert told.count("over") == 1 and told[-1] == "over"
    assert told.count("restart") <= restarts
    attempts = [order["attempt"] for order in orders if order["type"] == "stop"]
    assert attempts == sorted(set(attempts))
