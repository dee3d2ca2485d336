"""Named moments in the future and what to do when they come, for an event loop."""

from __future__ import annotations

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

    @property
    def are_paused(self) -> bool:
        return self._paused_at is not None

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
