"""The coordinator of a job: what becomes of it. Pure: what hosts say in, what all hosts are told out.

The first failure counts, in the order in which hosts tell of theirs; it ends the job on every host. When every host has
ended its part, the job is over, or starts again everywhere. The launcher passes these messages on, over its connections
to the agents of all hosts; to a host that is alone, `OwnLink` does. `cluster.protocol` has their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msrun import contract
from msrun.cluster.failure import FailureReport, JobFailure, fault_of_job, read_report
from msrun.cluster.membership import BEGUN_S, RestartPolicy, describe_absent
from msrun.cluster.messages import Inbox, Message
from msrun.planning.hosts import HostPool, fold_ranks, name_ranks
from msrun.planning.record import encode_record

REPORTS = frozenset({"failed", "ended", "done", "ready"})  # what hosts say
ORDERS = frozenset({"stop", "absent", "restart", "start", "over"})  # what they are told


class Coordinator:
    """All hosts of a job. Owned by one thread; every method returns what all hosts are to be told."""

    def __init__(
        self, job_id: str, ranks: Mapping[int, Sequence[int]], policy: RestartPolicy, *, pool: HostPool | None = None
    ) -> None:
        """`ranks`: node_rank -> global ranks there. `pool`: from whom the hosts of another start are chosen, and who
        has chosen these; None = there are no others."""
        self._pool = pool
        self.losses: dict[int, str] = {}  # hosts that have gone without a result, cannot start again or leave, and why
        self.leaving: set[int] = set()  # of them, those whose agent got a signal; not started on again
        self.may_go_on = True  # nobody wants the job to end
        self.goes_on = False  # the job is over on these hosts, and goes on on those that the pool has chosen
        self.attempt = policy.first_attempt
        self.begun = self.attempt  # the last attempt that has workers
        self._job_id, self._ranks, self._nodes, self._policy = job_id, ranks, set(ranks), policy
        self._busy = set(self._nodes)  # those that have not ended their part of the attempt
        self._unready = set(self._nodes)  # those that could not start their workers again yet
        self._done: dict[int, int] = {}  # rank -> node of those that have finished in this attempt
        self._absent: set[int] = set()  # those of them that never joined the world
        self._come: set[int] = set()  # those of hosts that have ended which joined it
        self._cause = ""  # which ranks had finished before, where that is why the first one has failed
        self._kept: FailureReport | None = None  # the first failure of an attempt that goes on all the same
        self._is_last = False
        self._has_begun = self.attempt > 0  # a rank has joined or made progress, or the failed one ran for a while
        self.report: FailureReport | None = None  # of the current attempt; of the last one when the job is over
        self.is_over = False

    def hear(self, node_rank: int, message: Message) -> list[Message]:
        """Take one of `REPORTS` from a host; what is of another attempt is left out (ValueError: no host says this)."""
        kind, attempt, own = message.get("type"), message.get("attempt"), self._ranks[node_rank]
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
        if pool is None or self._policy.restarts_done(self.begun) >= self._policy.max_restarts:
            return False
        hosts = pool.chosen
        return pool.lose([hosts[node] for node in self.losses], [hosts[node] for node in self.leaving])


class OwnLink:
    """What joins a coordinator and the agent of the job's only host in one process. Owned by one thread; `close` it."""

    def __init__(self, coordinator: Coordinator, node_rank: int) -> None:
        self.orders = Inbox()  # what the coordinator says
        self._coordinator, self._node_rank = coordinator, node_rank

    def pass_on(self, message: Message) -> None:
        for order in self._coordinator.hear(self._node_rank, message):
            self.orders.post(order)

    def close(self) -> None:
        self.orders.close()


def _after(cause: str, failure: JobFailure) -> JobFailure:
    then = failure.reason.replace(" failed first: ", " then failed: ", 1)
    return replace(failure, reason=f"{cause}; {then}")
