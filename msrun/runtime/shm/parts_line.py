"""Operations that are done in parts, one after the other, each of them an operation of another line or of gloo.

An operation begins a part after the operation before it has begun the same: every rank begins them in one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from msrun.errors import CollectiveError
from msrun.runtime.shm.work import Line, Operation

_LOOK_S = 0.0002
"""How often to look whether gloo has done its part."""


class GlooPart:
    """A work of gloo's, as a part."""

    def __init__(self, work: Any) -> None:
        self._work = work

    @property
    def is_done(self) -> bool:
        """Whether it is over.

        Raises:
            RuntimeError: it has failed.
        """
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True


class Parts:
    """One operation.

    Args:
        text: what to call it.
        begin: per part the line where it takes place, None for gloo's, and what begins it; that returns the part,
            None where this rank has nothing to do.
    """

    def __init__(self, text: str, begin: Sequence[tuple[Line | None, Callable[[], Any]]]) -> None:
        self._text, self._begin = text, begin
        self.begun = 0
        self._part: Any = None

    def advance(self, most: int) -> None:
        """Begin what can be begun, at most so many parts."""
        while self.begun < most and (self._part is None or self._part.is_done):
            self._part = self._begin[self.begun][1]()
            self.begun += 1

    @property
    def count(self) -> int:
        """How many parts it has."""
        return len(self._begin)

    @property
    def is_done(self) -> bool:
        """Whether the last part is over."""
        return self.begun == self.count and (self._part is None or self._part.is_done)

    @property
    def place(self) -> tuple[Line | None, Operation | None]:
        """The line that it waits for, and the part there."""
        line = self._begin[self.begun - 1][0] if self.begun else None
        return line, self._part

    def describe(self) -> str:
        """Return what to call it."""
        return self._text


class PartsLine(Line):
    """The operations of one group, in the order in which all ranks call them.

    Args:
        lines: where parts take place; nobody else moves them on, so that a rank sleeps on one word alone.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        super().__init__()
        self._lines = lines
        self._operations: list[Parts] = []

    def add(self, operation: Parts) -> None:
        """Put an operation at the end of the line."""
        if self.error is not None:
            raise self.error
        self._operations.append(operation)

    def advance(self) -> bool:
        """Do what can be done now; return whether operations are left."""
        if self.error is not None:
            return False
        try:
            while self._begin_more():
                pass
        except (RuntimeError, ValueError) as error:
            self.error = CollectiveError(f"{self._operations[0].describe()}: {str(error).splitlines()[0]}")
            return False
        if self._operations:
            line = self._operations[0].place[0]
            self.blocked_on = line.blocked_on if line is not None else (0, 0)
        return bool(self._operations)

    def _begin_more(self) -> bool:
        """Move on what has begun, and begin what can be begun; return whether something was."""
        for own in self._lines:
            own.advance()
        most, begun = 1 << 30, 0
        for operation in self._operations:
            begun -= operation.begun
            operation.advance(min(most, operation.count))
            begun, most = begun + operation.begun, operation.begun
        self._operations = [operation for operation in self._operations if not operation.is_done]
        return begun > 0

    def sleep(self, word: int, seen: int, most_s: float) -> None:
        """Sleep until the line where the first operation waits may go on, or gloo may be done."""
        line = self._operations[0].place[0] if self._operations else None
        if line is not None:
            line.sleep(word, seen, most_s)
        else:
            time.sleep(min(most_s, _LOOK_S))

    def late_ranks(self) -> list[str]:
        """Return whom the first operation waits for."""
        line = self._operations[0].place[0] if self._operations else None
        return line.late_ranks() if line is not None else ["another host"]

    def check(self, operation: Operation) -> None:  # noqa: ARG002
        """Raise if the first operation can never end.

        Raises:
            CollectiveError: a rank of this host is gone, or gloo has failed.
        """
        if self.error is not None:
            raise self.error
        line, part = self._operations[0].place if self._operations else (None, None)
        if line is not None and part is not None:
            line.check(part)
