"""The state machine of a job, by tables and by random lives of workers."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.membership import Decision, Membership, WorkerState

EXIT_7 = 7 << 8


def running(count: int) -> Membership:
    membership = Membership(range(count))
    for rank in range(count):
        assert membership.started(rank, 100 + rank, float(rank)) is Decision.WAIT
    return membership


def test_job_is_over_when_the_last_worker_has_ended_well() -> None:
    membership = running(2)
    assert membership.exited(1, 0, 5.0) is Decision.WAIT
    assert membership.exited(0, 0, 6.0) is Decision.FINISH
    assert membership.first_failure is None
    assert membership.ranks_in(WorkerState.DONE) == [0, 1]


def test_first_failure_wins_when_two_workers_die() -> None:
    membership = running(3)
    assert membership.exited(2, EXIT_7, 5.0) is Decision.STOP
    membership.told()
    assert membership.exited(0, signal.SIGTERM, 6.0) is Decision.WAIT
    assert membership.exited(1, EXIT_7, 7.0) is Decision.FINISH
    assert membership.first_failure is membership.members[2]
    assert [membership.members[rank].state for rank in range(3)] == [
        WorkerState.STOPPED,
        WorkerState.STOPPED,
        WorkerState.FAILED,
    ]


def test_bad_end_of_a_program_that_had_run_to_its_end_stops_nobody_and_fails_the_job_when_all_have_ended() -> None:
    membership = running(3)
    assert membership.exited(2, 5 << 8, 5.0, others_go_on=True) is Decision.WAIT
    assert membership.exited(1, 5 << 8, 6.0, others_go_on=True) is Decision.WAIT
    assert membership.first_failure is None and not membership.is_stopping
    assert membership.exited(0, 0, 7.0) is Decision.FINISH
    assert membership.first_failure is membership.members[2] and membership.is_stopping
    membership = running(2)
    membership.exited(0, 5 << 8, 5.0, others_go_on=True)
    assert membership.exited(1, EXIT_7, 6.0) is Decision.FINISH
    assert membership.first_failure is membership.members[1]


def test_failure_of_the_last_worker_finishes_at_once() -> None:
    membership = running(2)
    membership.exited(0, 0, 1.0)
    assert membership.exited(1, EXIT_7, 2.0) is Decision.FINISH


def test_worker_that_ends_well_while_stopped_is_done() -> None:
    membership = running(2)
    membership.exited(0, EXIT_7, 1.0)
    membership.exited(1, 0, 2.0)
    assert membership.members[1].state is WorkerState.DONE


def test_end_after_a_stop_by_msrun_is_no_failure() -> None:
    membership = running(2)
    assert membership.stop() is Decision.STOP
    membership.exited(0, signal.SIGKILL, 1.0)
    assert membership.exited(1, EXIT_7, 2.0) is Decision.FINISH
    assert membership.first_failure is None


def test_job_is_not_over_before_everybody_was_started() -> None:
    membership = Membership([0, 1])
    membership.started(0, 100, 0.0)
    assert membership.exited(0, 0, 1.0) is Decision.WAIT
    assert not membership.is_over
    assert membership.count(WorkerState.PLANNED, WorkerState.DONE) == 2


@given(st.integers(1, 6), st.data())
def test_any_order_of_ends_keeps_the_laws(count: int, data: st.DataObject) -> None:
    membership = running(count)
    order = data.draw(st.permutations(range(count)))
    statuses = data.draw(st.lists(st.sampled_from([0, EXIT_7, signal.SIGTERM]), min_size=count, max_size=count))
    stop_at = data.draw(st.none() | st.integers(0, count - 1))
    told_at = data.draw(st.none() | st.integers(0, count - 1))
    decisions, are_told = [], []
    for index, (rank, status) in enumerate(zip(order, statuses, strict=True)):
        if index == stop_at:
            membership.stop()
        if index == told_at and membership.is_stopping:
            membership.told()
        are_told.append(membership.are_told)
        decisions.append(membership.exited(rank, status, float(index)))

    assert decisions[-1] is Decision.FINISH
    assert Decision.FINISH not in decisions[:-1]
    assert decisions.count(Decision.STOP) <= 1
    bad = [index for index, status in enumerate(statuses) if status and (stop_at is None or index < stop_at)]
    first = membership.first_failure
    assert (first.global_rank if first else None) == (order[bad[0]] if bad else None)
    by_themselves = [index for index, status in enumerate(statuses) if status and not are_told[index]]
    assert membership.ranks_in(WorkerState.FAILED) == sorted(order[index] for index in by_themselves)
    assert membership.ranks_in(WorkerState.DONE) == sorted(order[i] for i, status in enumerate(statuses) if not status)
    assert membership.is_over
    assert len(membership.ranks_in(*WorkerState)) == count


def test_workers_that_will_not_be_started_any_more_count_as_stopped() -> None:
    membership = Membership(range(3))
    membership.started(0, 100, 0.0)
    membership.stop()
    assert membership.told([1, 2]) is Decision.WAIT
    assert membership.exited(0, signal.SIGTERM, 1.0) is Decision.FINISH
    assert membership.ranks_in(WorkerState.STOPPED) == [0, 1, 2]


def test_telling_is_the_end_when_nobody_is_left_to_be_started() -> None:
    membership = Membership(range(2))
    membership.started(0, 100, 0.0)
    assert membership.exited(0, EXIT_7, 1.0) is Decision.STOP
    assert membership.told([1]) is Decision.FINISH


def test_who_ends_before_it_is_told_has_ended_by_itself() -> None:
    membership = Membership(range(3))
    for rank in range(3):
        membership.started(rank, 100 + rank, 0.0)
    membership.exited(0, 256, 1.0)
    membership.exited(1, 0, 1.0)  # reported with the failure, in the order in which the kernel tells
    membership.told()
    membership.exited(2, 0, 1.1)
    assert [membership.members[rank].ended_itself for rank in range(3)] == [True, True, False]
