"""Who is in the job and what became of them, when a failed job is started again, and why it failed: as `failure.json`
has it (schema in `msrun.contract`), and as hosts and coordinator tell it; and the coordinator of a job: what becomes of
it.

Pure state machines: events in, decision out, time as an argument; of the coordinator what hosts say in, what all hosts
are told out.

The first failure counts, in the order in which hosts tell of theirs; it ends the job on every host. When every host has
ended its part, the job is over, or starts again everywhere. The launcher passes these messages on, over its connections
to the agents of all hosts; to a host that is alone, `OwnLink` does.

    host -> coordinator   failed {attempt, report}    ended {attempt, can_continue, come, has_begun, report}
                          done {attempt, rank, has_come}    ready {attempt, clock_s}
    coordinator -> hosts  stop {attempt, report, goes_on}    absent {attempt, ranks}
                          restart {attempt, delay_s, reason, ranks}    start {attempt}    over {report, goes_on}"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from msrun import contract
from msrun.cluster.messages import Inbox, Message
from msrun.planning.hosts import HostPool, fold_ranks, name_ranks
from msrun.planning.record_json import decode_record, encode_record

if TYPE_CHECKING:
    from msrun.planning.spec import JobTerms

FIRST_WAIT_S = 1.0
MAX_DELAY_S = 30.0
HOPELESS_CODES = frozenset({contract.EXIT_DO_NOT_RESTART, 126, 127})
"""The worker said so itself; its program cannot be run; its program was not found."""
UNBEGUN_CODES = frozenset({1, 2})  # Python's own after an exception and a usage error: it would end so again
BEGUN_S = 10.0  # a worker that has run for so long has begun, also one that joins nothing and says nothing


@dataclass(frozen=True)
class RestartPolicy:
    """Restarts the whole job a limited number of times, at once, then after 1, 2, 4, ... seconds."""

    max_restarts: int
    restart_on: tuple[int, ...] = ()  # start again after these exit statuses alone, and always; empty = see `refuse`
    no_restart_on: tuple[int, ...] = ()  # never after these
    keep_going: bool = False  # a worker that fails ends nobody else

    @classmethod
    def of(cls, asked: JobTerms) -> RestartPolicy:
        return cls(asked.max_restarts, asked.restart_on, asked.no_restart_on, asked.keep_going)

    def delay_s(self, restarts_done: int, exit_code: int | None, *, has_begun: bool = True) -> float | None:
        """Return how long to wait before the next start, after so many; None when the job has ended for good.
        `exit_code`: of the worker that failed first, 128 + signal; None when no worker failed. `has_begun`: see
        `refuse`."""
        if restarts_done >= self.max_restarts or self.refuse(exit_code, has_begun=has_begun):
            return None
        return min(MAX_DELAY_S, FIRST_WAIT_S * 2.0 ** (restarts_done - 1)) if restarts_done else 0.0

    def explain(self, restarts_done: int, exit_code: int | None, *, has_begun: bool) -> str:
        """Return why a job that could start again does not, to be added to its failure; else an empty string."""
        why = self.refuse(exit_code, has_begun=has_begun) if restarts_done < self.max_restarts else ""
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


@dataclass
class Member:
    """One worker as membership sees it."""

    global_rank: int
    state: WorkerState = WorkerState.PLANNED
    pid: int = 0
    started_at: float = 0.0  # monotonic seconds
    ended_at: float = 0.0
    wait_status: int = 0  # as waitpid gives it
    ended_itself: bool = False  # it ended before msrun had told it to
    hint: str = ""  # what else is known of its end


@dataclass
class Membership:
    """All workers of the job. Owned by the agent's event loop; nothing here has an effect."""

    ranks: Iterable[int]
    first_failure: Member | None = None
    is_stopping: bool = False  # the job is to end
    are_told: bool = False  # the workers have been told to end
    members: dict[int, Member] = field(init=False)
    _counts: Counter[WorkerState] = field(init=False, repr=False)  # workers by state: a job has thousands

    def __post_init__(self) -> None:
        self.members = {rank: Member(rank) for rank in self.ranks}
        self._counts = Counter({WorkerState.PLANNED: len(self.members)})

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


