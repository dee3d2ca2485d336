"""When a failed job is started again. Pure: what happened in, how long to wait out."""

from __future__ import annotations

import os
from dataclasses import dataclass

from msrun import contract

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
HOPELESS_CODES = frozenset({contract.EXIT_DO_NOT_RESTART, 126, 127})
"""The worker said so itself; its program cannot be run; its program was not found."""


@dataclass(frozen=True)
class RestartPolicy:
    """Restarts the whole job a limited number of times, each after twice the wait of the one before."""

    max_restarts: int
    first_delay_s: float = FIRST_DELAY_S
    max_delay_s: float = MAX_DELAY_S

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
        return float(min(self.max_delay_s, self.first_delay_s * 2.0**restarts_done))
