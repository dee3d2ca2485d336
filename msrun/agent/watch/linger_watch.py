"""Workers whose program has ended and whose process goes on: told once, and not waited for without an end."""

from __future__ import annotations

from collections.abc import Mapping

from msrun.agent.watch.progress_board import ProgressBoard
from msrun.agent.watch.usage import session_usage
from msrun.agent.watch.watchdog import size_of
from msrun.errors import HangTimeout
from msrun.planning.ranks import name_ranks

INTERVAL_S = 1.0
BUSY_SHARE = 0.001
"""Share of a core that is a sign of life: an upload needs little."""


class LingerWatch:
    """Looks at the progress board from time to time."""

    def __init__(self, board: ProgressBoard, logs: Mapping[int, str], limit_s: float) -> None:
        """`limit_s`: how long workers that linger may show no sign of life; 0 = no limit."""
        self._board = board
        self._logs = logs
        self._limit_s = limit_s
        self._told: set[int] = set()
        self._signs: dict[int, tuple[int, float, float]] = {}
        """Global rank -> size of its log, processor seconds, and when it last showed a sign of life."""
        self.since = 0.0
        """When the workers went on after a pause; what was before does not count."""

    def look(self, running: Mapping[int, int], now: float) -> tuple[dict[int, str], HangTimeout | None]:
        """Look once.

        Args:
            running: global rank -> pid of every worker that runs.
            now: monotonic seconds.

        Returns the ranks that have been found to linger since the last look, with what each waits for, and why the job
        is to be ended: all workers that run linger, and none has done anything for the limit. One whose program has
        failed ends itself, with its own status.
        """
        records = {rank: self._board.read(rank) for rank in running}
        lingering = {rank: record for rank, record in records.items() if record.ended_at}
        new = {rank: record.name for rank, record in lingering.items() if rank not in self._told}
        self._told.update(new)
        failed = any(record.ended_at < 0 for record in lingering.values())
        if not self._limit_s or failed or not lingering or len(lingering) < len(running):
            return new, None
        used = session_usage(running.values())
        for rank, record in lingering.items():
            size, used_s = size_of(self._logs[rank]), used[running[rank]].cpu_s
            old_size, old_s, at = self._signs.get(rank, (-1, 0.0, record.ended_at))
            if size != old_size or used_s - old_s > BUSY_SHARE * (now - at):
                self._signs[rank] = (size, used_s, now if old_size >= 0 else at)
        idle_s = now - max(self.since, *(at for rank, (_, _, at) in self._signs.items() if rank in lingering))
        if idle_s < self._limit_s:
            return new, None
        rank, record = next(iter(lingering.items()))
        others = sorted(lingering.keys() - {rank})
        more = f" (so {'does' if len(others) == 1 else 'do'} {name_ranks(others)})" if others else ""
        return new, HangTimeout(
            f"rank {rank} has ended its program and waits for {record.name}{more}, without a sign of life for "
            f"{idle_s:.0f} s: end threads and atexit functions, or give more than --exit_time_out {self._limit_s:g}"
        )
