"""Who is in the job and what became of them. A pure state machine: events in, decision out, time as an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from msrun.planning.ranks import name_ranks


class WorkerState(Enum):
    """Life of one worker, in order."""

    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    """Ended with status 0."""
    FAILED = "failed"
    """Ended by itself with another status, before msrun had told it to end."""
    STOPPED = "stopped by msrun"
    """Ended after msrun told it to."""


class Decision(Enum):
    """What the agent has to do after an event."""

    WAIT = "wait"
    STOP = "stop"
    """End every worker that still runs."""
    FINISH = "finish"
    """Nobody runs any more."""


@dataclass
class Member:
    """One worker as membership sees it."""

    global_rank: int
    state: WorkerState = WorkerState.PLANNED
    pid: int = 0
    started_at: float = 0.0
    """Monotonic seconds."""
    ended_at: float = 0.0
    wait_status: int = 0
    """As waitpid gives it."""
    ended_itself: bool = False
    """It ended before msrun had told it to."""
    hint: str = ""
    """What else is known of its end."""


@dataclass
class Membership:
    """All workers of the job. Owned by the agent's event loop; nothing here has an effect."""

    ranks: Iterable[int]
    first_failure: Member | None = None
    is_stopping: bool = False
    """The job is to end."""
    are_told: bool = False
    """The workers have been told to end."""
    members: dict[int, Member] = field(init=False)
    _counts: Counter[WorkerState] = field(init=False, repr=False)
    """How many workers are in each state: a job has thousands, and every event asks."""

    def __post_init__(self) -> None:
        self.members = {rank: Member(rank) for rank in self.ranks}
        self._counts = Counter({WorkerState.PLANNED: len(self.members)})

    def _enter(self, member: Member, state: WorkerState) -> None:
        self._counts[member.state] -= 1
        self._counts[state] += 1
        member.state = state

    def started(self, global_rank: int, pid: int, now: float) -> Decision:
        """Record that a worker runs."""
        member = self.members[global_rank]
        self._enter(member, WorkerState.RUNNING)
        member.pid, member.started_at = pid, now
        return Decision.WAIT

    def exited(self, global_rank: int, wait_status: int, now: float) -> Decision:
        """Record the end of a worker. The first bad end, by arrival, is the job's first failure and stops the rest."""
        member = self.members[global_rank]
        member.ended_at, member.wait_status, member.ended_itself = now, wait_status, not self.are_told
        if wait_status == 0:
            self._enter(member, WorkerState.DONE)
        elif self.are_told:
            self._enter(member, WorkerState.STOPPED)
        else:
            self._enter(member, WorkerState.FAILED)
            if not self.is_stopping:
                self.first_failure = member
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
        """Return how many workers are in one of these states."""
        return sum(self._counts[state] for state in states)

    def running(self) -> dict[int, int]:
        """Return global rank -> pid of every worker that runs."""
        return {r: m.pid for r, m in self.members.items() if m.state is WorkerState.RUNNING}

    def ranks_in(self, *states: WorkerState) -> list[int]:
        """Return the ranks in one of these states, ascending."""
        return sorted(rank for rank, member in self.members.items() if member.state in states)


def describe_absent(absent: Collection[int], come: Collection[int]) -> str:
    """Return why a world that `come` have joined can never be whole, in one line."""
    return (
        f"{name_ranks(absent)} ended with exit code 0 without joining the world, and {name_ranks(come)} "
        f"{'needs' if len(come) == 1 else 'need'} it: every rank has to call init() or init_process_group(), or none"
    )
