"""The fork server: one clean, single-threaded process per host that imports once and forks every worker.

When it ends, the kernel kills every worker (see `child.become`); when the agent ends, it kills everything below it,
orphans of workers included, which it has adopted.

Protocol, over the channel to the agent:
    agent -> server   import {names}       begin {environment, stopped_limit_s, open_files}, with descriptors over
                      another socket
                      prepare {preload, start_method, run_dir, blas_threads}
                      start {processes}      stop {signum, grace_s, attempt}      signal {process_ids, signum}
                      pause {}               resume {}
                      sweep {}               finish {}           rest {}
    server -> agent   ready {start_method, reason, prepare_s}      started {process_id, pid, at}
                      killed {process_ids, grace_s}
                      exited {process_id, status, peak_bytes, at}  told {attempt, not_started}
                      cannot_start {reason}        swept {survivors}        finished {survivors}
Who has exited before `told`, ended by itself; who exits after it was told to end by `stop`.
Times are seconds of CLOCK_MONOTONIC, which all processes of a host share."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from msrun import contract
from msrun.agent.processes import process_control
from msrun.agent.processes.child import Given, become, set_environment
from msrun.agent.processes.main_module import Main
from msrun.agent.processes.process_control import Reaper, mark_job, raise_open_files
from msrun.agent.processes.server_handle import MINDSPORE_SCHEDULER_ID, SCHEDULER_ID, ProcessSpec, read_spec
from msrun.agent.timers import Timers
from msrun.cluster.messages import Channel, Message, await_input
from msrun.errors import describe_limit


def preload(names: list[str]) -> None:
    """Import each `module` or `module:name`; what fails is left to the worker, whose traceback is the right one."""
    for text in names:
        module_name, _, attribute = text.partition(":")
        try:
            module = importlib.import_module(module_name)
            if attribute and not hasattr(module, attribute):
                importlib.import_module(f"{module_name}.{attribute}")
        except Exception as error:  # noqa: BLE001 - any module may fail in any way at import
            print(f"preload {text}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201


def forget_finalizers() -> None:
    """Keep workers from running what imports registered here: torch's thousands would touch, and copy, 28 MB."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def fork_safety() -> tuple[str, str]:
    """Return ("fork", "") when this process may fork workers, else ("exec", why not)."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if threads > 1:
        return "exec", f"{threads - 1} threads were started by imports; a fork would copy none of them"
    for name in ("torch.cuda", "torch_npu.npu"):
        module = sys.modules.get(name)
        if module is not None and module.is_initialized():
            return "exec", f"{name} was initialised by imports; an accelerator cannot be used after a fork"
    return "fork", ""


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in this block, and never look at what it made; then collect as before, or as modules have set.
    Importing torch makes half a million objects that stay; to find that out takes a quarter of its processor time, and
    a worker that looked at them would copy the pages that they are in."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*thresholds)


LEFTOVER_GRACE_S = 1.0  # what a worker left behind gets between TERM and KILL when the job is over
KILL_DEADLINE_S = 5.0
TERM_SHARE = 0.8  # of the time until KILL, how much a worker has for a signal other than TERM before TERM follows
HOLD_S = 10.0  # for how long after its start a worker without a handler for a signal that is passed on does not get it
HOLD_LOOK_S = 0.05
LOOKS_PER_LIMIT = 4  # how often to look, within the time that an agent may be stopped, whether it is
DESCRIPTORS = 3  # that come with `begin`: log, scheduler's channel, store's socket; maybe a stdin, too


class _Forked(BaseException):
    """Leaves the loop in a process that was forked."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec


