"""Ctrl-Z: the workers are stopped with msrun, and continue with it. What a pause lasts counts for no limit of msrun's.

A worker's process group has no parent in its session, so the kernel keeps SIGTSTP from it: it gets SIGSTOP.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from msrun.agent.timers import Timers
from msrun.agent.watch.job_watch import JobWatch


def stop_this_process() -> None:
    """Stop as Ctrl-Z wants; returns when somebody continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Pause:
    """Stops and continues the workers of one host. Owned by the agent's event loop."""

    def __init__(
        self,
        ask: Callable[[str], None],
        timers: Timers,
        watch: JobWatch,
        *,
        stop_self: Callable[[], None] | None,
        forwarded: tuple[int, ...],
    ) -> None:
        """`ask`: asks the fork server for something, "pause" or "resume". `stop_self`: stops this process until it is
        continued; None = it goes on, and is told of the end by SIGCONT. `forwarded`: signals that are for the workers.
        """
        self._ask = ask
        self._timers = timers
        self._watch = watch
        self._stop_self = stop_self
        self._forwarded = forwarded
        self._is_on = False

    def heed(self, signum: int) -> bool:
        """Stop on SIGTSTP, continue on SIGCONT; False when a signal is for somebody else."""
        if signum == signal.SIGTSTP:
            self._begin()
            return True
        if signum == signal.SIGCONT:
            was_on = self._is_on
            self._continue()
            return was_on or signum not in self._forwarded
        return False

    def _begin(self) -> None:
        if not self._is_on:
            self._is_on = True
            self._ask("pause")
            self._timers.pause()
        if self._stop_self is not None:
            self._stop_self()
            self._continue()

    def _continue(self) -> None:
        if self._is_on:
            self._ask("resume")
            self.end()

    def end(self) -> None:
        """The workers run again, or are told to end."""
        if self._is_on:
            self._is_on = False
            self._timers.resume()
            self._watch.note_pause()
