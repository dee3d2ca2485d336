"""Named moments in the future and what to do when they come, for an event loop; and a pause, in which none comes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable


class Timers:
    """At most one moment per name. Actions run in the loop's own thread, in the order of their moments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}
        self._paused_at: float | None = None

    def after(self, name: str, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` once after `delay_s` seconds; replaces what the name stood for."""
        self._due[name] = (self._clock() + delay_s, action)

    def every(self, name: str, interval_s: float, action: Callable[[], None]) -> None:
        """Call `action` after every `interval_s` seconds until the name is cancelled or replaced."""

        def again() -> None:
            self.after(name, interval_s, again)
            action()

        self.after(name, interval_s, again)

    def cancel(self, *names: str) -> None:
        for name in names:
            self._due.pop(name, None)

    def is_set(self, name: str) -> bool:
        return name in self._due

    def pause(self) -> None:
        """Let no moment come until `resume`."""
        self._paused_at = self._clock()

    def resume(self) -> None:
        """Go on; all moments come later by what the pause has lasted."""
        if self._paused_at is not None:
            lasted_s = self._clock() - self._paused_at
            self._due = {name: (moment + lasted_s, action) for name, (moment, action) in self._due.items()}
            self._paused_at = None

    def time_left_s(self) -> float | None:
        """Return the seconds until the next moment; None when there is none, or during a pause."""
        if self._paused_at is not None:
            return None
        moments = [moment for moment, _ in self._due.values()]
        return max(0.0, min(moments) - self._clock()) if moments else None

    def run_due(self) -> None:
        """Do what is due now; nothing is during a pause."""
        if self._paused_at is not None:
            return
        now = self._clock()
        for name, (moment, action) in sorted(self._due.items(), key=lambda item: item[1][0]):
            if moment <= now and self._due.get(name) == (moment, action):
                del self._due[name]
                action()


class Pause:
    """Ctrl-Z: stops the workers of one host with msrun, and continues them with it. Owned by the agent's event loop.
    What a pause lasts counts for no limit of msrun's. A worker's process group has no parent in its session, so the
    kernel keeps SIGTSTP from it: it gets SIGSTOP."""

    def __init__(
        self,
        ask: Callable[[str], None],
        timers: Timers,
        note_pause: Callable[[], None],
        *,
        stop_self: Callable[[], None] | None,
        forwarded: tuple[int, ...],
    ) -> None:
        """`ask`: asks the fork server for something, "pause" or "resume". `note_pause`: called when one is over.
        `stop_self`: stops this process until it is continued; None = it goes on, and is told of the end by SIGCONT.
        `forwarded`: signals that are for the workers."""
        self._ask, self._timers, self._note_pause = ask, timers, note_pause
        self._stop_self, self._forwarded = stop_self, forwarded
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
        if self._is_on:
            self._is_on = False
            self._timers.resume()
            self._note_pause()
