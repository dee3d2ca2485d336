"""The exception tree. Only `msrun.cli` turns these into text on stderr and an exit status.

Below MsrunError stand UsageError (wrong input, 2), ClusterError (a host, the scheduler or the fork server, 3; of a
limit of time 124), what ended a job (the exit status of that) and ParallelError, of a worker (1). A message is one
line: what was found, what is allowed, and what to do."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Iterable, Iterator
from typing import Any


class MsrunError(Exception):
    """Base of every error that msrun raises on purpose; `exit_code` is what msrun then ends with."""

    exit_code = 1


class UsageError(MsrunError):
    """What the user asked for cannot be done as asked: nothing was started."""

    exit_code = 2


class ClusterError(MsrunError):
    """A host, the scheduler or the fork server let the job down; not the user's program."""

    exit_code = 3


class RendezvousTimeout(ClusterError):
    """Not every worker came within the time limit."""

    exit_code = 124


class HangTimeout(ClusterError):
    """The workers run, but the job makes no progress any more."""

    exit_code = 124


class OwnProcessLost(ClusterError):
    """A process of msrun's own beside the workers has ended, or has been stopped; a new one may do its work."""


class WorkerFailed(MsrunError):
    """A worker ended with a status other than 0. `exit_code` is the first failed worker's, 128 + that of a signal."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code or 1


class ServerFailed(WorkerFailed):
    """A parameter server ended while workers ran. `exit_code` is its own; 1 when that is 0."""


class PeerFailed(MsrunError):
    """Another host of the job failed first, with the `exit_code` that all hosts end with; `signum`: the signal that
    ended the job there, and ends the workers here, or 0."""

    def __init__(self, message: str, exit_code: int, signum: int = 0) -> None:
        super().__init__(message)
        self.exit_code, self.signum = exit_code, signum


class Interrupted(MsrunError):
    """The launcher received signal `signum`, which ends the job."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = int(signum)
        self.exit_code = 128 + self.signum


class TimeLimitReached(Interrupted):
    """The job has run for as long as --time_limit says; its workers get TERM."""

    def __init__(self, message: str) -> None:
        super().__init__(message, signal.SIGTERM)
        self.exit_code = 124


def interruption(signum: int, time_limit_s: float) -> Interrupted:
    """Return why a signal of the launcher ends the job; ALRM comes from its own timer."""
    if signum == signal.SIGALRM:
        return TimeLimitReached(f"stopped by --time_limit: the job has run for {time_limit_s:g} s")
    return Interrupted(f"stopped by {signal.Signals(signum).name}", signum)


class ParallelError(MsrunError):
    """Base of what the runtime raises inside a worker.

    Args:
        message: one line.
        where: FILE:LINE of the user's code that it is about, where known; the text begins with it."""

    def __init__(self, message: str = "", *, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.where = where


class StrategyError(ParallelError, ValueError):
    """A strategy that the operator, the tensor or the number of ranks does not allow."""


class LayoutTypeError(StrategyError, TypeError):
    """A value of a wrong type given to Layout, where MindSpore raises TypeError."""


class UnverifiableError(StrategyError):
    """A network, or a way of running it, that has no training step of one process to compare with."""


class CaptureError(ParallelError):
    """The network cannot be captured; the message names the construct and a mode that needs no capture."""


class VerificationError(ParallelError):
    """A training step gives other numbers than one process. `report` says which, and by how much."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class WorldError(ParallelError):
    """The process group or a named group is missing, incomplete or wrong."""


class MissingPackageError(ParallelError, ImportError):
    """A package that `msrun.runtime` is built on is not installed; the launcher does without."""


class CollectiveError(WorldError, RuntimeError):
    """A collective or a message that can never end, is late, or was called otherwise by another rank."""


class DataError(ParallelError):
    """Data cannot be read: a file is missing, damaged or not of the promised format, or a user's function fails."""


class CheckpointError(ParallelError):
    """A checkpoint cannot be written, is missing or incomplete, or does not fit the network or its optimizer."""


LIMITS = {  # of the user, the container or the machine, by the error that they lead to -> what to raise
    errno.EAGAIN: " (the user or the container has as many processes as it may); raise ulimit -u or pids.max",
    errno.ENOMEM: "; end what uses memory, or raise the limit of the container",
    errno.EMFILE: "; raise the limit with ulimit -n",
    errno.ENFILE: " (of the whole machine); raise fs.file-max",
    errno.ENOSPC: "; make room there",
    errno.EDQUOT: "; make room there, or have the quota raised",
}


@contextlib.contextmanager
def refused_as(
    what: str, remedy: str = "", kind: type[MsrunError] = UsageError, *, at: object = None
) -> Iterator[None]:
    """Turn an error of the system into one of ours: what was refused, in the system's words why, and the remedy. `at`:
    the path that is named after `what` where the system names no other; None = there is none."""
    try:
        yield
    except OSError as error:
        place = "" if at is None else f" {error.filename or at}"
        raise kind(f"{what}{place} ({error.strerror}){'; ' if remedy else ''}{remedy}") from None


def describe_limit(error: OSError) -> str:
    """Return the system's words for an error and, where a limit is behind it, what to raise."""
    return f"{error.strerror or type(error).__name__}{LIMITS.get(error.errno or 0, '')}"


def near_miss(word: str, allowed: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ' (did you mean X?)' when `word` begins one of `allowed` or is close to one, else an empty string.

    Dashes before a word are no likeness.

    Args:
        cutoff: how close, from 0 to 1 (the ratio of `difflib.SequenceMatcher`)."""
    from difflib import get_close_matches  # not for --help

    bare = {name.lstrip("-"): name for name in allowed}
    asked = word.lstrip("-")
    longer = [name for name in bare if len(asked) > 2 and name.startswith(asked)]
    matches = longer or get_close_matches(asked, bare, n=1, cutoff=cutoff)
    return f" (did you mean {bare[matches[0]]}?)" if matches else ""
