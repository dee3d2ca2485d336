"""The state machine of a job, by tables and by random lives of workers."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun import contract
from msrun.cluster.membership import Decision, Membership, RestartPolicy, WorkerState

EXIT_7 = 7 << 8


def running(count):
    membership = Membership(range(count))
    for rank in range(count):
        assert membership.started(rank, 100 + rank, float(rank)) is Decision.WAIT
    return membership


def test_bad_end_of_a_program_that_had_run_to_its_end_stops_nobody_and_fails_the_job_when_all_have_ended():
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


def test_job_is_not_over_before_everybody_was_started():
    membership = Membership([0, 1])
    membership.started(0, 100, 0.0)
    assert membership.exited(0, 0, 1.0) is Decision.WAIT
    assert not membership.is_over
    assert membership.count(WorkerState.PLANNED, WorkerState.DONE) == 2


@given(st.integers(1, 6), st.data())
def test_any_order_of_ends_keeps_the_laws(count, data):
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


def test_workers_that_will_not_be_started_any_more_count_as_stopped():
    membership = Membership(range(3))
    membership.started(0, 100, 0.0)
    membership.stop()
    assert membership.told([1, 2]) is Decision.WAIT
    assert membership.exited(0, signal.SIGTERM, 1.0) is Decision.FINISH
    assert membership.ranks_in(WorkerState.STOPPED) == [0, 1, 2]


def test_who_ends_before_it_is_told_has_ended_by_itself():
    membership = Membership(range(3))
    for rank in range(3):
        membership.started(rank, 100 + rank, 0.0)
    membership.exited(0, 256, 1.0)
    membership.exited(1, 0, 1.0)  # reported with the failure, in the order in which the kernel tells
    membership.told()
    membership.exited(2, 0, 1.1)
    assert [membership.members[rank].ended_itself for rank in range(3)] == [True, True, False]


EXIT_1 = 1


@pytest.mark.parametrize(
    ("max_restarts", "done", "exit_code", "delay_s"),
    [
        (0, 0, EXIT_1, None),
        (1, 0, EXIT_1, 0.0),
        (3, 1, EXIT_1, 1.0),
        (3, 0, None, 0.0),
        (3, 0, contract.EXIT_DO_NOT_RESTART, None),
        (3, 0, 127, None),
    ],
)
def test_delay_before_a_restart(max_restarts, done, exit_code, delay_s):
    assert RestartPolicy(max_restarts).delay_s(done, exit_code) == delay_s


def test_program_that_cannot_start_is_started_again_when_asked_for_alone():
    policy = RestartPolicy(3)
    assert "no rank had joined" in policy.refuse(2, has_begun=False)
    assert "no rank had joined" in policy.refuse(1, has_begun=False)
    assert not policy.refuse(1, has_begun=True)
    for status in (None, 7, 137):
        assert not policy.refuse(status, has_begun=False)
    assert not RestartPolicy(3, restart_on=(1,)).refuse(1, has_begun=False)
    assert policy.explain(3, 1, has_begun=False) == "", "it could not start again in any case"


def test_lists_of_exit_statuses_come_before_all_else():
    only = RestartPolicy(3, restart_on=(75, 93))
    assert [only.delay_s(0, status) for status in (75, 93, 7, 137, None)] == [0.0, 0.0, None, None, 0.0]
    never = RestartPolicy(3, no_restart_on=(7, 143))
    assert [never.delay_s(0, status) for status in (7, 143, 9, 137, None)] == [None, None, 0.0, 0.0, 0.0]