class ForkServer:
    """Event loop of the fork server. `serve` returns a ProcessSpec in every forked child and None in the server."""

    def __init__(
        self, channel: Channel, agent_pid: int, passing: socket.socket, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`passing`: where the descriptors of `begin` come from."""
        self._clock, self._channel, self._passing = clock, channel, passing
        self._timers = Timers(clock)
        """start: the next worker, one between two looks at the channel, as a stop starts nobody more; term and kill:
        for workers that do not end; held: signals that wait; agent: whether it is stopped."""
        self._agent_pid = process_control.Pid(agent_pid, process_control.start_time(agent_pid))
        self._running: dict[int, int] = {}  # pid -> process id
        self._started_at: dict[int, float] = {}
        self._held: list[tuple[int, int]] = []  # (pid, signal), until the worker has a handler, or has run for long
        self._reaper = Reaper()
        self._waiting: deque[ProcessSpec] = deque()
        self._is_paused = False  # the workers are stopped until they are told to resume
        self._run_dir = ""
        self.has_finished = False
        self._agent_moved_at = 0.0  # when the agent was last seen not to be stopped
        self.given = Given(os.getpid())

    def serve(self) -> ProcessSpec | None:
        """Work through messages and child deaths until told to finish or the agent is gone."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(wake_reader, selectors.EVENT_READ)
            while not self.has_finished:
                for key, _ in selector.select(self._timers.time_left_s()):
                    if key.fileobj == wake_reader:
                        os.read(wake_reader, 4096)
                try:
                    self.turn()
                except _Forked as child:
                    return child.spec
        return None

    def turn(self) -> None:
        """Do what is to be done now."""
        self._reap()
        while not self.has_finished and await_input(self._channel, 0.0):
            for message in self._channel.receive():
                self._handle(message)
            if self._channel.is_closed:
                self._abandon()
        self._timers.run_due()

    def close(self) -> None:
        """Let go of what is open, of a server that does not serve."""
        self._reaper.close()
        self._close_given()

    def _close_given(self) -> None:
        for descriptor in (*self.given.scheduler_fds, self.given.stdin_fd):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.given.scheduler_fds, self.given.stdin_fd = (), -1

    def _look_at_agent(self, limit_s: float) -> None:
        """An agent that stays stopped does not see that its launcher has given it up, or has gone."""
        now = self._clock()
        if not process_control.is_stopped(self._agent_pid):
            self._agent_moved_at = now
        elif now - self._agent_moved_at > limit_s:
            process_control.signal_processes([self._agent_pid], signal.SIGKILL)  # its channel's end does the rest

    def _handle(self, message: Message) -> None:
        match message["type"]:
            case "import":
                with collection_paused():
                    preload(message["names"])
            case "begin":
                self._begin(message)
            case "prepare":
                self._prepare(message)
            case "start":
                specs = [read_spec(value) for value in message["processes"]]
                self._waiting.extend(spec for spec in specs if spec.process_id >= 0)
                if all(self._fork(spec) for spec in specs if spec.process_id < 0):
                    self._start_waiting()
            case "signal":
                wanted = set(message["process_ids"])
                leaders = [pid for pid, process_id in self._running.items() if process_id in wanted]
                self._held.extend((pid, message["signum"]) for pid in leaders)
                self._pass_on()
            case "pause" | "resume" as kind if not self._timers.is_set("kill"):  # those that are to end are left alone
                self._is_paused = kind == "pause"
                self._signal_workers(signal.SIGSTOP if self._is_paused else signal.SIGCONT)
                self._start_waiting()
            case "stop":
                self._stop(message["signum"], message["grace_s"], message["attempt"])
            case "sweep":
                self._send(type="swept", survivors=self._end_leftovers())
            case "finish":
                self._finish()
                self.has_finished = True
            case "rest":
                self._rest()

    def _begin(self, message: Message) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._passing, 1, DESCRIPTORS + 1)
        if len(descriptors) < DESCRIPTORS:  # the agent has gone
            self._abandon()
            return
        log, channel, store, stdin, *_ = [*descriptors, -1]
        self.given.scheduler_fds, self.given.stdin_fd = (channel, store), stdin
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        self.given.open_files = message["open_files"]
        self._agent_moved_at = self._clock()
        if limit_s := message["stopped_limit_s"]:
            self._timers.every("agent", limit_s / LOOKS_PER_LIMIT, lambda: self._look_at_agent(limit_s))
        set_environment(message["environment"])

    def _prepare(self, message: Message) -> None:
        begin = time.monotonic()
        self._run_dir = message["run_dir"]
        self.given.blas_threads = message["blas_threads"]
        method, reason = "exec", "asked for"
        if message["start_method"] != "exec":
            with collection_paused():
                preload(message["preload"])
            method, reason = fork_safety()
            forget_finalizers()
        # From here on the server answers to the channel's end: it must outlive the agent to clean up after it.
        process_control.adopt_orphans()
        process_control.die_with_parent(self._agent_pid, 0)
        self._send(type="ready", start_method=method, reason=reason, prepare_s=time.monotonic() - begin)

    def _start_waiting(self) -> None:
        if self._waiting and not self._is_paused:
            self._timers.after("start", 0.0, self._start_next)
        else:
            self._timers.cancel("start")

    def _start_next(self) -> None:
        if self._fork(self._waiting.popleft()):
            self._start_waiting()

    def _fork(self, spec: ProcessSpec) -> bool:
        """Start a process, in which all signals are held back until it is ready; False, and told, when that fails."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if spec.process_id >= 0:
                self._waiting.appendleft(spec)
            self._send(type="cannot_start", reason=f"cannot start {spec.name}: {describe_limit(error)}")
            return False
        if pid == 0:
            raise _Forked(spec)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._reaper.watch(pid)
        self._running[pid] = spec.process_id
        self._started_at[pid] = self._clock()
        self._send(type="started", process_id=spec.process_id, pid=pid, at=time.monotonic())
        return True

    def _reap(self) -> None:
        for pid, status, peak_bytes in self._reaper.reap():
            process_id = self._running.pop(pid, None)
            self._started_at.pop(pid, None)
            if process_id is not None:
                self._send(
                    type="exited", process_id=process_id, status=status, peak_bytes=peak_bytes, at=time.monotonic()
                )

    def _stop(self, signum: int, grace_s: float, attempt: int) -> None:
        """Pass on the signal that ends the job; a worker that stays gets TERM, then KILL when its grace is over."""
        self._reap()
        if not self._timers.is_set("kill"):
            self._send(type="told", attempt=attempt, not_started=[spec.process_id for spec in self._waiting])
            self._waiting.clear()
            self._start_waiting()
        if self._is_paused:
            self._is_paused = False
            self._signal_workers(signal.SIGCONT)
        self._timers.cancel("term", "kill")
        if signum == signal.SIGKILL:
            self._kill(grace_s)
            return
        self._timers.after("kill", grace_s, lambda: self._kill(grace_s))
        if signum == signal.SIGTERM:
            self._terminate()
        else:
            self._timers.after("term", grace_s * TERM_SHARE, self._terminate)
            process_control.signal_groups(self._leaders(), signum)

    def _terminate(self) -> None:
        self._signal_workers(signal.SIGTERM, signal.SIGCONT)  # to act on it

    def _kill(self, grace_s: float) -> None:
        if self._leaders():
            killed = sorted(process_id for process_id in self._running.values() if process_id >= 0)
            self._send(type="killed", process_ids=killed, grace_s=grace_s)
        self._signal_workers(signal.SIGKILL)

    def _pass_on(self) -> None:
        """Pass held signals on: a worker that has begun a moment ago has no handler yet, and would be ended."""
        held, self._held = [one for one in self._held if one[0] in self._running], []
        for pid, signum in held:
            is_young = self._clock() - self._started_at.get(pid, 0.0) < HOLD_S
            if is_young and not process_control.handles_signal(pid, signum):
                self._held.append((pid, signum))
            else:
                process_control.signal_processes([pid], signum)
        if self._held:
            self._timers.after("held", HOLD_LOOK_S, self._pass_on)

    def _leaders(self) -> list[int]:
        """Return the workers; each leads a session, and the process group in which its children begin."""
        return [pid for pid, process_id in self._running.items() if process_id >= 0]

    def _signal_workers(self, *signals: int) -> None:
        """Send signals to all workers' sessions; the scheduler keeps store and record until the job is over."""
        leaders = self._leaders()
        # One that was forked a moment ago may not have its own session yet.
        members = sorted({*leaders, *process_control.session_members(leaders)})
        for signum in signals:
            process_control.signal_processes(members, signum)

    def _finish(self) -> None:
        self._end_leftovers()
        survivors = process_control.kill_descendants(KILL_DEADLINE_S)
        shutil.rmtree(self._run_dir, ignore_errors=True)  # the agent may be killed before it does
        self._reap()
        self._send(type="finished", survivors=survivors)

    def _rest(self) -> None:
        """End a part of the job, and wait for the next, which begins as the first did: with what is imported."""
        self._finish()
        self._close_given()
        for held in (self._running, self._waiting, self._held):
            held.clear()
        self._timers.cancel("start", "agent")
        self._run_dir, self._is_paused = "", False

    def _end_leftovers(self) -> list[int]:
        """End what workers left behind, and the parameter servers, gently first; returns what could not be ended."""
        self._timers.cancel("term", "kill")  # of a stop that is over; the next attempt must not be hit
        if left := self._leftovers():
            process_control.signal_processes(left, signal.SIGTERM)
            self._await_end_of_leftovers(LEFTOVER_GRACE_S)
            process_control.signal_processes(self._leftovers(), signal.SIGKILL)
            self._await_end_of_leftovers(KILL_DEADLINE_S)
        return self._leftovers()

    def _leftovers(self) -> list[int]:
        """Return what lives, and who is not collected yet: one whose main thread has ended may have others."""
        ours = {pid for pid, process_id in self._running.items() if MINDSPORE_SCHEDULER_ID < process_id < 0}
        living = [pid for pid in process_control.descendants(os.getpid()) if pid not in ours]
        return [*living, *(self._running.keys() - ours - set(living))]

    def _await_end_of_leftovers(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self._leftovers() and time.monotonic() < end:
            self._reap()
            time.sleep(process_control.POLL_S)

    def _abandon(self) -> None:
        """The agent is gone without a word: leave nothing behind."""
        self._waiting.clear()
        # The scheduler last: it cleans up if this process is killed meanwhile.
        schedulers = [pid for pid, process_id in self._running.items() if process_id == SCHEDULER_ID]
        process_control.kill_descendants(KILL_DEADLINE_S, schedulers)
        process_control.kill_descendants(KILL_DEADLINE_S)
        if self._run_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        self.has_finished = True

    def _send(self, **message: Any) -> None:
        self._channel.send(message)


def main() -> Main:
    """Entry point, which returns in a worker. argv: descriptor of the channel, the agent's pid, the passing socket."""
    channel_fd, agent_pid, passing_fd = (int(text) for text in sys.argv[2:5])
    process_control.die_with_parent(agent_pid)
    return serve_job(Channel(socket.socket(fileno=channel_fd)), agent_pid, socket.socket(fileno=passing_fd))


def serve_job(channel: Channel, agent_pid: int, passing: socket.socket) -> Main:
    """Be the fork server of one job to its end; returns in a worker, with the program that it is to run."""
    mark_job(os.environ[contract.MSRUN_JOB_ID])
    raise_open_files()
    server = ForkServer(channel, agent_pid, passing)
    child = server.serve()
    if child is None:
        os._exit(0)
    program = become(child, server.given)
    program.inherited = server
    return program
