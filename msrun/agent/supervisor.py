"""The agent's event loop: starts the workers of one host, watches them, and ends them all when one of them fails.

Nothing is polled: the loop sleeps until the fork server reports, a signal arrives or a deadline passes. Observers
(console, event log, scheduler's record) are told of every moment and may ask for a regular tick.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msrun import contract
from msrun.agent import process_control
from msrun.agent.child import SCHEDULER_ID, ProcessSpec
from msrun.agent.server_handle import ForkServerHandle
from msrun.agent.signals import SignalPipe
from msrun.agent.wait_status import describe_status
from msrun.cluster.membership import Decision, Membership, WorkerState
from msrun.cluster.messages import Message
from msrun.errors import ClusterError, Interrupted, MsrunError, RendezvousTimeout
from msrun.planning.environment import blas_threads, restored_environment
from msrun.planning.plan import HostPlan, LaunchPlan

OVERDUE_S = 3.0
"""How long past its grace a stop may take before the fork server itself is killed."""
SCHEDULER_END_S = 1.0
"""How long the scheduler may take to end by itself once its channel is closed."""


class Observer(Protocol):
    """Told of every moment of the job."""

    tick_s: float | None
    """Ask for `tick` this often while the job runs; None = never."""

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something happened: preparing, ready, started, running, exited, stopping, over."""

    def tick(self, membership: Membership) -> None:
        """Regular moment, if asked for."""


@dataclass(frozen=True)
class HostResult:
    """What happened on one host."""

    membership: Membership
    fault: MsrunError | None
    """Why msrun itself ended the job; None when the workers ended it."""
    survivors: tuple[int, ...]
    """Processes that could not be ended (uninterruptible sleep)."""
    peak_bytes: Mapping[int, float]
    """Peak resident memory per ended worker."""


