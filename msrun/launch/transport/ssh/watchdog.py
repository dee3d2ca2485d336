"""Watchdog: ends what a thread waits for when its time is up, for paramiko may wait for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from msrun.cluster.own_thread import OwnThread


class Guard:
    """What is to be ended in time."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.seconds = max(0.0, deadline - time.monotonic())
        """How much time there was."""
        self.has_fired = False
        self.fault: BaseException | None = None
        """What ended it in place of the time: a fault of msrun itself, raised where the guard is left."""
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None

    def watch(self, end: Callable[[], None]) -> None:
        """Say what ends the wait; in place of what was said before. When it is late already, it is ended now."""
        with self._lock:
            self._end = end
            is_late = self.has_fired
        if is_late:
            end()

    def fire(self) -> None:
        """End it."""
        with self._lock:
            self.has_fired = True
            end = self._end
        if end:
            end()


class Watchdog:
    """One thread that looks after the guards of all connections while they are being made."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._changed = threading.Condition()
        self._guards: set[Guard] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether everything is to end."""
        return self._is_closed

    @contextlib.contextmanager
    def guard(self, deadline: float) -> Iterator[Guard]:
        """Look after a piece of work until it is left.

        Args:
            deadline: of `time.monotonic`.
        """
        guard = Guard(deadline)
        with self._changed:
            self._guards.add(guard)
            if self._is_closed:
                guard.fire()
            elif self._thread is None:
                self._thread = OwnThread("ssh watchdog", self._run, self._tell_fault, goes_on=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield guard
        finally:
            with self._changed:
                self._guards.discard(guard)
            if guard.fault is not None:
                raise guard.fault

    def pause(self, seconds: float, deadline: float) -> bool:
        """Wait; return whether there is time left and `close` was not called."""
        end = min(time.monotonic() + seconds, deadline)
        with self._changed:
            while not self._is_closed and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
        return not self._is_closed and end < deadline

    def close(self) -> None:
        """End all work that is looked after, and the thread."""
        with self._changed:
            self._is_closed = True
            guards = list(self._guards)
            self._changed.notify_all()
        for guard in guards:
            guard.fire()
        if self._thread is not None:
            self._thread.join()

    def _tell_fault(self, error: BaseException) -> None:
        """Let those learn of it whose work is looked after."""
        with self._changed:
            guards = list(self._guards)
        for guard in guards:
            guard.fault = error
            with contextlib.suppress(Exception):  # what has failed just now
                guard.fire()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = time.monotonic()
                late = [guard for guard in self._guards if guard.deadline <= now and not guard.has_fired]
                if not late:
                    waiting = [guard.deadline for guard in self._guards if not guard.has_fired]
                    self._changed.wait(min(waiting) - now if waiting else None)
                    continue
            for guard in late:
                guard.fire()
