"""How far the first rank here is, in one line for a terminal: step, share, speed, loss, time left."""

from __future__ import annotations

import math
from pathlib import Path

from msrun.agent.watch.progress_board import PROGRESS_BOARD, read_record
from msrun.launch.directory.worker_log import newest_loss, newest_step
from msrun.launch.status.status_text import describe_span
from msrun.planning.plan import LaunchPlan

BAR_CHARS = 20


class ProgressLine:
    """Reads the rank's record, or its log where the rank runs on another host or does not report."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._board = Path(plan.run_dir, PROGRESS_BOARD)
        self._rank = plan.workers[0].global_rank
        self._log = Path(plan.workers[0].log_path)
        self._first: tuple[int, float] | None = None
        """The first step that the log told, and when."""

    def text(self, now: float) -> str:
        """Return the line; empty as long as no step is known.

        Args:
            now: monotonic seconds.
        """
        told = read_record(self._board, self._rank)
        if told.steps:
            loss = f"{told.loss:.4g}" if math.isfinite(told.loss) else newest_loss(self._log)
            line = describe_progress(told.steps, told.total, told.steps_per_s(now), loss)
        else:
            step = newest_step(self._log)
            if step is None:
                return ""
            line = describe_progress(step, 0, self._speed(step, now), newest_loss(self._log))
        return f"rank {self._rank}: {line}" if self._rank else line

    def _speed(self, step: int, now: float) -> float | None:
        if self._first is None or step < self._first[0]:  # the first one, or the job was started again
            self._first = step, now
        first_step, first_at = self._first
        return (step - first_step) / (now - first_at) if step > first_step and now > first_at else None


def describe_progress(step: int, total: int, steps_per_s: float | None, loss: str) -> str:
    """Return e.g. "step 21/40 [##########----------] 52 %, 9.9 steps/s, loss 0.048, 1.9 s left".

    Args:
        total: number of the last step; 0 when it is not known.
        loss: empty when it is not known.
    """
    parts = [f"step {step}"]
    if total > 0:
        share = min(1.0, step / total)
        done = math.floor(share * BAR_CHARS)
        parts = [f"step {step}/{total} [{'#' * done}{'-' * (BAR_CHARS - done)}] {math.floor(100 * share)} %"]
    if steps_per_s:
        parts.append(f"{steps_per_s:.3g} steps/s")
    if loss:
        parts.append(f"loss {loss}")
    if steps_per_s and total > step:
        parts.append(f"{describe_span((total - step) / steps_per_s)} left")
    return ", ".join(parts)