class Supervisor:
    """Runs one HostPlan to its end. Single-threaded; use once."""

    def __init__(
        self,
        plan: LaunchPlan,
        host: HostPlan,
        server: ForkServerHandle,
        observers: Sequence[Observer],
        *,
        caller: Mapping[str, str],
    ) -> None:
        self._caller = caller
        self._plan = plan
        self._host = host
        self._server = server
        self._observers = observers
        self._membership = Membership(worker.global_rank for worker in host.workers)
        self._fault: MsrunError | None = None
        self._survivors: tuple[int, ...] = ()
        self._peak_bytes: dict[int, float] = {}
        self._over = False
        self._was_anything_started = False
        self._scheduler_runs = False
        self._server_finished = False
        self._start_deadline: float | None = None
        self._stop_deadline: float | None = None
        self._next_tick = 0.0
        ticks = [observer.tick_s for observer in observers if observer.tick_s is not None]
        self._tick_s = min(ticks) if ticks else None

    def run(self, signals: SignalPipe, close_scheduler: Callable[[], None]) -> HostResult:
        """Start everything, wait for the end and leave nothing behind.

        Args:
            signals: what may have come before, too; closed by the caller.
            close_scheduler: ends the scheduler once all workers have ended.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.channel, selectors.EVENT_READ)
            selector.register(signals, selectors.EVENT_READ)
            self._prepare()
            while not self._over:
                for key, _ in selector.select(self._time_left()):
                    if key.fileobj is signals:
                        for signum in signals.read():
                            self._on_signal(signum)
                    else:
                        self._on_server()
                self._on_time()
            self._tell("over", reason=str(self._fault) if self._fault else self._end_reason())
            close_scheduler()
            self._finish()
        return HostResult(self._membership, self._fault, self._survivors, self._peak_bytes)

    # -- start --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if self._plan.cluster_time_out_s >= 0:
            self._start_deadline = time.monotonic() + self._plan.cluster_time_out_s
        self._tell("preparing", preload=list(self._host.preload))
        self._server.send(
            "prepare",
            preload=list(self._host.preload),
            start_method=self._host.start_method,
            run_dir=self._plan.run_dir,
            blas_threads=blas_threads(self._caller, self._host.common_env),
        )

    def _on_ready(self, message: Message) -> None:
        method = message["start_method"]
        if method == "exec" and self._host.start_method == "fork":
            self._fail(ClusterError(f"--start_method fork: not possible here: {message['reason']}"))
            return
        self._tell("ready", start_method=method, reason=message["reason"], prepare_s=message["prepare_s"])
        restored = restored_environment(self._caller)
        scheduler = ProcessSpec(SCHEDULER_ID, str(_scheduler_log(self._plan)))
        workers = [
            ProcessSpec(
                worker.global_rank,
                worker.log_path,
                self._host.program,
                method == "exec",
                {**restored, **worker.env},
            )
            for worker in self._host.workers
        ]
        self._was_anything_started = True
        self._server.start([scheduler, *workers])

    # -- events -------------------------------------------------------------------------------------------------

    def _on_server(self) -> None:
        for message in self._server.receive():
            kind = message["type"]
            if kind == "ready":
                self._on_ready(message)
            elif kind == "started":
                self._on_started(message)
            elif kind == "exited":
                self._on_exited(message)
            elif kind == "finished":
                self._survivors = tuple(message["survivors"])
                self._server_finished = True
        if self._server.channel.is_closed and not self._server_finished:
            self._on_server_lost()

    def _on_started(self, message: Message) -> None:
        rank, pid = message["process_id"], message["pid"]
        if rank == SCHEDULER_ID:
            self._scheduler_runs = True
            self._tell("scheduler", pid=pid)
            return
        self._membership.started(rank, pid, message["at"])
        self._tell("started", global_rank=rank, pid=pid)
        if not self._membership.count(WorkerState.PLANNED):
            self._start_deadline = None
            self._tell("running", world_size=self._plan.world_size)

    def _on_exited(self, message: Message) -> None:
        rank, status = message["process_id"], message["status"]
        if rank == SCHEDULER_ID:
            self._scheduler_runs = False
            if not self._over:
                how = describe_status(status)
                self._fail(ClusterError(f"the scheduler ended ({how}); its log: {_scheduler_log(self._plan)}"))
            return
        self._peak_bytes[rank] = message["peak_bytes"]
        decision = self._membership.exited(rank, status, message["at"])
        state = self._membership.members[rank].state
        self._tell("exited", global_rank=rank, how=describe_status(status), status=status, state=state.value)
        if decision is Decision.STOP:
            self._stop(f"rank {rank} ended with {describe_status(status)}")
        elif decision is Decision.FINISH:
            self._over = True

    def _on_server_lost(self) -> None:
        """The kernel kills the workers with their server; what they had started comes to us, as we adopt orphans."""
        self._server.kill()
        self._server.wait(OVERDUE_S)
        self._survivors = tuple(process_control.kill_descendants(OVERDUE_S))
        if self._fault is None:
            self._fault = ClusterError("the fork server ended unexpectedly; every worker was stopped with it")
        now = time.monotonic()
        for rank in self._membership.ranks_in(WorkerState.RUNNING, WorkerState.PLANNED):
            self._membership.is_stopping = True
            self._membership.exited(rank, signal.SIGKILL, now)
        self._server_finished = self._over = True

    def _on_signal(self, signum: int) -> None:
        if self._membership.is_stopping and signum == signal.SIGINT and self._stop_deadline is not None:
            self._server.send("stop", grace_s=0.0)
            return
        self._fail(Interrupted(f"stopped by {signal.Signals(signum).name}", signum))

    # -- end ----------------------------------------------------------------------------------------------------

    def _fail(self, fault: MsrunError) -> None:
        if self._fault is None and self._membership.first_failure is None:
            self._fault = fault
        self._stop(str(fault))

    def _stop(self, reason: str) -> None:
        if self._stop_deadline is not None:
            return
        self._tell("stopping", reason=reason)
        self._start_deadline = None
        if not self._membership.count(WorkerState.RUNNING) and not self._membership.count(WorkerState.DONE):
            self._over = True  # nothing was started
            return
        if self._membership.stop() is Decision.FINISH:
            self._over = True
            return
        self._stop_deadline = time.monotonic() + self._plan.grace_s + OVERDUE_S
        self._server.send("stop", grace_s=self._plan.grace_s)

    def _finish(self) -> None:
        if not self._was_anything_started:
            self._server.kill()  # it may be deep in a long import, and has nothing to clean up
        elif not self._server_finished:
            self._hear_server(SCHEDULER_END_S, lambda: not self._scheduler_runs)  # lets it write its last lines
            self._server.send("finish")
            self._hear_server(2 * OVERDUE_S, lambda: self._server_finished)
        if not self._server.wait(OVERDUE_S):
            self._server.kill()
            self._server.wait(OVERDUE_S)
        left = process_control.kill_descendants(OVERDUE_S)
        self._survivors = tuple(sorted({*self._survivors, *left}))

    def _hear_server(self, limit_s: float, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.channel, selectors.EVENT_READ)
            while not is_done() and not self._server.channel.is_closed and time.monotonic() < end:
                if selector.select(max(0.0, end - time.monotonic())):
                    self._on_server()

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._tick_s is not None and now >= self._next_tick:
            self._next_tick = now + self._tick_s
            for observer in self._observers:
                if observer.tick_s is not None:
                    observer.tick(self._membership)
        if self._start_deadline is not None and now > self._start_deadline:
            missing = self._membership.ranks_in(WorkerState.PLANNED)
            self._fail(
                RendezvousTimeout(
                    f"--cluster_time_out {self._plan.cluster_time_out_s}: {len(missing)} of "
                    f"{self._plan.world_size} workers were not started in time on {self._host.name} "
                    f"(ranks {', '.join(map(str, missing))}); see {_scheduler_log(self._plan)}"
                )
            )
        if self._stop_deadline is not None and now > self._stop_deadline:
            self._on_server_lost()

    def _time_left(self) -> float | None:
        moments = [moment for moment in (self._start_deadline, self._stop_deadline) if moment is not None]
        if self._tick_s is not None:
            moments.append(self._next_tick)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _end_reason(self) -> str:
        failure = self._membership.first_failure
        if failure is None:
            return "all workers ended with exit code 0"
        return f"rank {failure.global_rank} failed first: {describe_status(failure.wait_status)}"

    def _tell(self, kind: str, **fields: Any) -> None:
        for observer in self._observers:
            observer.note(kind, fields)


def _scheduler_log(plan: LaunchPlan) -> str:
    return f"{plan.log_dir}/{contract.SCHEDULER_LOG}"
