"""The agent's event loop on a host of a job that a coordinator leads: it is told what happens here, and obeyed.

A host that has failed stops its own workers at once and does not wait to be told. How the job failed, whether it starts
again and when it is over, the coordinator says, to all hosts the same.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import replace

from msrun.agent.attempt import Attempt
from msrun.agent.supervisor import Supervisor
from msrun.agent.watch.stacks import STACK_WAIT_S
from msrun.cluster.failure import FailureReport, read_report
from msrun.cluster.membership import WorkerState
from msrun.cluster.messages import Message
from msrun.cluster.own_thread import Inbox
from msrun.errors import ClusterError, HangTimeout, Interrupted, PeerFailed
from msrun.planning.record_json import encode_record

OTHERS_LINE_S = 2.0
"""How long the other hosts may take to end before that is worth a line."""
ELSEWHERE_S = 10.0
"""How long a host whose ranks all wait for others lets the other hosts speak first; at most half of the limit."""


class HostSupervisor(Supervisor):
    """Runs one HostPlan to the end of the whole job. Use once; `join` first."""

    report: FailureReport | None = None
    """How the last attempt failed, as the coordinator has it; None when it did not fail, or nobody could say."""

    def join(
        self, orders: Inbox, send: Callable[[Message], None], describe: Callable[[Attempt], FailureReport]
    ) -> None:
        """Take part in the job.

        Args:
            orders: what the coordinator says, see `cluster.coordinator`; `lost {reason}` when it has gone.
            send: tells the coordinator.
            describe: how an attempt failed on this host; leaves out whether it may be repeated.
        """
        self._inbox, self._send = orders, send
        self._describe = describe
        self._is_alone = False
        """The coordinator has gone."""
        self._has_ended = False
        """The others know that nothing runs here any more in this attempt."""
        self._reported = -1
        """The attempt whose failure was reported last."""

    # -- to the others ----------------------------------------------------------------------------------------------

    def _register_more(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._inbox, selectors.EVENT_READ, self._on_inbox)

    def _report_failure(self) -> None:
        attempt = self._attempt
        if self._reported == attempt.number or isinstance(attempt.fault, PeerFailed):
            return
        self._reported = attempt.number
        is_unfit = attempt.number > 0 and not self._are_workers_asked_for and not isinstance(attempt.fault, Interrupted)
        signum = attempt.fault.signum if isinstance(attempt.fault, Interrupted) else 0
        can_restart = self._attempts.can_restart
        report = replace(self._describe(attempt), can_restart=can_restart, is_unfit=is_unfit, signum=signum)
        self._send({"type": "failed", "attempt": attempt.number, "report": encode_record(report)})

    def _on_exited(self, message: Message) -> None:
        """Have the coordinator know who has finished: a rank of another host may fail for the want of it."""
        super()._on_exited(message)
        attempt = self._attempt
        member = attempt.membership.members.get(message["process_id"])
        if member is not None and member.state is WorkerState.DONE and not attempt.has_failed and not self._is_alone:
            has_come = member.global_rank in self._watch.come(attempt.membership)
            self._send({"type": "done", "attempt": attempt.number, "rank": member.global_rank, "has_come": has_come})

    def _end_attempt(self) -> None:
        self._watch.stop()
        self._timers.cancel("start", "stop", "stacks", "elsewhere")
        self._begins_idle = False
        self._tell_end(can_continue=not self._attempts.is_last)

    def _on_started(self, message: Message) -> None:
        super()._on_started(message)
        if self._begins_idle and self._own.scheduler_runs:
            self._begins_idle = False
            self._tell_end(can_continue=not self._attempts.is_last)

    def _end_here(self) -> None:
        self._begins_idle = False
        self._timers.cancel("start", "stop", "stacks", "elsewhere", "sweep", "renew", "restart", "store")
        self._attempts.is_last = True
        self._tell_end(can_continue=False)

    def _tell_end(self, *, can_continue: bool) -> None:
        if self._is_alone:
            self._over = True
            return
        if not self._has_ended and not self._attempt.has_failed:
            text = "all workers on this host have finished; waiting for those of the other hosts"
            self._timers.after("others", OTHERS_LINE_S, lambda: self._tell("waiting", text=text))
        self._has_ended = True
        self._send(
            {
                "type": "ended",
                "attempt": self._attempt.number,
                "can_continue": can_continue,
                "come": self._watch.come(self._attempt.membership),
                "has_begun": self._watch.has_begun(self._attempt.membership),
            }
        )

    def _start_again(self) -> None:
        self._send({"type": "ready", "attempt": self._attempt.number, "clock_s": time.time()})

    def _end_stuck(self, error: ClusterError, lagging: tuple[int, ...]) -> None:
        """Where all ranks wait in a collective, the one that they wait for is on another host, which can name it."""
        end_stuck = super()._end_stuck
        running = self._attempt.membership.running()
        if isinstance(error, HangTimeout) and all(self._board.read(rank).is_waiting for rank in running):
            self._watch.stop()
            self._timers.after("elsewhere", self._patience_s, lambda: end_stuck(error, lagging))
        else:
            end_stuck(error, lagging)

    def _end_after_stacks(self) -> None:
        """The same for plain torch, of which only the stacks tell."""
        end = super()._end_after_stacks
        if self._watch.do_all_wait(self._attempt):
            self._timers.after("elsewhere", self._patience_s, end)
        else:
            end()

    @property
    def _patience_s(self) -> float:
        if not self._plan.fleet:  # there is no other host
            return 0.0
        return min(self._plan.hang_time_out_s / 2, ELSEWHERE_S)

    # -- from the others --------------------------------------------------------------------------------------------

    def _on_inbox(self) -> None:
        for message in self._inbox.take():
            try:
                self._heed(message)
            except (ValueError, KeyError) as error:
                said = f"the coordinator says what cannot be read ({error})"
                self._on_lost(ClusterError(f"{said}: install the same msrun on all hosts"))

    def _heed(self, message: Message) -> None:
        kind = message["type"]
        is_now = message.get("attempt") == self._attempt.number
        if kind == "stop" and is_now:
            self._on_stop(read_report(message["report"]))
        elif kind == "restart":
            self._has_ended, self.report = False, None
            self._begin_again(message["delay_s"])
        elif kind == "start" and is_now and not self._attempt.has_failed:
            super()._start_again()
        elif kind == "absent" and is_now and not self._has_ended:
            self._on_absent(message["ranks"])
        elif kind == "over":
            self._on_over(read_report(message["report"]) if message["report"] else None)
        elif kind == "lost":
            self._on_lost(ClusterError(message["reason"]))

    def _on_stop(self, report: FailureReport) -> None:
        self.report = report
        self._timers.cancel("others", "elsewhere")
        if report.node_rank == self._host.node_rank:
            return
        attempt, reason = self._attempt, report.failure.reason
        if not attempt.has_failed:
            attempt.doing = self._watch.doing(attempt.membership)
        attempt.fault = PeerFailed(reason, report.failure.exit_code, report.signum)
        if self._has_ended or self._timers.is_set("stacks"):
            return
        if report.is_hang and attempt.membership.count(WorkerState.RUNNING):
            self._watch.stop()
            attempt.membership.is_stopping = True
            self._watch.request_stacks(attempt.membership, "the job is stuck; stacks of all threads:")
            self._timers.after("stacks", STACK_WAIT_S, lambda: self._stop(reason))
        elif self._is_wanted_again(report):
            self._begins_idle = True  # it goes on preparing, and starts no worker of this attempt
        else:
            self._stop(reason)

    def _is_wanted_again(self, report: FailureReport) -> bool:
        """Return whether this host prepares its first start still, and the job starts again after that failure."""
        if self._attempt.number or self._are_workers_asked_for or not report.can_restart:
            return False
        failure = report.failure
        return self._attempts.delay_after_s(failure.exit_code if failure.first_failure else None) is not None

    def _on_absent(self, global_ranks: list[int]) -> None:
        """Ranks of other hosts have ended with exit code 0 and never joined the world."""
        membership = self._attempt.membership
        if not membership.is_stopping:
            others = tuple(rank for rank in global_ranks if rank not in membership.members)
            self._watch.note_absent(membership, others, self._end_stuck)

    def _on_over(self, report: FailureReport | None) -> None:
        self.report = report
        if report is not None and not self._attempt.has_failed:  # the last host's end has shown it
            self._attempt.fault = PeerFailed(report.failure.reason, report.failure.exit_code)
        if report is None:  # what came later, such as an interrupt after the last worker's end, changes nothing
            self._attempt.fault = None
        self._over = True

    def _on_lost(self, error: ClusterError) -> None:
        self._is_alone = True
        if self._has_ended:
            if not self._attempt.has_failed:
                self._attempt.fault = error
            self._over = True
        else:
            self._attempts.is_last = True
            self._fail(error)

    def _on_signal(self, signum: int) -> None:
        if self._has_ended and self._attempts.is_last and signum not in self._plan.forward_signals:
            self._over = True  # told twice: the other hosts are not waited for
            return
        super()._on_signal(signum)