MAX_TEXT = 4096
MAX_OTHERS = 1 << 16


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed first, or that the others waited for."""

    global_rank: int
    local_rank: int
    host: str
    pid: int
    exit_code: int | None
    signal: str | None
    hint: str
    run_time_s: float
    log: str
    excerpt: list[str]

    @property
    def how(self) -> str:
        """How it ended: "exit code 7", "signal SIGKILL"."""
        return f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"


@dataclass(frozen=True)
class JobFailure:
    """Why the job as a whole failed."""

    job_id: str
    exit_code: int
    reason: str
    first_failure: WorkerFailure | None
    lagging: list[WorkerFailure]
    others: list[dict[str, int | str]]
    attempts: list[dict[str, int | float | str]]

    @property
    def guilty(self) -> tuple[WorkerFailure, ...]:
        """The worker that failed first, or those that the others waited for."""
        return (self.first_failure,) if self.first_failure else tuple(self.lagging)

    def change_workers(self, change: Callable[[WorkerFailure], WorkerFailure]) -> JobFailure:
        """Return the same failure with each of the `guilty` replaced by what `change` makes of it."""
        first = change(self.first_failure) if self.first_failure else None
        return replace(self, first_failure=first, lagging=[change(worker) for worker in self.lagging])


@dataclass(frozen=True)
class FailureReport:
    """What a host tells of the failure of an attempt; of the first one, what all hosts are told."""

    failure: JobFailure
    node_rank: int = -1  # whose failure it is; -1: the coordinator's own word
    is_hang: bool = False  # the workers run still, and wait for ever
    can_restart: bool = False
    is_unfit: bool = False  # the host itself cannot start again, between two attempts
    lost_peer: bool = False  # the worker's last words are that another rank has gone, and that one was not of its host
    signum: int = 0  # the signal that ended the job on that host; 0 when it was none


def fault_of_job(job_id: str, reason: str, exit_code: int) -> JobFailure:
    return JobFailure(job_id, exit_code, reason, None, [], [], [])


def read_failure(value: object) -> JobFailure:
    """Return the failure in a message of another host, cut to size. Raises ValueError: there is none in it."""
    return _checked(decode_record(JobFailure, value))


def read_report(value: object) -> FailureReport:
    """Return the report in a message of another host, cut to size. Raises ValueError: there is none in it."""
    report = decode_record(FailureReport, value)
    return replace(report, failure=_checked(report.failure))


def _checked(failure: JobFailure) -> JobFailure:
    if len(failure.others) > MAX_OTHERS or not all(type(other.get("global_rank")) is int for other in failure.others):
        raise ValueError("it names a worker without a rank, or too many")
    exit_code = failure.exit_code if 0 < failure.exit_code < 256 else contract.EXIT_CLUSTER
    return replace(failure, exit_code=exit_code, reason=failure.reason[:MAX_TEXT])


def merge_failures(failure: JobFailure, hosts: Iterable[JobFailure]) -> JobFailure:
    """Return the job's failure with what its hosts know of their own workers. `failure`: the coordinator's: it says
    what the reason is. `hosts`: as each host has seen the end. Each knows how its workers ended, and the one whose
    worker it is has read that worker's log again since."""
    found = list(hosts)
    newest = {worker.global_rank: worker for host in found for worker in host.guilty}
    failure = failure.change_workers(lambda worker: newest.pop(worker.global_rank, worker))
    told_of = {worker.global_rank for worker in failure.guilty}
    others = {other["global_rank"]: other for host in found for other in host.others}
    for rank, worker in newest.items():  # first on its host, but not of the job
        others.setdefault(rank, {"global_rank": rank, "state": f"failed ({worker.how})", "doing": ""})
    attempts = next((host.attempts for host in found if host.attempts), failure.attempts)
    kept = [others[rank] for rank in sorted(others) if rank not in told_of]
    return replace(failure, others=kept, attempts=attempts)


REPORTS = frozenset({"failed", "ended", "done", "ready"})  # what hosts say
ORDERS = frozenset({"stop", "absent", "restart", "start", "over"})  # what they are told


