"""Signals become bytes that a selector waits for, and everything is put back."""

from __future__ import annotations

import os
import select
import signal

from msrun.agent.signals import SignalPipe


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


def test_hangup_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalPipe() as pipe:
            os.kill(os.getpid(), signal.SIGHUP)
            assert pipe.read() == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_to_pass_on_are_read_too_and_others_are_not_touched() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with SignalPipe((signal.SIGUSR1,)) as pipe:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert select.select([pipe], [], [], 10)[0]
        assert pipe.read() == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR2) == before


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
