"""Timers of the event loop: each moment once, in order, replaceable."""

from __future__ import annotations

import time

from msrun.agent.timers import Timers


def test_actions_run_once_and_in_the_order_of_their_moments() -> None:
    timers, done = Timers(), []
    timers.after("late", -1.0, lambda: done.append("late"))
    timers.after("early", -2.0, lambda: done.append("early"))
    timers.after("future", 100.0, lambda: done.append("future"))
    timers.run_due()
    timers.run_due()
    assert done == ["early", "late"]
    assert timers.is_set("future")


def test_time_left_is_that_of_the_next_moment() -> None:
    timers = Timers()
    assert timers.time_left_s() is None
    timers.after("far", 100.0, lambda: None)
    timers.after("near", 50.0, lambda: None)
    left_s = timers.time_left_s()
    assert left_s is not None
    assert 49.0 < left_s <= 50.0
    timers.after("over", -1.0, lambda: None)
    assert timers.time_left_s() == 0.0


def test_replaced_and_cancelled_moments_never_come() -> None:
    timers, done = Timers(), []
    timers.after("name", -1.0, lambda: done.append("old"))
    timers.after("name", -1.0, lambda: done.append("new"))
    timers.after("gone", -1.0, lambda: done.append("gone"))
    timers.cancel("gone", "never set")
    timers.run_due()
    assert done == ["new"]


def test_action_can_cancel_what_is_due_with_it() -> None:
    timers, done = Timers(), []
    timers.after("first", -2.0, lambda: timers.cancel("second"))
    timers.after("second", -1.0, lambda: done.append("second"))
    timers.run_due()
    assert done == []


def test_regular_moment_comes_again_until_it_is_cancelled() -> None:
    timers, done = Timers(), []
    timers.every("tick", 0.001, lambda: done.append(time.monotonic()))
    end = time.monotonic() + 10
    while len(done) < 3 and time.monotonic() < end:
        timers.run_due()
    assert len(done) == 3
    timers.cancel("tick")
    assert timers.time_left_s() is None


def test_regular_action_can_end_itself() -> None:
    timers, done = Timers(), []

    def once() -> None:
        done.append(1)
        timers.cancel("tick")

    timers.every("tick", 0.0, once)
    timers.run_due()
    timers.run_due()
    assert done == [1]
