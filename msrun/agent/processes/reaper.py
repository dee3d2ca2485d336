"""Reaper: collects children that have ended, in the order in which they ended.

waitpid(-1) hands out ended children in the order in which they were forked. On a busy machine several end before their
parent runs again, and the one that the others died of would not come first. An epoll of pidfds keeps the order: a
pidfd enters its ready list at the moment of the child's end (pidfd_open(2); fs/eventpoll.c appends at the tail).
"""

from __future__ import annotations

import os
import select

Ended = tuple[int, int, float]  # process id, wait status as waitpid gives it, peak memory in bytes


class Reaper:
    """The children of one process. Owned by the fork server; descriptors are closed with each child's end."""

    def __init__(self) -> None:
        self._deaths = select.epoll()
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._pidfds: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Remember when this child ends. Without a descriptor for it (too many) it comes after the others."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # Python built for a kernel before 5.3 has no pidfd_open
            return
        try:
            self._deaths.register(pidfd, select.EPOLLIN)
        except OSError:  # the user's share of watches is used up
            os.close(pidfd)
            return
        self._children[pidfd] = pid
        self._pidfds[pid] = pidfd

    def reap(self) -> list[Ended]:
        order = {}
        if self._children:
            events = self._deaths.poll(0, len(self._children))
            order = {self._children[pidfd]: place for place, (pidfd, _) in enumerate(events)}
        ended = collect()
        for pid, _, _ in ended:
            self._forget(pid)
        return sorted(ended, key=lambda end: order.get(end[0], len(order)))

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            self._deaths.unregister(pidfd)  # a child forked this instant may still hold a copy
            os.close(pidfd)
            del self._children[pidfd]


def collect() -> list[Ended]:
    """Collect every child that has ended, in the order in which they were forked."""
    ended: list[Ended] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status, usage.ru_maxrss * 1024.0))
