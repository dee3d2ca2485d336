"""The agent's event loop: starts the workers of one host, watches them, and ends them all when one fails anywhere.

The job's coordinator is told what happens here, and obeyed: how the job failed, whether it starts again and when it is
over, it says to all hosts the same, also where there is only one. A host that has failed stops its own workers at once
and does not wait to be told. Observers (console, event log, scheduler's record) are told of every moment."""

from __future__ import annotations

import contextlib
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.attempt import Attempt, HostResult, OwnProcesses, error_file, keep_logs, scheduler_spec, worker_specs
from msrun.agent.evidence import STACK_WAIT_S, MemoryKillWatch, explain_end, explain_limit
from msrun.agent.observer import Observers
from msrun.agent.processes import process_control
from msrun.agent.processes.process_control import describe_status, exit_code_of, signal_name
from msrun.agent.processes.progress_board import ProgressBoard
from msrun.agent.processes.server_handle import ForkServerHandle
from msrun.agent.processes.terminal import RankTerminal
from msrun.agent.signals import SignalPipe
from msrun.agent.timers import Timers
from msrun.agent.watch import JobWatch
from msrun.cluster.failure import FailureReport, fault_of_job, read_report
from msrun.cluster.membership import Decision, Membership, WorkerState
from msrun.cluster.messages import Channel, Inbox, Message
from msrun.errors import (
    ClusterError,
    HangTimeout,
    Interrupted,
    MsrunError,
    OwnProcessLost,
    PeerFailed,
    RendezvousTimeout,
    interruption,
)
from msrun.planning.environment import blas_threads
from msrun.planning.hosts import name_ranks
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.record import encode_record
from msrun.planning.spec import explain_no_tests

OVERDUE_S = 3.0  # how long past its grace a stop may take before the fork server itself is killed
SWEEP_OVERDUE_S = 10.0  # how long the fork server may take to end what an attempt left behind
LOOKS_PER_LIMIT = 4  # how often to look, within the time that a process of msrun's own may be stopped, whether one is
STORE_OVERDUE_S = 10.0  # how long the scheduler may take for a fresh store
SCHEDULER_END_S = 3.0  # how long the scheduler may take to end by itself once its channel is closed: for its last lines
OTHERS_LINE_S = 2.0  # how long the other hosts may take to end before that is worth a line
ELSEWHERE_S = 10.0  # how long a host whose ranks all wait lets others speak first; at most half of the limit


class ServerState(Enum):
    """How far the fork server is."""

    FRESH = "nothing was started"
    USED = "it has started something"
    RESTS = "it has ended this part of the job, and waits for the next"
    GONE = "it has ended"


_TIMERS = ("start", "stop", "stacks", "elsewhere", "sweep", "renew", "restart", "store")
"""Of an attempt, each until something that has to come; none is set once nothing runs here any more."""


