"""The watchdog: finds out that a job makes no progress any more, and which ranks hold it up.

Progress of a worker is a longer log, a new step or collective on the progress board, or processor time of its session.
Processor time does not count while the worker waits in a collective (some libraries spin there), nor, once its first
step is done, while another has been waiting in one for the whole limit: a rank that computes for ever is as stuck as
one that sleeps. The first step is left alone: there networks are captured, and some ranks are sooner ready.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrun.agent.processes.process_control import session_usage
from msrun.agent.watch.progress_board import Progress, ProgressBoard
from msrun.agent.watch.stacks import kernel_state
from msrun.planning.ranks import name_ranks

BUSY_SHARE = 0.05  # share of a core that counts as work; the threads of an idle process group use less
LOOKS_PER_LIMIT = 10
MAX_INTERVAL_S = 5.0


@dataclass
class _Watch:
    """What was seen of one worker, and when it last got on."""

    log_bytes: int
    position: tuple[int, int, int]
    cpu_s: float
    alive_at: float  # last progress of any kind
    told_at: float  # last progress that it told itself: log, step or collective


@dataclass(frozen=True)
class Hang:
    """A job without progress."""

    silent_s: float
    lagging: tuple[int, ...]  # ranks that the others wait for; all running ones when that cannot be known
    doing: Mapping[int, str]  # what every running rank is doing, in words

    def describe(self) -> str:
        """Return one line for the error report."""
        parts = [f"no progress for {self.silent_s:.0f} s"]
        waiting = [rank for rank in self.doing if rank not in self.lagging]
        name = "behind" if waiting else "running"
        words = {self.doing[rank] for rank in self.lagging}
        parts.append(f"{name}: {name_ranks(self.lagging)}{' (' + words.pop() + ')' if len(words) == 1 else ''}")
        if waiting:
            parts.append(f"{name_ranks(waiting)} ({self.doing[waiting[0]]})")
        return "; ".join(parts)


class Watchdog:
    """Looks at all running workers of a host from time to time. Owned by the agent's event loop."""

    def __init__(self, limit_s: float, board: ProgressBoard, logs: Mapping[int, Sequence[str]]) -> None:
        self.interval_s = min(limit_s / LOOKS_PER_LIMIT, MAX_INTERVAL_S)  # how often `look` wants to be called
        self._limit_s = limit_s
        self._board = board
        self._logs = logs
        self._watches: dict[int, _Watch] = {}
        self._last_look: float | None = None

    def forget(self) -> None:
        """Forget what was seen: nobody could make progress meanwhile."""
        self._watches.clear()

    def look(self, running: Mapping[int, int], now: float) -> Hang | None:
        """Look once. `running`: global rank -> pid of every worker that runs. `now`: monotonic seconds."""
        used = session_usage(running.values())
        elapsed_s = now - self._last_look if self._last_look is not None else 0.0
        if elapsed_s > 3 * self.interval_s + 1.0:
            self.forget()  # the machine or msrun itself was asleep
        self._last_look = now
        records = {rank: self._board.read(rank) for rank in running}
        for rank, pid in running.items():
            self._compare(rank, records[rank], used[pid].cpu_s, elapsed_s, now)
        if not running or not self._is_hung(records, now):
            return None
        silent_s = now - max(self._watches[rank].told_at for rank in running)
        return Hang(silent_s, find_lagging(records, running), describe_all(records, running, now))

    def _compare(self, rank: int, record: Progress, cpu_s: float, elapsed_s: float, now: float) -> None:
        size = sum(map(size_of, self._logs[rank]))
        position = (record.phase, record.steps, record.collectives)
        watch = self._watches.get(rank)
        if watch is None:
            self._watches[rank] = _Watch(size, position, cpu_s, now, now)
            return
        if size != watch.log_bytes or position != watch.position:
            watch.told_at = watch.alive_at = now
        elif not record.is_waiting and elapsed_s > 0 and (cpu_s - watch.cpu_s) / elapsed_s >= BUSY_SHARE:
            watch.alive_at = now
        watch.log_bytes, watch.position, watch.cpu_s = size, position, cpu_s

    def _is_hung(self, records: Mapping[int, Progress], now: float) -> bool:
        watches = [self._watches[rank] for rank in records]
        if any(now - watch.told_at < self._limit_s for watch in watches):
            return False
        if all(now - watch.alive_at >= self._limit_s for watch in watches):
            return True
        if not any(record.is_waiting and now - record.waiting_since >= self._limit_s for record in records.values()):
            return False
        return all(
            record.is_waiting or record.is_past_first_step or now - self._watches[rank].alive_at >= self._limit_s
            for rank, record in records.items()
        )


def find_lagging(records: Mapping[int, Progress], running: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks that the others wait for: stopped ones, else those in no collective, else the ones behind."""
    stopped = [rank for rank, pid in running.items() if kernel_state(pid).startswith("stopped")]
    if stopped:
        return tuple(sorted(stopped))
    away = [rank for rank, record in records.items() if not record.is_waiting]
    if away and len(away) < len(records):
        return tuple(sorted(away))
    places = {rank: (record.steps, record.collectives) for rank, record in records.items()}
    last = min(places.values(), default=(0, 0))
    return tuple(sorted(rank for rank, place in places.items() if place == last))


def describe_all(records: Mapping[int, Progress], running: Mapping[int, int], now: float) -> dict[int, str]:
    """Return what every running rank is doing: by its own record, else by the kernel."""
    words = {}
    for rank, pid in running.items():
        state = kernel_state(pid)
        told = records[rank].describe(now)
        words[rank] = f"{told}, {state}" if told and state.startswith("stopped") else told or state
    return dict(sorted(words.items()))


def size_of(path: str) -> int:
    """Return the bytes in a log; 0 when there is none."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - half the cost of Path.stat, many times a second
    except OSError:
        return 0
