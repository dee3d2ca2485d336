"""OwnThread: a thread of msrun, which cannot end unnoticed. Every thread of launcher, agent and scheduler is one."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from msrun.cluster.messages import Message

PAUSE_S = 0.05  # between a fault and the next try, so that a thread with a fault that stays does not use up a processor


class OwnThread(threading.Thread):
    """Does its work in the background, as a daemon; its owner is told what that raises."""

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        on_fault: Callable[[BaseException], None],
        *,
        goes_on: bool = False,
    ) -> None:
        """`on_fault`: called by the thread with the first that `work` raises. `goes_on`: `work` is begun again after a
        fault, until it returns: it has to carry out the end of the job."""
        super().__init__(name=name, daemon=True)
        self._work, self._on_fault, self._goes_on = work, on_fault, goes_on
        self.fault: BaseException | None = None  # the first that was raised

    def run(self) -> None:
        while True:
            try:
                self._work()
                return
            except BaseException as error:  # noqa: BLE001 - whatever it was, somebody has to learn of it
                if self.fault is None:
                    self.fault = error
                    self._on_fault(error)
            if not self._goes_on:
                return
            time.sleep(PAUSE_S)


def print_fault(error: BaseException) -> None:
    """Print what was raised with its traceback, where there is nobody else to tell."""
    sys.stderr.write(traceback_of(error))


def describe_fault(error: BaseException, where: str = "its traceback is in scheduler.log") -> str:
    """Return a fault of msrun itself as one line: "msrun itself failed: OSError: ..., while it read worker_0.log".
    `where`: how the line ends."""
    return f"msrun itself failed: {name_fault(error)}; {where}"


def name_fault(error: BaseException) -> str:
    said = " ".join(str(error).split())
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}{f': {said}' if said else ''}{notes}"


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


Item = TypeVar("Item")


class WakingQueue(Generic[Item]):
    """Any thread posts, one thread reads. Posting never waits, so that a reader who is held up holds up nobody."""

    def __init__(self) -> None:
        """Open nothing: the descriptor is made by `fileno`."""
        self._messages: deque[Item] = deque()
        self._descriptor = -1
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are messages; -1 once it is closed."""
        with self._lock:
            if self._descriptor < 0 and not self._is_closed:
                self._descriptor = os.eventfd(len(self._messages), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._descriptor

    def post(self, message: Item) -> None:
        """Leave a message; nobody gets it when the inbox is closed."""
        with self._lock:
            if self._is_closed:
                return
            self._messages.append(message)
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def take(self, most: int = sys.maxsize) -> list[Item]:
        """Return the messages that are there, at most so many."""
        with self._lock:
            found = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
            if self._descriptor >= 0 and found:
                left = os.eventfd_read(self._descriptor) - len(found)
                if left > 0:
                    os.eventfd_write(self._descriptor, left)
        return found

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


Inbox = WakingQueue[Message]  # of messages
