"""TaskThreads: a few threads for what has to wait: a login, the end of a process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from msrun.cluster.own_thread import OwnThread, print_fault
from msrun.errors import ClusterError


class TaskThreads:
    """Runs tasks in the background, so many at a time. A thread begins when there is a task, and ends when none is."""

    def __init__(self, limit: int, name: str, on_fault: Callable[[BaseException], None] = print_fault) -> None:
        """`on_fault`: told what an `on_error` raises."""
        self._limit = limit
        self._on_fault = on_fault
        self._name = name
        self._tasks: deque[tuple[Callable[[], None], Callable[[Exception], None]]] = deque()
        self._changed = threading.Condition()
        self._count = 0

    def run(self, task: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        """Have a task done.

        Args:
            on_error: gets what it raises, or a ClusterError when no thread can be started here.
        """
        with self._changed:
            self._tasks.append((task, on_error))
            if self._count == self._limit:
                return
            try:
                OwnThread(self._name, self._work, self._on_fault, goes_on=True).start()
                self._count += 1
                return
            except RuntimeError as error:
                if self._count:
                    return
                self._tasks.pop()
                fault = no_thread(error)
        on_error(fault)

    def join(self, seconds: float) -> bool:
        """Wait until nothing is left to do; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, max(0.0, seconds))

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._count -= 1
                    self._changed.notify_all()
                    return
                task, on_error = self._tasks.popleft()
            try:
                task()
            except Exception as error:  # noqa: BLE001 - whoever waits for the task has to learn of it
                on_error(error)


def no_thread(error: RuntimeError) -> ClusterError:
    """Return what a thread that cannot be started means for the user."""
    return ClusterError(f"{error} here; raise ulimit -u, or pids.max of the container")
