"""What wakes the event loop: timers, each moment once and in order, and signals, which become bytes."""

from __future__ import annotations

import os
import select
import signal
import time

from msrun.agent.signals import SignalPipe
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


def test_signals_are_read_in_order_and_handlers_come_back() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with SignalPipe() as pipe:
        assert pipe.read() == []
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), signum)
            assert select.select([pipe], [], [], 10)[0]
            assert pipe.read() == [signum]
    after = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert before == after


def test_signals_are_ignored_afterwards_where_that_is_asked_for() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with SignalPipe(ignore_afterwards=True):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_DFL if signum != signal.SIGINT else signal.default_int_handler)
        signal.signal(signal.SIGTERM, before)