class Supervisor:
    """Runs one HostPlan to the end of the job. Single-threaded; use once."""

    def __init__(
        self,
        plan: LaunchPlan,
        host: HostPlan,
        start_own: Callable[[], tuple[ForkServerHandle, Channel]],
        board: ProgressBoard,
        observers: Observers,
        *,
        orders: Inbox,
        send: Callable[[Message], None],
        describe: Callable[[Attempt], FailureReport],
        caller: Mapping[str, str],
        strangers: Collection[int],
        home: str,
        stopped_limit_s: float,
        stop_self: Callable[[], None] | None,
        terminal: RankTerminal | None = None,
        check_again: Callable[[Collection[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start_own`: starts a fork server, which will start the scheduler at the channel's other end, also when one
        was lost. `orders`, `send`: from and to the coordinator. `describe`: how an attempt failed on this host, but for
        whether it may be repeated. `check_again`: called before a restart, with processes that could not be ended;
        raises MsrunError. `strangers`: children of this process that were there before the job. `home`: as for
        `OwnProcesses`. `stopped_limit_s`: how long a process of msrun's own may be stopped by a signal. `stop_self`:
        what Ctrl-Z does to this process; None = nothing. `terminal`: of the rank here that the user talks to."""
        self._plan, self._host, self._caller, self._strangers = plan, host, caller, strangers
        self._start_own, self._check_again, self._describe = start_own, check_again, describe
        self._board, self._observers, self._tell = board, observers, observers.tell
        self._orders, self._send, self._terminal = orders, send, terminal
        self._stopped_limit_s = stopped_limit_s
        self._timers = Timers(clock)
        self._watch = JobWatch(plan, host, board, self._timers, self._end_stuck, self._tell)
        self._stop_self = stop_self
        self._memory_kills = MemoryKillWatch()
        self._logs = {worker.global_rank: worker.last_words_path for worker in host.workers}
        self._past: list[Attempt] = []
        self._attempt = self._new_attempt()
        self._is_last = False  # nothing may be started again here: msrun was told to end the job, or this host cannot
        self._interrupt: Interrupted | None = None  # the first signal that was to end the job
        self._is_alone = False  # the coordinator has gone
        self._report: FailureReport | None = None
        """How the last attempt failed, as the coordinator has it; None when it did not fail, or nobody could say."""
        self._own = OwnProcesses(plan, home)
        self.goes_on = False  # the job goes on after this part of it, on other hosts: the fork server is kept for that
        self._fresh_store_of = 0
        self._survivors: tuple[int, ...] = ()
        self._start_method = ""
        self.is_over = False
        self._server_is = ServerState.FRESH
        self._early_signals: list[int] = []  # to be passed on; they came before every worker had started
        self._server, self._scheduler = start_own()

    def run(self, signals: SignalPipe) -> HostResult:
        """Start everything, wait for the end and leave nothing behind. `signals`: closed by the caller."""
        with selectors.DefaultSelector() as selector:
            self.begin(signals, selector)
            while not self.is_over:
                self.turn(self._timers.time_left_s())
            self._tell("over", reason=self._attempt.end_reason())
            self._scheduler.close()
            self._finish()
        return self.result

    def begin(self, signals: SignalPipe, selector: selectors.BaseSelector) -> None:
        """Register everything that is heard, and have the fork server prepare; for `run`, and for tests."""
        self._signals, self._selector = signals, selector
        if self._observers.tick_s is not None:
            self._timers.every("tick", self._observers.tick_s, lambda: self._observers.tick(self._attempt.membership))
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._orders, selectors.EVENT_READ, self._on_orders)
        if self._terminal is not None:
            self._terminal.register(self._selector)
        self._tell("preparing", preload=list(self._host.preload))
        self._prepare()

    def turn(self, limit_s: float | None) -> None:
        """Do what has come, or comes within a limit, and what is due; for `run`, and for tests."""
        for key, _ in self._selector.select(limit_s):
            key.data()
        self._timers.run_due()

    @property
    def result(self) -> HostResult:
        return HostResult((*self._past, self._attempt), self._survivors, self._report)

    def take_server(self) -> ForkServerHandle | None:
        """Return the fork server for the next part of the job, once this one is over; None: it has ended."""
        return self._server if self._server_is is ServerState.RESTS else None

    def _new_attempt(self) -> Attempt:
        number = self._host.first_attempt + len(self._past)
        attempt = Attempt(number, Membership(worker.global_rank for worker in self._host.workers))
        self._watch.membership = attempt.membership
        return attempt

    # -- to the coordinator -------------------------------------------------------------------------------------------

    def _describe_failure(self) -> FailureReport:
        attempt = self._attempt
        fault = attempt.fault
        is_unfit = bool(self._past) and not attempt.are_workers_asked_for and not isinstance(fault, Interrupted)
        signum = fault.signum if isinstance(fault, Interrupted) else 0
        can_restart = attempt.is_bearable and not self._is_last
        return replace(self._describe(attempt), can_restart=can_restart, is_unfit=is_unfit, signum=signum)

    def _report_failure(self, **changes: Any) -> None:
        """The attempt has failed; a failure elsewhere is known there, unless this host has a word of its own to say."""
        if self._attempt.has_reported or (isinstance(self._attempt.fault, PeerFailed) and not changes):
            return
        self._attempt.has_reported = True
        report = encode_record(replace(self._describe_failure(), **changes))
        self._send({"type": "failed", "attempt": self._attempt.number, "report": report})

    def _end_part(self) -> None:
        """Nothing runs here any more: the coordinator says when the job is over, or starts again."""
        attempt = self._attempt
        self._watch.stop()
        self._timers.cancel(*_TIMERS)
        attempt.begins_idle = False
        if self._is_alone:
            self.is_over = True
            return
        if not attempt.has_ended and not attempt.has_failed:
            text = "all workers on this host have finished; waiting for those of the other hosts"
            self._timers.after("others", OTHERS_LINE_S, lambda: self._tell("waiting", text=text))
        attempt.has_ended = True
        is_own = attempt.has_reported and not isinstance(attempt.fault, PeerFailed)
        report = encode_record(self._describe_failure()) if is_own else None  # now that all logs are whole
        ended = {"type": "ended", "attempt": attempt.number, "can_continue": not self._is_last, "report": report}
        self._send({**ended, "come": self._watch.come(), "has_begun": self._watch.has_begun()})

    # -- from the coordinator -----------------------------------------------------------------------------------------

    def _on_orders(self) -> None:
        for message in self._orders.take():
            try:
                self._obey(message)
            except (ValueError, KeyError) as error:
                said = f"the coordinator says what cannot be read ({error})"
                self._on_coordinator_lost(ClusterError(f"{said}: install the same msrun on all hosts"))

    def _obey(self, message: Message) -> None:
        attempt = self._attempt
        is_now = message.get("attempt") == attempt.number
        match message["type"]:
            case "stop" if is_now:
                self._on_failed_elsewhere(read_report(message["report"]), goes_on=message["goes_on"])
            case "restart":
                self._begin_again(message["delay_s"])
                if self._interrupt is not None:  # it came when this was decided already
                    self._fail(self._interrupt)
            case "start" if is_now and not attempt.has_failed:
                self._limit_start()
                self._start_workers()
            case "absent" if is_now and not attempt.has_ended:  # of its own ranks this host knows
                others = tuple(rank for rank in message["ranks"] if rank not in attempt.membership.members)
                if others and not attempt.membership.is_stopping:
                    self._watch.note_absent(others)
            case "over":
                self.goes_on = message.get("goes_on") is True and self._interrupt is None
                self._report = report = read_report(message["report"]) if message["report"] else None
                if report is None:  # what came later, such as an interrupt after the last worker's end, changes nothing
                    attempt.fault = None
                elif not attempt.has_failed:  # the last host's end has shown it
                    attempt.fault = PeerFailed(report.failure.reason, report.failure.exit_code)
                self.is_over = True
            case "lost":
                self._on_coordinator_lost(ClusterError(message["reason"]))

    def _on_failed_elsewhere(self, report: FailureReport, *, goes_on: bool) -> None:
        """The job has failed; on this host, where the report is its own. `goes_on`: it will start again."""
        self._report = report
        self._timers.cancel("others", "elsewhere")
        if report.node_rank == self._host.node_rank:
            return
        attempt, reason = self._attempt, report.failure.reason
        if not attempt.has_failed:
            attempt.doing = self._watch.doing()
        attempt.fault = PeerFailed(reason, report.failure.exit_code, report.signum)
        if attempt.has_ended or self._timers.is_set("stacks"):
            return
        if report.is_hang and attempt.membership.count(WorkerState.RUNNING):
            self._request_stacks(lambda: self._stop(reason))
        elif goes_on and not self._is_last and not self._past and not attempt.are_workers_asked_for:
            attempt.begins_idle = True
        else:
            self._stop(reason)

    def _on_coordinator_lost(self, error: ClusterError) -> None:
        self._is_alone = True
        if self._attempt.has_ended:
            if not self._attempt.has_failed:
                self._attempt.fault = error
            self.is_over = True
        else:
            self._is_last = True
            self._fail(error)

    # -- start --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._selector.register(self._server.channel, selectors.EVENT_READ, self._on_server)
        self._selector.register(self._scheduler, selectors.EVENT_READ, self._on_scheduler)
        self._limit_start()
        self._timers.every("own", self._stopped_limit_s / LOOKS_PER_LIMIT, self._look_at_own)
        self._server.send(
            "prepare",
            preload=list(self._host.preload),
            start_method=self._host.start_method,
            run_dir=self._plan.run_dir,
            blas_threads=blas_threads(self._caller, self._host.common_env),
        )

    def _on_ready(self, start_method: str, reason: str, prepare_s: float) -> None:
        if self._attempt.has_failed and not self._attempt.begins_idle:  # it has ended before it began
            return
        self._start_method = start_method
        if start_method == "exec" and self._host.start_method == "fork":
            self._fail(ClusterError(f"--start_method fork: not possible here: {reason}"))
            return
        self._tell("ready", start_method=start_method, reason=reason, prepare_s=prepare_s)
        run_dir = self._plan.run_dir
        try:
            # Not earlier: from here on the fork server removes the folder when this process is killed.
            Path(run_dir).mkdir(mode=contract.DIRECTORY_MODE)
            self._board.create()
        except OSError as error:
            self._fail(ClusterError(f"cannot make {run_dir}: {error.strerror}; set TMPDIR to another folder"))
            return
        self._server_is = ServerState.USED
        self._server.start([scheduler_spec(self._plan)])
        if self._past:
            self._await_store()
        elif not self._attempt.begins_idle:
            self._start_workers()

    def _start_workers(self) -> None:
        plan, use_exec = self._plan, self._start_method == "exec"
        workers = worker_specs(plan, self._host, self._caller, attempt=self._attempt.number, use_exec=use_exec)
        if self._terminal is not None:
            try:
                workers = self._terminal.given_to(workers)
            except OSError as error:
                where = f"cannot make a terminal on {self._host.name}: {error.strerror}"
                self._fail(ClusterError(f"--interactive: {where}"))
                return
        self._attempt.are_workers_asked_for = True
        self._server.start(workers)

    def _look_at_own(self) -> None:
        if error := self._own.look_for_stopped(self._server.pid, time.monotonic(), self._stopped_limit_s):
            self._fail(error)

    def _limit_start(self) -> None:
        if self._plan.cluster_time_out_s >= 0:
            self._timers.after("start", self._plan.cluster_time_out_s, self._on_late_start)

    def _on_late_start(self) -> None:
        missing = self._attempt.membership.ranks_in(WorkerState.PLANNED)
        how_many = f"{len(missing)} of {len(self._host.workers)} workers were not started in time on {self._host.name}"
        ranks = f"(ranks {', '.join(map(str, missing))}); {self._own.describe_log()}"
        self._fail(RendezvousTimeout(f"--cluster_time_out {self._plan.cluster_time_out_s}: {how_many} {ranks}"))

    # -- events -------------------------------------------------------------------------------------------------

    def _on_server(self) -> None:
        for message in self._server.receive():
            self._hear(message)
        if self._server.channel.is_closed:
            self._unregister(self._server.channel)
            if self._server_is in (ServerState.FRESH, ServerState.USED):
                (self._bury_server if self.is_over else self._on_server_lost)()  # what comes then changes nothing

    def _unregister(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError):  # it is lost, and was buried meanwhile
            self._selector.unregister(channel)

    def _hear(self, message: Message) -> None:
        attempt = self._attempt
        match message:
            case {"type": "ready", "start_method": start_method, "reason": reason, "prepare_s": prepare_s}:
                self._on_ready(start_method, reason, prepare_s)
            case {"type": "started", "process_id": rank, "pid": pid, "at": at}:
                self._on_started(rank, pid, at)
            case {"type": "exited", "process_id": rank, "status": status} if rank < 0:
                self._on_own_exited(rank, status)
            case {"type": "exited"}:
                self._on_exited(message)
            case {"type": "told", "attempt": attempt.number, "not_started": not_started}:  # else all had ended before
                if attempt.membership.told(not_started) is Decision.FINISH and self._timers.is_set("stop"):
                    self._end_part()
            case {"type": "killed", "process_ids": ranks, "grace_s": grace_s}:
                why = f"--grace {grace_s:g} s was over" if grace_s else "by a second signal"
                for rank in ranks:
                    attempt.membership.members[rank].hint = f"killed: {why}"
                remedy = "; give more, if their work is to end first" if grace_s else ""
                self._tell("note", text=f"{name_ranks(ranks)} killed: {why}{remedy}")
            case {"type": "cannot_start", "reason": reason}:
                self._fail(ClusterError(f"{reason}, on {self._host.name}"))
            case {"type": "swept", "survivors": survivors}:
                self._timers.cancel("sweep")
                if not self.is_over and not attempt.has_failed:
                    self._leave_attempt(survivors)
                    if not attempt.has_failed:
                        self._await_store()
            case {"type": "finished", "survivors": survivors}:
                self._survivors = tuple(survivors)
                self._server_is = ServerState.RESTS if self.goes_on else ServerState.GONE

    def _on_started(self, rank: int, pid: int, at: float) -> None:
        if rank < 0:
            self._own.started(rank, pid, self._tell)
            if self._attempt.begins_idle and self._own.scheduler_runs:
                self._end_part()
            return
        membership = self._attempt.membership
        membership.started(rank, pid, at)
        self._tell("started", global_rank=rank, pid=pid)
        for signum in self._early_signals:
            self._server.send("signal", process_ids=[rank], signum=signum)
        if not membership.count(WorkerState.PLANNED):
            self._early_signals.clear()
            self._timers.cancel("start")
            self._tell("running", world_size=self._plan.world_size)
            self._watch.start()

    def _on_own_exited(self, process_id: int, status: int) -> None:
        attempt = self._attempt
        run = attempt.are_workers_asked_for and not attempt.membership.is_stopping and not attempt.membership.is_over
        error = self._own.exited(process_id, status, do_workers_run=run, has_begun=self._has_begun)
        if error and not self.is_over:
            self._fail(error)

    def _on_exited(self, message: Message) -> None:
        rank, status = message["process_id"], message["status"]
        if self._terminal is not None and rank == self._terminal.global_rank:
            self._terminal.end_attempt()  # its last words are in its log then
        attempt, membership, how = self._attempt, self._attempt.membership, describe_status(status)
        attempt.peak_bytes[rank] = message["peak_bytes"]
        failed_before = membership.first_failure
        no_tests = explain_no_tests(self._host.program, exit_code_of(status))
        decision = membership.exited(rank, status, message["at"], others_go_on=bool(no_tests) or self._plan.keep_going)
        member, log = membership.members[rank], self._logs[rank]
        if member.state is WorkerState.FAILED and status == signal.SIGKILL:
            member.hint = explain_limit(status, log) or self._memory_kills.explain(member.pid)
        elif no_tests:
            member.hint = no_tests
        elif member.state is WorkerState.FAILED:
            recorded = error_file(self._plan, rank, attempt.number)
            member.hint = explain_end(status, log, rank, rank == self._plan.interactive_rank, recorded)
        if membership.first_failure is not failed_before:
            attempt.doing, attempt.left = self._watch.doing(), self._watch.left()
            self._report_failure()
        self._tell("exited", global_rank=rank, how=how, status=status, state=member.state.value)
        if member.state is WorkerState.DONE and not membership.is_stopping:
            if not attempt.has_failed and not self._is_alone:  # one of another host may fail for the want of it
                has_come = self._board.read(rank).has_come
                self._send({"type": "done", "attempt": attempt.number, "rank": rank, "has_come": has_come})
            self._watch.note_done(rank)
            if attempt.has_failed:
                return
        if decision is Decision.STOP:
            self._stop(f"rank {rank} ended with {how}")
        elif decision is Decision.FINISH:
            self._end_part()

    def _on_server_lost(self) -> None:
        self._end_pause()
        attempt = self._attempt
        if not attempt.has_failed:
            has_ended = self._server.channel.is_closed and self._server.wait(OVERDUE_S)
            status = self._server.process.wait_status if has_ended else None
            attempt.fault = self._own.server_ended(status, has_begun=self._has_begun)
        self._report_failure()  # before the ranks that miss those here tell of it
        self._bury_server()
        attempt.membership.told()
        for rank in attempt.membership.ranks_in(WorkerState.RUNNING, WorkerState.PLANNED):
            attempt.membership.exited(rank, signal.SIGKILL, time.monotonic())
        self._end_part()

    @property
    def _has_begun(self) -> bool:
        """Whether the job has run before, or a rank here has joined the world or reported progress."""
        return bool(self._past) or self._watch.has_begun()

    def _bury_server(self) -> None:
        """End the fork server, its workers with it, and what they had started: that comes to us, who adopt orphans."""
        self._server.kill()
        has_ended = self._server.wait(OVERDUE_S)
        left = self._own.end_orphans(self._strangers, OVERDUE_S)
        self._survivors = tuple(left if has_ended else {*left, self._server.pid})
        self._server_is = ServerState.GONE
        self._unregister(self._server.channel)  # what it has said of this attempt is not for the next
        self._unregister(self._scheduler)
        if self._terminal is not None:
            self._terminal.end_attempt()

    def _on_signals(self) -> None:
        for signum in self._signals.read():
            if signum == signal.SIGTSTP:
                self._pause()
            elif signum == signal.SIGCONT and (self._timers.are_paused or signum not in self._plan.forward_signals):
                self._go_on()
            else:
                self._on_signal(signum)

    def _pause(self) -> None:
        """Stop as Ctrl-Z wants, workers by SIGSTOP: the kernel keeps SIGTSTP from them. No limit counts a pause."""
        if not self._timers.are_paused:
            self._server.send("pause")
            self._timers.pause()
        if self._stop_self is not None:
            self._stop_self()
            self._go_on()

    def _go_on(self) -> None:
        if self._timers.are_paused:
            self._server.send("resume")
            self._end_pause()

    def _end_pause(self) -> None:
        if self._timers.are_paused:
            self._timers.resume()
            self._watch.note_pause()

    def _on_signal(self, signum: int) -> None:
        attempt = self._attempt
        if signum in self._plan.forward_signals:
            running = list(attempt.membership.running())
            if attempt.membership.count(WorkerState.PLANNED):
                self._early_signals.append(signum)
            self._tell("signal", name=signal_name(signum), global_ranks=running)
            self._server.send("signal", process_ids=running, signum=signum)
            return
        if attempt.has_ended and self._is_last:  # told twice: the other hosts are not waited for
            self.is_over = True
            return
        self._is_last = True
        self._interrupt = interrupt = self._interrupt or interruption(signum, self._plan.time_limit_s)
        if signum == signal.SIGINT and self._timers.is_set("stop"):
            self._server.send("stop", signum=int(signal.SIGKILL), grace_s=0.0, attempt=attempt.number)
            return
        if isinstance(attempt.fault, PeerFailed):  # several hosts may leave at once
            failure = fault_of_job(self._plan.job_id, str(interrupt), interrupt.exit_code)
            self._report_failure(failure=failure, signum=interrupt.signum)
        self._fail(interrupt)

    # -- hangs --------------------------------------------------------------------------------------------------

    def _end_stuck(self, error: ClusterError, lagging: tuple[int, ...]) -> None:
        """End workers that wait for ever. Where all wait in a collective, another host can name whom they wait for."""
        running = self._attempt.membership.running()
        if isinstance(error, HangTimeout) and all(self._board.read(rank).is_waiting for rank in running):
            self._watch.stop()
            self._let_others_speak(lambda: self._end_now(error, lagging))
        else:
            self._end_now(error, lagging)

    def _let_others_speak(self, then: Callable[[], None]) -> None:
        if not self._plan.fleet:  # there is no other host
            then()
        else:
            self._timers.after("elsewhere", min(self._plan.hang_time_out_s / 2, ELSEWHERE_S), then)

    def _end_now(self, error: ClusterError, lagging: tuple[int, ...]) -> None:
        """End workers that wait for ever, after they had a moment to write their stacks."""
        attempt = self._attempt
        attempt.fault, attempt.lagging, attempt.doing = error, lagging, self._watch.doing()
        is_anyone_left = attempt.membership.count(WorkerState.RUNNING) > 0
        if not isinstance(error, HangTimeout) or not is_anyone_left:  # of a hang the stacks tell more
            self._report_failure()
        self._tell("hang", reason=str(error), lagging=list(lagging))
        if is_anyone_left:
            self._request_stacks(self._end_after_stacks)
        else:
            self._stop(str(error))

    def _request_stacks(self, then: Callable[[], None]) -> None:
        self._watch.stop()
        self._attempt.membership.is_stopping = True
        self._watch.request_stacks("the job is stuck; stacks of all threads:")
        self._timers.after("stacks", STACK_WAIT_S, then)

    def _end_after_stacks(self) -> None:
        """Of plain torch only the stacks tell whether all ranks wait for one of another host."""
        if self._watch.do_all_wait():
            self._let_others_speak(self._end_explained)
        else:
            self._end_explained()

    def _end_explained(self) -> None:
        if found := self._watch.explain_hang(self._attempt.fault):
            self._attempt.fault, self._attempt.lagging, self._attempt.doing = found
        self._report_failure()
        self._stop("the job is stuck")

    # -- end ----------------------------------------------------------------------------------------------------

    def _fail(self, fault: MsrunError) -> None:
        if not self._attempt.has_failed:
            self._attempt.fault = fault
            self._attempt.doing = self._watch.doing()
            self._report_failure()
        self._stop(str(fault))

    def _stop(self, reason: str) -> None:
        if self._timers.is_set("stop"):
            return
        attempt = self._attempt
        self._end_pause()
        self._tell("stopping", reason=reason)
        self._watch.stop()
        self._timers.cancel("start", "stacks", "sweep", "renew", "restart", "store")
        if not attempt.are_workers_asked_for:
            self._is_last |= not isinstance(attempt.fault, OwnProcessLost)
            self._end_part()
        elif attempt.membership.stop() is Decision.FINISH:
            self._end_part()
        else:
            grace_s = self._plan.grace_s
            self._timers.after("stop", grace_s + OVERDUE_S, self._on_server_lost)
            signum = attempt.fault.signum if isinstance(attempt.fault, Interrupted | PeerFailed) else 0
            self._server.send("stop", signum=signum or int(signal.SIGTERM), grace_s=grace_s, attempt=attempt.number)

    def _begin_again(self, delay_s: float) -> None:
        self._restart_delay_s, self._report = delay_s, None
        is_whole = self._own.scheduler_runs and self._server_is is ServerState.USED
        is_whole = is_whole and not isinstance(self._attempt.fault, OwnProcessLost)
        self._past.append(self._attempt)
        self._attempt = self._new_attempt()
        if is_whole:
            self._timers.after("sweep", SWEEP_OVERDUE_S, self._on_server_lost)
            self._server.send("sweep")
        else:
            self._timers.after("renew", 0.0, self._renew)  # not while messages of the old one are worked through

    def _renew(self) -> None:
        """Take a new fork server and a new scheduler in the place of those of which one was lost."""
        if self._server_is is not ServerState.GONE:
            self._bury_server()
        self._board.close()
        shutil.rmtree(self._plan.run_dir, ignore_errors=True)
        try:
            self._check_again(self._survivors)
            server, scheduler = self._start_own()
        except MsrunError as error:
            self._fail(ClusterError(f"cannot start again: {error}"))
            return
        self._scheduler.close()
        self._server.end(OVERDUE_S)
        self._server, self._scheduler = server, scheduler
        self._own.forget()
        self._server_is = ServerState.FRESH
        self._leave_attempt(self._survivors)
        if not self._attempt.has_failed:
            self._prepare()

    def _leave_attempt(self, survivors: Collection[int]) -> None:
        """Put away what the last attempt has left; when that fails, this attempt does."""
        past, number, delay_s = self._past[-1], self._attempt.number, self._restart_delay_s
        try:
            self._check_again(survivors)
            # Only now has everything been written that the attempt had to say.
            reason = past.end_reason()
            self._tell("restarting", attempt=number, delay_s=delay_s, reason=reason, global_ranks=past.guilty)
            keep_logs(self._host.log_paths, number - 1)
        except MsrunError as error:
            self._fail(ClusterError(f"cannot start again: {error}"))
        else:
            self._watch.reset()
            self._timers.after("restart", delay_s, self._restart)

    def _await_store(self) -> None:
        silent = OwnProcessLost(f"cannot start again: the scheduler has not answered for {STORE_OVERDUE_S:g} s")
        self._timers.after("store", self._restart_delay_s + STORE_OVERDUE_S, lambda: self._fail(silent))

    def _on_scheduler(self) -> None:
        for message in self._scheduler.receive():
            if message["type"] == "store_ready":
                self._fresh_store_of = message["attempt"]
                self._restart()
        if self._scheduler.is_closed:  # that it has ended, the fork server will say
            self._unregister(self._scheduler)

    def _restart(self) -> None:
        """Start again once the delay is over and the store has nothing of the last attempt, whichever comes last."""
        is_fresh = self._timers.is_set("store") and self._fresh_store_of == self._attempt.number
        if is_fresh and not self._timers.is_set("restart"):
            self._timers.cancel("store")
            self._send({"type": "ready", "attempt": self._attempt.number, "clock_s": time.time()})

    def _finish(self) -> None:
        if self._server_is is ServerState.FRESH:
            self._server.kill()  # it may be deep in a long import, and has nothing to clean up
        elif self._server_is is ServerState.USED:
            self._hear_server(SCHEDULER_END_S, lambda: not self._own.scheduler_runs)  # for its last lines
            self._server.send("rest" if self.goes_on else "finish")
            self._hear_server(2 * OVERDUE_S, lambda: self._server_is is not ServerState.USED)
        if self.take_server() is None:
            self._server.end(OVERDUE_S)
        kept = [*self._strangers, *([server.pid] if (server := self.take_server()) else [])]
        left = process_control.kill_descendants(OVERDUE_S, kept)
        self._survivors = tuple(sorted({*self._survivors, *left}))

    def _hear_server(self, limit_s: float, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.channel, selectors.EVENT_READ)
            while not is_done() and not self._server.channel.is_closed and time.monotonic() < end:
                if selector.select(max(0.0, end - time.monotonic())):
                    self._on_server()
