"""When a failed job is started again. Pure: what happened in, how long to wait out."""

from __future__ import annotations

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

    def delay_s(self, restarts_done: int, exit_code: int | None) -> float | None:
        """Return how long to wait before the next start, or None when the job has ended for good.

        Args:
            restarts_done: how often the job was started again already.
            exit_code: of the worker that failed first; None when a signal ended it, or no worker failed.
        """
        if restarts_done >= self.max_restarts:
            return None
        if exit_code in HOPELESS_CODES:
            return None
        return min(MAX_DELAY_S, FIRST_WAIT_S * 2.0 ** (restarts_done - 1)) if restarts_done else 0.0


def describe_delay(delay_s: float) -> str:
    """Return when a job starts again: "now" or "in 2 s"."""
    return f"in {delay_s:g} s" if delay_s else "now"
