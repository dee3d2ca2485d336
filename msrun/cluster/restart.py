"""When a failed job is started again. Pure: what happened in, how long to wait out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msrun import contract

if TYPE_CHECKING:
    from msrun.planning.plan import LaunchPlan
    from msrun.planning.spec import LaunchSpec

FIRST_WAIT_S = 1.0
MAX_DELAY_S = 30.0
HOPELESS_CODES = frozenset({contract.EXIT_DO_NOT_RESTART, 126, 127})
"""The worker said so itself; its program cannot be run; its program was not found."""
UNBEGUN_CODES = frozenset({1, 2})
"""Python's own after an exception, a SyntaxError and a usage error: another start ends in the same way."""
BEGUN_S = 10.0
"""A worker that has run for so long has begun, also one that joins nothing and says nothing."""


@dataclass(frozen=True)
class RestartPolicy:
    """Restarts the whole job a limited number of times, at once, then after 1, 2, 4, ... seconds."""

    max_restarts: int
    restart_on: tuple[int, ...] = ()
    """Start again after these exit statuses alone, and always; empty = see `refuse`."""
    no_restart_on: tuple[int, ...] = ()
    """Never after these."""

    @classmethod
    def of(cls, asked: LaunchSpec | LaunchPlan) -> RestartPolicy:
        """Return what the user asked for."""
        return cls(asked.max_restarts, asked.restart_on, asked.no_restart_on)

    def delay_s(self, restarts_done: int, exit_code: int | None, *, has_begun: bool = True) -> float | None:
        """Return how long to wait before the next start, or None when the job has ended for good.

        Args:
            restarts_done: how often the job was started again already.
            exit_code: of the worker that failed first, 128 + signal; None when no worker failed.
            has_begun: as for `refuse`.
        """
        if restarts_done >= self.max_restarts or self.refuse(exit_code, has_begun=has_begun):
            return None
        return min(MAX_DELAY_S, FIRST_WAIT_S * 2.0 ** (restarts_done - 1)) if restarts_done else 0.0

    def explain(self, restarts_done: int, exit_code: int | None, *, has_begun: bool) -> str:
        """Return why a job that could start again does not, to be added to its failure; else an empty string."""
        why = self.refuse(exit_code, has_begun=has_begun) if restarts_done < self.max_restarts else ""
        return f"; not started again: {why}" if why else ""

    def refuse(self, exit_code: int | None, *, has_begun: bool) -> str:
        """Return why a failure is none to start again after; empty when it is one.

        Args:
            exit_code: as for `delay_s`.
            has_begun: in this attempt or an earlier one a rank has joined the world or reported progress, or the
                worker that failed had run for BEGUN_S.
        """
        if exit_code is None or exit_code in self.restart_on:
            return ""
        if exit_code in self.no_restart_on:
            return f"--no_restart_on names {exit_code}"
        if self.restart_on:
            return f"--restart_on does not name {exit_code}"
        if exit_code in HOPELESS_CODES:
            return f"exit code {exit_code} says that it would not help"
        if exit_code in UNBEGUN_CODES and not has_begun:
            return (
                "no rank had joined the others or reported progress, and the worker had not run for "
                f"{BEGUN_S:g} s; --restart_on {exit_code} starts it again all the same"
            )
        return ""


def describe_delay(delay_s: float) -> str:
    """Return when a job starts again: "now" or "in 2 s"."""
    return f"in {delay_s:g} s" if delay_s else "now"
