"""torch's `Work` on operations of a group, and how operations move on.

Starting an operation writes this rank's part as far as there are free slots, and announces it. Whoever waits moves all
operations of this process on, in every group, so that no rank waits for another's part of an operation that the other
has started; when nothing moves it sleeps on the word that the rank it waits for will count in.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import CollectiveError
from msrun.runtime.progress import waiting_in

_LOOK_EVERY_S = 0.2
"""How often a rank that sleeps looks whether the others are alive."""
_MOVE_EVERY_S = 0.001
"""The same where it has other operations to move on meanwhile."""
_SOON_S = 0.005
"""A wait that is over by then is not worth a note."""
_STILL_S = 0.02
"""How long operations may stand still while nobody waits for one."""
_REST_AFTER = 50
"""Looks without any operation after which the thread rests."""
lock = threading.RLock()
_moving: dict[Line, None] = {}
"""The lines that hold operations which are not done."""


class Operation(Protocol):
    """What a `Work` waits for."""

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is over."""
        ...

    def describe(self) -> str:
        """Return what to call it."""
        ...


class Line(ABC):
    """Operations of one group that move on in some order."""

    def __init__(self) -> None:
        self.error: CollectiveError | None = None
        """Why nothing moves any more."""
        self.blocked_on = 0, 0
        """After `advance`, if operations are left: the word that counts when more can be done, and its value then."""

    @abstractmethod
    def add(self, operation: Any) -> None:
        """Put an operation at the end."""

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done now; return whether operations are left."""

    @abstractmethod
    def sleep(self, word: int, seen: int, most_s: float) -> None:
        """Sleep until the word has another value."""

    @abstractmethod
    def late_ranks(self) -> list[str]:
        """Return whom the first operation waits for."""

    @abstractmethod
    def check(self, operation: Any) -> None:
        """Raise if the operation can never end."""


def move(line: Line) -> None:
    """Move a line on, and note whether there is more to do."""
    if line.advance():
        _moving[line] = None
    else:
        _moving.pop(line, None)


def start(line: Line, operations: Sequence[Any]) -> None:
    """Add operations to a line and begin with them."""
    with lock:
        for operation in operations:
            line.add(operation)
        move(line)
        if line in _moving:
            _background.have_awake()


def forget(line: Line) -> None:
    """Move a line on no more."""
    with lock:
        _moving.pop(line, None)


def wait_for(line: Line, operation: Operation, most_s: float) -> bool:
    """Move everything on until an operation is done; return False when the time is over.

    Raises:
        CollectiveError: it can never end.
    """
    with lock:
        _background.spared += 1
    try:
        end = time.monotonic() + most_s
        if _wait_until(line, operation, min(end, time.monotonic() + _SOON_S)):
            return True
        with waiting_in(operation.describe):
            return _wait_until(line, operation, end)
    finally:
        with lock:
            _background.spared -= 1


def _wait_until(line: Line, operation: Operation, end: float) -> bool:
    now = time.monotonic()
    look_at = now + _LOOK_EVERY_S
    is_new = len(_moving) == 1
    """Nothing has happened yet since the operation began, or since the last look."""
    while True:
        with lock:
            if not is_new:
                for other in [line, *_moving]:
                    move(other)
            if operation.is_done:
                return True
            if line.error is not None:
                raise line.error
            word, seen = line.blocked_on
            most_s = _LOOK_EVERY_S if len(_moving) == 1 else _MOVE_EVERY_S
        is_new = False
        line.sleep(word, seen, min(max(end - now, 0), most_s))
        now = time.monotonic()
        if now >= look_at:
            line.check(operation)
            look_at = now + _LOOK_EVERY_S
        if now >= end:
            with lock:
                move(line)
            return operation.is_done


class _Background:
    """The thread that moves operations on while this process does something else; started when one is left."""

    def __init__(self) -> None:
        self.spared = 0
        """Threads that wait for an operation, and move all on themselves."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_resting = self._is_over = False

    def have_awake(self) -> None:
        """Begin to look, or go on."""
        if self._thread is None and not self._is_over:
            self._thread = threading.Thread(target=self._run, name="msrun-shm", daemon=True)
            self._thread.start()
            atexit.register(self._end)  # a thread in torch's code must not see the end of the interpreter
        elif self._is_resting:
            self._is_resting = False
            self._wake.set()

    def forget(self) -> None:
        """Begin anew in a forked child, which has no such thread."""
        self._thread, self.spared, self._is_resting = None, 0, False
        _moving.clear()
        lock.release()

    def _end(self) -> None:
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_LOOK_EVERY_S)

    def _run(self) -> None:
        idle, pause = 0, _STILL_S
        while not self._is_over:
            self._wake.wait(None if self._is_resting else pause)
            self._wake.clear()
            with lock:
                idle = 0 if _moving else idle + 1
                self._is_resting = idle > _REST_AFTER
            if not self.spared:
                pause = _MOVE_EVERY_S if self._move() else _STILL_S

    def _move(self) -> bool:
        """Move everything on; return whether something moved."""
        with lock:
            before = [line.blocked_on for line in _moving]
            for line in list(_moving):
                with suppress(Exception):  # whoever waits is told
                    move(line)
            return before != [line.blocked_on for line in _moving]


_background = _Background()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=_background.forget)


class ShmWork(dist.Work):
    """What torch waits for: some operations of one line."""

    def __init__(
        self,
        line: Any,
        operations: Sequence[Any],
        results: list[Tensor],
        most_s: float,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            finish: called once when all are done.
        """
        super().__init__()
        self._line, self._operations, self._results = line, operations, results
        self._most_s, self._finish = most_s, finish
        self._error: RuntimeError | None = None
        """Why it can never be done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operations.

        Raises:
            CollectiveError: they can never end, or the time is over; after `timeout` one may wait again.
        """
        given = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        most_s = self._most_s if given is None else given
        for operation in self._operations:
            if operation.is_done:
                continue
            try:
                is_done = wait_for(self._line, operation, most_s)
            except RuntimeError as error:
                self._error = error
                raise
            if not is_done:
                raise CollectiveError(self._describe_time_out(operation, most_s))
        self._close()
        return True

    def _describe_time_out(self, operation: Operation, most_s: float) -> str:
        late = ", ".join(self._line.late_ranks())
        return f"{operation.describe()}: Timed out after {most_s:g} s, waits for {late or 'the other end'}"

    def _close(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        """Return whether the operations are done, or can never be; moves them on."""
        with lock:
            move(self._line)
        done = all(operation.is_done for operation in self._operations)
        if done:
            self._close()
        return done or self._error is not None

    def is_success(self) -> bool:
        """Return whether they are done without an error."""
        return self.is_completed() and self._error is None

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that the operations write."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that is done: nobody else would finish the operations while torch waits for it."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def _source_rank(self) -> int:
        """Return whom a message came from."""
        return int(self._operations[0].source)
