"""When a failed job is started again. Pure: what happened in, how long to wait out."""

from __future__ import annotations

import os
from dataclasses import dataclass

from msrun import contract

FIRST_WAIT_S = 1.0
MAX_DELAY_S = 30.0
HOPELESS_CODES = frozenset({contract.EXIT_DO_NOT_RESTART, 126, 127})
"""The worker said so itself; its program cannot be run; its program was not found."""


@dataclass(frozen=True)
class RestartPolicy:
    """Restarts the whole job a limited number of times, at once, then after 1, 2, 4, ... seconds."""

    max_restarts: int

    def delay_s(self, restarts_done: int, wait_status: int | None) -> float | None:
        """Return how long to wait before the next start, or None when the job has ended for good.

        Args:
            restarts_done: how often the job was started again already.
            wait_status: how the first worker failed, as waitpid gives it; None when it had to be ended for a hang.
        """
        if restarts_done >= self.max_restarts:
            return None
        if wait_status is not None and os.waitstatus_to_exitcode(wait_status) in HOPELESS_CODES:
            return None
        return min(MAX_DELAY_S, FIRST_WAIT_S * 2.0 ** (restarts_done - 1)) if restarts_done else 0.0


def describe_delay(delay_s: float) -> str:
    """Return when a job starts again: "now" or "in 2 s"."""
    return f"in {delay_s:g} s" if delay_s else "now"