class Coordinator:
    """All hosts of a job. Owned by one thread; every method returns what all hosts are to be told."""

    def __init__(
        self,
        job_id: str,
        ranks: Mapping[int, Sequence[int]],
        policy: RestartPolicy,
        *,
        has_begun: bool = False,
        pool: HostPool | None = None,
    ) -> None:
        """`ranks`: node_rank -> global ranks there. `has_begun`: the job has run before, on other hosts. `pool`: from
        whom the hosts of another start are chosen, and who has chosen these; None = there are no others."""
        self._pool = pool
        self.losses: dict[int, str] = {}  # hosts that have gone without a result, cannot start again or leave, and why
        self.leaving: set[int] = set()  # of them, those whose agent got a signal; not started on again
        self.may_go_on = True  # nobody wants the job to end
        self.goes_on = False  # the job is over on these hosts, and goes on on those that the pool has chosen
        self.begun = 0  # the last attempt that has workers
        self._job_id, self._ranks, self._nodes, self._policy = job_id, ranks, set(ranks), policy
        self._busy = set(self._nodes)  # those that have not ended their part of the attempt
        self._unready = set(self._nodes)  # those that could not start their workers again yet
        self._done: dict[int, int] = {}  # rank -> node of those that have finished in this attempt
        self._absent: set[int] = set()  # those of them that never joined the world
        self._come: set[int] = set()  # those of hosts that have ended which joined it
        self._cause = ""  # which ranks had finished before, where that is why the first one has failed
        self._kept: FailureReport | None = None  # the first failure of an attempt that goes on all the same
        self._is_last = False
        self._has_begun = has_begun  # a rank has joined or made progress, or the failed one ran for a while
        self.attempt = 0
        self.report: FailureReport | None = None  # of the current attempt; of the last one when the job is over
        self.is_over = False

    def hear(self, node_rank: int, message: Message) -> list[Message]:
        """Take one of `REPORTS` from a host; what is of another attempt is left out (ValueError: no host says this)."""
        kind, attempt, own = message.get("type"), message.get("attempt"), self._ranks[node_rank]
        if type(attempt) is not int:
            return []
        if kind == "failed":
            report = replace(read_report(message.get("report")), node_rank=node_rank)
            if report.signum:
                self.losses.setdefault(node_rank, report.failure.reason)
                self.leaving.add(node_rank)
            return self._failed(report) if attempt == self.attempt else []
        if self.is_over or attempt != self.attempt:
            return []
        match kind:
            case "done" if message.get("rank") in own:
                return self._done_by(node_rank, message["rank"], has_come=message.get("has_come") is not False)
            case "ended":
                self._has_begun |= message.get("has_begun") is not False
                given = message.get("come")
                self._come.update(rank for rank in own if isinstance(given, list) and rank in given)
                late = read_report(message["report"]) if message.get("report") is not None else None
                return self._ended_by(node_rank, late, can_continue=message.get("can_continue") is True)
            case "ready" if node_rank in self._unready:
                self._unready.discard(node_rank)
                if not self._unready:
                    self.begun = attempt
                    return [{"type": "start", "attempt": attempt}]
        return []

    def _failed(self, report: FailureReport) -> list[Message]:
        """Only the first failure of an attempt counts."""
        if self.is_over or self.report is not None:
            return []
        done = {rank: node for rank, node in self._done.items() if node != report.node_rank}
        if report.lost_peer and done:  # they had left before: that is why another host's rank has failed
            self._cause = f"{name_ranks(done)} on node {fold_ranks(set(done.values()))} exited early (code 0)"
        report = self._with_cause(report)
        self._is_last |= not report.can_restart
        if self._policy.keep_going and report.failure.first_failure is not None:
            self._kept = self._kept or report
            return []
        self.report = report
        if report.is_unfit and report.node_rank >= 0:
            self.losses.setdefault(report.node_rank, report.failure.reason)
        code = report.failure.exit_code if report.failure.first_failure else None
        goes_on = not self._is_last and self._policy.delay_s(self.attempt, code) is not None
        return [{"type": "stop", "attempt": self.attempt, "report": encode_record(report), "goes_on": goes_on}]

    def _with_cause(self, report: FailureReport) -> FailureReport:
        return replace(report, failure=_after(self._cause, report.failure)) if self._cause else report

    def fail(self, reason: str, exit_code: int = contract.EXIT_CLUSTER, **more: Any) -> list[Message]:
        """The coordinator itself has seen why the job cannot go on; `more`: fields of `FailureReport`."""
        return self._failed(FailureReport(fault_of_job(self._job_id, reason, exit_code), **more))

    def _done_by(self, node_rank: int, global_rank: int, *, has_come: bool) -> list[Message]:
        """A rank has finished. `has_come`: it had joined the world; who joins one that it has not waits in vain."""
        self._done[global_rank] = node_rank
        if has_come:
            return []
        self._absent.add(global_rank)
        is_first = len(self._absent) == 1  # enough for the others to look; a job that joins nothing has many
        return [{"type": "absent", "attempt": self.attempt, "ranks": [global_rank]}] if is_first else []

    def _ended_by(self, node_rank: int, report: FailureReport | None, *, can_continue: bool) -> list[Message]:
        """All workers of a host have ended, or none was started. `report`: of its failure there, from whole logs."""
        if node_rank not in self._busy:
            return []
        self._is_last |= not can_continue
        self._busy.discard(node_rank)
        if report is not None and self.report is not None and self.report.node_rank == node_rank:
            self.report = self._with_cause(replace(report, node_rank=node_rank))
        elif report is not None and self._kept is not None and self._kept.node_rank == node_rank:
            self._kept = replace(report, node_rank=node_rank)
        orders = self.fail(describe_absent(self._absent, self._come)) if self._absent and self._come else []
        return [*orders, *self._conclude()]

    def lost(self, node_rank: int, reason: str, exit_code: int = contract.EXIT_CLUSTER) -> list[Message]:
        """A host has gone early. A rank that failed for the want of another just before failed for that reason."""
        if self.is_over or node_rank not in self._nodes:
            return []
        self.losses[node_rank] = reason
        report = self.report
        if report is not None and report.lost_peer and node_rank in self._busy - {report.node_rank}:
            self.report = FailureReport(replace(_after(reason, report.failure), exit_code=exit_code))
        self._nodes.discard(node_rank)
        self._busy.discard(node_rank)
        self._is_last = True
        return [*self.fail(reason, exit_code), *self._conclude()]

    def _conclude(self) -> list[Message]:
        if self._busy:
            return []
        report, delay_s = self.report or self._kept, None
        self.report = report
        if self.losses:
            self.goes_on = self.may_go_on and self._can_replace()
        elif report is not None and not self._is_last:
            first = report.failure.first_failure
            code = report.failure.exit_code if first else None
            self._has_begun |= first is not None and first.run_time_s >= BEGUN_S
            delay_s = self._policy.delay_s(self.attempt, code, has_begun=self._has_begun)
            why = self._policy.explain(self.attempt, code, has_begun=self._has_begun)
            self.report = report = replace(
                report, failure=replace(report.failure, reason=f"{report.failure.reason}{why}")
            )
            self.goes_on = delay_s is not None and self._pool is not None and self._pool.grow()
        if report is None or delay_s is None or self.goes_on:
            self.is_over = True
            return [{"type": "over", "report": encode_record(report) if report else None, "goes_on": self.goes_on}]
        self.attempt += 1
        self.report, self._kept, self._cause = None, None, ""
        self._done.clear()
        self._absent.clear()
        self._come.clear()
        self._busy, self._unready = set(self._nodes), set(self._nodes)
        cause = {"reason": report.failure.reason, "ranks": [worker.global_rank for worker in report.failure.guilty]}
        return [{"type": "restart", "attempt": self.attempt, "delay_s": delay_s, **cause}]

    def _can_replace(self) -> bool:
        """Choose hosts in the place of those that were lost; False when the job may not start again, or on too few."""
        pool = self._pool
        if pool is None or self.begun >= self._policy.max_restarts:
            return False
        hosts = pool.chosen
        return pool.lose([hosts[node] for node in self.losses], [hosts[node] for node in self.leaving])


class OwnLink:
    """What joins a coordinator and the agent of the job's only host in one process. Owned by one thread; `close` it."""

    def __init__(self, coordinator: Coordinator, node_rank: int) -> None:
        self.orders = Inbox()  # what the coordinator says
        self._coordinator, self._node_rank = coordinator, node_rank

    def obey(self, signals: object) -> None:
        """There is no launcher whose signals are other than this process's."""

    def pass_on(self, message: Message) -> None:
        for order in self._coordinator.hear(self._node_rank, message):
            self.orders.post(order)

    def close(self) -> None:
        self.orders.close()


def _after(cause: str, failure: JobFailure) -> JobFailure:
    then = failure.reason.replace(" failed first: ", " then failed: ", 1)
    return replace(failure, reason=f"{cause}; {then}")
