"""The first log lines of a parallel network: what was decided."""

from __future__ import annotations

import logging

from msrun.runtime.parallel.plan import ParallelPlan

log = logging.getLogger("msrun.runtime")


def announce(plan: ParallelPlan, said: set[str]) -> None:
    """Say on rank 0 what was decided; visible also when the user has not configured logging.

    Args:
        said: what was said of the same network before, which is not said again.
    """
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    for say, text in [(log.info, plan.summary()), *((log.warning, note) for note in plan.notes)]:
        if text not in said:
            said.add(text)
            say(text)
