"""When a job starts again, and when not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun import contract
from msrun.cluster.membership import MAX_DELAY_S, RestartPolicy

EXIT_1 = 1


@pytest.mark.parametrize(
    ("max_restarts", "done", "exit_code", "delay_s"),
    [
        (0, 0, EXIT_1, None),
        (1, 0, EXIT_1, 0.0),
        (1, 1, EXIT_1, None),
        (3, 1, EXIT_1, 1.0),
        (3, 2, EXIT_1, 2.0),
        (3, 0, None, 0.0),
        (3, 0, contract.EXIT_DO_NOT_RESTART, None),
        (3, 0, 127, None),
        (3, 0, 126, None),
    ],
)
def test_delay_before_a_restart(max_restarts: int, done: int, exit_code: int | None, delay_s: float | None) -> None:
    assert RestartPolicy(max_restarts).delay_s(done, exit_code) == delay_s


def test_program_that_cannot_start_is_started_again_when_asked_for_alone() -> None:
    policy = RestartPolicy(3)
    assert "no rank had joined" in policy.refuse(2, has_begun=False)
    assert "no rank had joined" in policy.refuse(1, has_begun=False)
    assert not policy.refuse(1, has_begun=True)
    for status in (None, 7, 137):
        assert not policy.refuse(status, has_begun=False)
    assert not RestartPolicy(3, restart_on=(1,)).refuse(1, has_begun=False)
    assert policy.explain(3, 1, has_begun=False) == "", "it could not start again in any case"


def test_lists_of_exit_statuses_come_before_all_else() -> None:
    only = RestartPolicy(3, restart_on=(75, 93))
    assert [only.delay_s(0, status) for status in (75, 93, 7, 137, None)] == [0.0, 0.0, None, None, 0.0]
    never = RestartPolicy(3, no_restart_on=(7, 143))
    assert [never.delay_s(0, status) for status in (7, 143, 9, 137, None)] == [None, None, 0.0, 0.0, 0.0]


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_delay_never_shrinks_and_is_bounded(max_restarts: int, done: int) -> None:
    policy = RestartPolicy(max_restarts)
    delay_s = policy.delay_s(done, EXIT_1)
    assert (delay_s is None) == (done >= max_restarts)
    if delay_s is not None:
        assert 0 <= delay_s <= MAX_DELAY_S
        before_s = policy.delay_s(done - 1, EXIT_1) if done else 0.0
        assert before_s is not None
        assert delay_s >= before_s
