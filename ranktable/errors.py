"""The exceptions of this package, each with the exit code that the command line gives it.

The exit codes are 0 valid (warnings allowed), 1 problems, 2 wrong usage or unreadable, 3 not ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranktable.problem import Position, Problem

EXIT_VALID = 0
EXIT_PROBLEMS = 1
EXIT_USAGE = 2
EXIT_NOT_READY = 3


class RankTableError(Exception):
    """Base class: a message that names the value and the constraint, and a remedy that may be empty."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class ReadError(RankTableError):
    """A source that cannot be read: its name, what the system says, and what to do."""

    def __init__(self, source: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"cannot read {source}: {reason}", remedy)


class WriteError(RankTableError):
    """A file that cannot be written: its path, what the system says, and what to do."""

    def __init__(self, target: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"cannot write {target}: {reason}", remedy)


class JsonTextError(RankTableError):
    """Text that is not UTF-8 JSON with an object at the top; `problem` holds it as a finding of rule R1."""

    exit_code = EXIT_PROBLEMS

    def __init__(self, source: str, position: Position, message: str, remedy: str) -> None:
        from ranktable.problem import Problem  # not for those who read lists of hosts

        super().__init__(f"{source}:{position.line}:{position.column}: {message}", remedy)
        self.source = source
        self.position = position
        self.problem = Problem("", "R1", "error", message, remedy, position=position)


class UnsupportedDialectError(RankTableError):
    """A known kind of table that cannot be read here: `dialect` names it."""

    def __init__(self, source: str, dialect: str, evidence: str, remedy: str) -> None:
        super().__init__(f"{source} is {dialect} (it has {evidence}), not a table that is read here", remedy)
        self.dialect = dialect


class UnknownDialectError(RankTableError):
    """JSON that has no telling key of any known kind of table; `keys` are those at its top."""

    exit_code = EXIT_PROBLEMS

    def __init__(self, source: str, keys: Sequence[str], remedy: str) -> None:
        from ranktable.problem import show_value

        names = [key if key.isidentifier() and len(key) < 60 else show_value(key) for key in keys[:6]]
        shown = ", ".join(names) or "none"
        super().__init__(f"{source} is not a rank table of any known kind (top-level keys: {shown})", remedy)
        self.source = source


class InvalidTableError(RankTableError):
    """A table that cannot be decoded; `problems` holds every fault of its structure, not only the first."""

    exit_code = EXIT_PROBLEMS

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{source} is not a valid rank table: {first.subject}: {first.message}{more}", first.remedy)
        self.problems = tuple(problems)


class NotReadyError(RankTableError):
    """A table that its producer has not finished: its status is "initializing"."""

    exit_code = EXIT_NOT_READY

    def __init__(self, source: str) -> None:
        message = f'{source} is not ready: its status is "initializing"'
        super().__init__(message, 'wait until its producer sets the status to "completed"')


class BuildError(RankTableError, ValueError):
    """Wishes that make no valid table, a target, chip or reader that is not known, a rank that no device has."""


class MergeError(RankTableError):
    """Tables that do not fit together; `conflicts` holds a line for everything that is wrong, each with its file."""

    exit_code = EXIT_PROBLEMS

    def __init__(self, conflicts: Sequence[str]) -> None:
        more = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
        super().__init__(f"{conflicts[0]}{more}")
        self.conflicts = tuple(conflicts)


class HostListError(RankTableError, ValueError):
    """Hosts that a list, a file or a tool gives wrongly: `fault` with its value, and `source`, empty at first."""

    def __init__(self, fault: str, remedy: str, source: str = "") -> None:
        super().__init__(f"{source}: {fault}" if source else fault, remedy)
        self.fault = fault
        self.source = source

    @classmethod
    @contextmanager
    def at(cls, source: str) -> Iterator[None]:
        """Let what is raised name its source, where it does not yet."""
        try:
            yield
        except HostListError as error:
            raise cls(error.fault, error.remedy, error.source or source) from None


def near_miss(word: str, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' when a word is close to a known one, else an empty string."""
    from difflib import get_close_matches  # not where all is well

    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
