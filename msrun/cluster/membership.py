"""Who is in the job and what became of them, and when a failed job is started again.

Pure state machines: events in, decision out, time as an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from enum import Enum
from typing import TYPE_CHECKING

from msrun import contract
from msrun.planning.hosts import name_ranks
from msrun.planning.record import Record

if TYPE_CHECKING:
    from msrun.planning.spec import JobTerms


FIRST_WAIT_S = 1.0
MAX_DELAY_S = 30.0
HOPELESS_CODES = frozenset({contract.EXIT_DO_NOT_RESTART, 126, 127})
"""The worker said so itself; its program cannot be run; its program was not found."""
UNBEGUN_CODES = frozenset({1, 2})  # Python's own after an exception and a usage error: it would end so again
BEGUN_S = 10.0  # a worker that has run for so long has begun, also one that joins nothing and says nothing


class RestartPolicy(Record):
    """Restarts the whole job a limited number of times, at once, then after 1, 2, 4, ... seconds."""

    max_restarts: int
    restart_on: tuple[int, ...] = ()  # start again after these exit statuses alone, and always; empty = see `refuse`
    no_restart_on: tuple[int, ...] = ()  # never after these
    keep_going: bool = False  # a worker that fails ends nobody else
    first_attempt: int = 0  # what came before, on other hosts, does not count

    @classmethod
    def of(cls, asked: JobTerms, first_attempt: int = 0) -> RestartPolicy:
        return cls(asked.max_restarts, asked.restart_on, asked.no_restart_on, asked.keep_going, first_attempt)

    def restarts_done(self, attempt: int) -> int:
        return attempt - self.first_attempt

    def delay_s(self, attempt: int, exit_code: int | None, *, has_begun: bool = True) -> float | None:
        """Return how long to wait before the next start, after an attempt; None when the job has ended for good.
        `exit_code`: of the worker that failed first, 128 + signal; None when no worker failed. `has_begun`: see
        `refuse`."""
        done = self.restarts_done(attempt)
        if done >= self.max_restarts or self.refuse(exit_code, has_begun=has_begun):
            return None
        return min(MAX_DELAY_S, FIRST_WAIT_S * 2.0 ** (done - 1)) if done else 0.0

    def explain(self, attempt: int, exit_code: int | None, *, has_begun: bool) -> str:
        """Return why a job that could start again does not, to be added to its failure; else an empty string."""
        can_start = self.restarts_done(attempt) < self.max_restarts
        why = self.refuse(exit_code, has_begun=has_begun) if can_start else ""
        return f"; not started again: {why}" if why else ""

    def refuse(self, exit_code: int | None, *, has_begun: bool) -> str:
        """Return why a failure is none to start again after; empty when it is one. `exit_code`: as for `delay_s`.
        `has_begun`: in this attempt or an earlier one a rank has joined the world or reported progress, or the worker
        that failed had run for BEGUN_S."""
        if exit_code is None or exit_code in self.restart_on:
            return ""
        if exit_code in self.no_restart_on:
            return f"--no_restart_on names {exit_code}"
        if self.restart_on:
            return f"--restart_on does not name {exit_code}"
        if exit_code in HOPELESS_CODES:
            return f"exit code {exit_code} says that it would not help"
        if exit_code in UNBEGUN_CODES and not has_begun:
            return (
                "no rank had joined the others or reported progress, and the worker had not run for "
                f"{BEGUN_S:g} s; --restart_on {exit_code} starts it again all the same"
            )
        return ""


def describe_delay(delay_s: float) -> str:
    """Return when a job starts again: "now" or "in 2 s"."""
    return f"in {delay_s:g} s" if delay_s else "now"


class WorkerState(Enum):
    """Life of one worker, in order."""

    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"  # ended with status 0
    FAILED = "failed"  # ended by itself with another status, before msrun had told it to end
    STOPPED = "stopped by msrun"  # ended after msrun told it to


class Decision(Enum):
    """What the agent has to do after an event."""

    WAIT = "wait"
    STOP = "stop"  # end every worker that still runs
    FINISH = "finish"  # nobody runs any more


class Member(Record, frozen=False):
    """One worker as membership sees it."""

    global_rank: int
    state: WorkerState = WorkerState.PLANNED
    pid: int = 0
    started_at: float = 0.0  # monotonic seconds
    ended_at: float = 0.0
    wait_status: int = 0  # as waitpid gives it
    ended_itself: bool = False  # it ended before msrun had told it to
    hint: str = ""  # what else is known of its end


class Membership:
    """All workers of the job. Owned by the agent's event loop; nothing here has an effect."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.first_failure: Member | None = None
        self.is_stopping = False  # the job is to end
        self.are_told = False  # the workers have been told to end
        self.members = {rank: Member(rank) for rank in ranks}
        self._counts = Counter({WorkerState.PLANNED: len(self.members)})  # by state: a job has thousands

    def _enter(self, member: Member, state: WorkerState) -> None:
        self._counts[member.state] -= 1
        self._counts[state] += 1
        member.state = state

    def started(self, global_rank: int, pid: int, now: float) -> Decision:
        member = self.members[global_rank]
        self._enter(member, WorkerState.RUNNING)
        member.pid, member.started_at = pid, now
        return Decision.WAIT

    def exited(self, global_rank: int, wait_status: int, now: float, *, others_go_on: bool = False) -> Decision:
        """Record the end of a worker; the first bad one stops the rest, where not `others_go_on`."""
        member = self.members[global_rank]
        member.ended_at, member.wait_status, member.ended_itself = now, wait_status, not self.are_told
        if wait_status == 0:
            self._enter(member, WorkerState.DONE)
        elif self.are_told:
            self._enter(member, WorkerState.STOPPED)
        else:
            self._enter(member, WorkerState.FAILED)
            if not self.is_stopping and not others_go_on:
                self.first_failure = member
                return self.stop()
        if self.is_over and not self.is_stopping and (failed := self.ranks_in(WorkerState.FAILED)):
            self.first_failure = min((self.members[rank] for rank in failed), key=lambda one: one.ended_at)
            return self.stop()
        return Decision.FINISH if self.is_over else Decision.WAIT

    def ended(self, global_rank: int, state: WorkerState, wait_status: int) -> None:
        """Record the end of a worker of another host, as that host has judged it."""
        member = self.members[global_rank]
        self._enter(member, state)
        member.wait_status = wait_status

    def told(self, not_started: Iterable[int] = ()) -> Decision:
        """Record that from now on workers end because msrun told them to, and who will not be started any more."""
        self.is_stopping = self.are_told = True
        for rank in not_started:
            self._enter(self.members[rank], WorkerState.STOPPED)
        return Decision.FINISH if self.is_over else Decision.WAIT

    def stop(self) -> Decision:
        """Record that msrun ends the job for a reason of its own."""
        self.is_stopping = True
        return Decision.FINISH if self.is_over else Decision.STOP

    @property
    def is_over(self) -> bool:
        """True when every worker was started and has ended."""
        return not self.count(WorkerState.PLANNED, WorkerState.RUNNING)

    def count(self, *states: WorkerState) -> int:
        return sum(self._counts[state] for state in states)

    def running(self) -> dict[int, int]:
        return {r: m.pid for r, m in self.members.items() if m.state is WorkerState.RUNNING}

    def ranks_in(self, *states: WorkerState) -> list[int]:
        return sorted(rank for rank, member in self.members.items() if member.state in states)


def describe_absent(absent: Collection[int], come: Collection[int]) -> str:
    """Return why a world that `come` have joined can never be whole, in one line."""
    return (
        f"{name_ranks(absent)} ended with exit code 0 without joining the world, and {name_ranks(come)} "
        f"{'needs' if len(come) == 1 else 'need'} it: every rank has to call init() or init_process_group(), or none"
    )
