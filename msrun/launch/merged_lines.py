"""MergedLines: of the lines that several workers write, those that all of them write, once."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

WAIT_S = 0.5
"""How long a line waits for the same line of the others."""
MAX_WAITING = 1000
"""Lines of a rank; with more the first one waits no longer."""


class MergedLines:
    """Holds each rank's lines in their order until the others have written them, too, or have not in WAIT_S."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._waiting: dict[int, deque[tuple[bytes, float]]] = {rank: deque() for rank in ranks}

    def add(self, global_rank: int, lines: Collection[bytes], now: float) -> None:
        """Add lines that a rank has written; `now`: monotonic seconds."""
        self._waiting[global_rank] += [(line, now) for line in lines]

    def take(self, now: float, *, at_end: bool = False) -> list[tuple[int | None, bytes]]:
        """Return what is to be shown now: a rank and its line, or None and a line of all of them.

        Args:
            at_end: nothing more will come.
        """
        shown: list[tuple[int | None, bytes]] = []
        queues = self._waiting
        while True:
            heads = {rank: queue[0] for rank, queue in queues.items() if queue}
            lines = {line for line, _ in heads.values()}
            if len(heads) == len(queues) and len(lines) == 1:
                shown.append((None, lines.pop()))
                for queue in queues.values():
                    queue.popleft()
                continue
            ready = [rank for rank, head in heads.items() if at_end or self._is_late(rank, head, now)]
            if not ready:
                return shown
            # one that others have, too, further on, comes after what stands before it there
            rank = next((rank for rank in ready if not self._is_common(heads[rank][0])), ready[0])
            shown.append((rank, queues[rank].popleft()[0]))

    def _is_late(self, rank: int, head: tuple[bytes, float], now: float) -> bool:
        return now - head[1] >= WAIT_S or len(self._waiting[rank]) > MAX_WAITING

    def _is_common(self, line: bytes) -> bool:
        return all(any(line == other for other, _ in queue) for queue in self._waiting.values())
