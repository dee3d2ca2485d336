"""Run this host's part of a job from plan to result, or a job that has no other host. What it opens is closed here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msrun import contract
from msrun.agent.attempt import keep_logs
from msrun.agent.host.host_facts import read_host_facts
from msrun.agent.log_file import LogLimit
from msrun.agent.observer import Observer, Observers, OwnFaults
from msrun.agent.own_file import open_own_file
from msrun.agent.processes.process_control import adopt_orphans, descendants, raise_open_files, set_open_files
from msrun.agent.processes.progress_board import PROGRESS_BOARD, ProgressBoard
from msrun.agent.processes.server_handle import ForkServerHandle, start_fork_server
from msrun.agent.processes.terminal import RankTerminal
from msrun.agent.signals import SignalPipe
from msrun.agent.supervisor import Supervisor
from msrun.cluster.coordinator import Coordinator, OwnLink
from msrun.cluster.failure import JobFailure
from msrun.cluster.membership import RestartPolicy
from msrun.cluster.messages import Channel, Inbox, Message
from msrun.cluster.rendezvous import BACKLOG, forget_waiting, listen
from msrun.errors import ClusterError
from msrun.launch.console import Console, Display, say
from msrun.launch.directory.log_directory import (
    BoundedLogs,
    EventLog,
    JobLock,
    describe_removed,
    prepare_log_directory,
    publish,
)
from msrun.launch.failure import failure_of_job, report_failure, write_failure
from msrun.launch.preflight.checks import check_restart
from msrun.launch.rank_table_file import check_rank_table, linked_table, write_rank_table
from msrun.launch.terminal import UserTerminal
from msrun.planning.build import build_plan, early_imports
from msrun.planning.environment import server_environment, settle_mindspore
from msrun.planning.hosts import Fleet
from msrun.planning.placement.host import HostFacts, place_devices
from msrun.planning.plan import LaunchPlan
from msrun.planning.record import Record
from msrun.planning.spec import LaunchSpec

OF_PAUSE = (int(signal.SIGTSTP), int(signal.SIGCONT))


class JobResult(Record):
    """How a job ended."""

    plan: LaunchPlan
    failure: JobFailure | None
    survivors: tuple[int, ...]  # processes that could not be ended; empty but for hardware faults
    goes_on: bool = False  # this was a host's part of a job that goes on on other hosts, of which it may be one
    server: ForkServerHandle | None = None  # the fork server, for the next part; ended by the caller

    @property
    def exit_code(self) -> int:
        return self.failure.exit_code if self.failure else contract.EXIT_OK


class Start(Record):
    """How one command starts a job, whatever its hosts are."""

    caller: Mapping[str, str]  # the environment that workers inherit
    job_id: str
    quiet: bool = False
    on_directory: Callable[[str, Path], None] = lambda _id, _folder: None  # called when that is locked and filled

    def say(self, text: str) -> None:
        say(text, quiet=self.quiet)


class Link(Protocol):
    """What joins this host to a coordinator that is a launcher's: an agent's `LauncherLink`."""

    orders: Inbox

    def obey(self, signals: SignalPipe) -> None:
        """Have the job, which reads these signals, told of the launcher's from now on."""

    def pass_on(self, message: Message) -> None:
        """Tell the coordinator."""


class AgentPart(Record):
    """What is different where msrun is typed on a host, where an agent serves a launcher, and on a host alone."""

    display: Callable[[LaunchSpec, LaunchPlan, OwnFaults], Display]
    signals: SignalPipe  # what has been read so far of this process's signals; closed by whoever gives it
    link: Link | None = None  # None: this host is the only one, and its coordinator is in this process
    fleet: Fleet | None = None  # all hosts of the job, as they have agreed; None: it has this host alone
    store_port: int = 0  # of the workers' store of several hosts
    store_listener: socket.socket | None = None  # where that is served, on the scheduler's host
    early_server: ForkServerHandle | None = None  # started before all had come; ended by its owner
    home: str | None = None
    """The folder where the user finds this host's `scheduler.log`; empty where it goes with the job; None: in the log
    directory, as msrun was typed here: whoever did reads what this process prints."""
    user: UserTerminal | None = None  # the terminal that belongs to a rank here
    stopped_limit_s: float = 0.0  # after so long a stop its fork server ends this process; 0 = never


def plan_dry_run(spec: LaunchSpec, caller: Mapping[str, str]) -> LaunchPlan:
    """Return the plan of a job without starting, opening or creating anything. Job id and port are chosen at start."""
    if spec.is_remote:
        from msrun.launch.transport.pipe import agent_command
        from msrun.planning.build import build_remote_plan

        return build_remote_plan(spec, caller, job_id="JOB", agent_command=agent_command)
    facts = look_at_host(spec, caller)
    fleet = None
    if spec.is_several:
        from msrun.launch.rendezvous import assume_fleet, local_part

        fleet = assume_fleet(spec, facts)
        spec = local_part(spec, fleet)
    port = 0 if fleet else spec.master_port  # of several hosts, the store's port is chosen at start
    return plan_part(spec, facts, Start(caller, "JOB"), fleet, port)


def look_at_host(spec: LaunchSpec, caller: Mapping[str, str]) -> HostFacts:
    facts = read_host_facts({**caller, **dict(spec.env)})
    return replace(facts, name=spec.stands_for.name) if spec.stands_for else facts


def plan_part(
    spec: LaunchSpec, facts: HostFacts, start: Start, fleet: Fleet | None, master_port: int, server_token: str = ""
) -> LaunchPlan:
    """Return the plan of this host's part of a job; arguments and errors as `build_plan`. UsageError: a wrong table."""
    node = f"-{fleet.node_rank}" if fleet else ""
    node += f"-{spec.first_attempt}" if spec.first_attempt else ""  # what another host has left goes in its own time
    is_linked = spec.rank_table_file is not None and spec.rank_table_file.is_symlink()  # workers get a copy
    plan = build_plan(
        replace(spec, rank_table_file=None) if is_linked else spec,
        replace(facts, address=fleet.own.address) if fleet else facts,
        caller=start.caller,
        job_id=start.job_id,
        run_dir=str(Path(tempfile.gettempdir(), f"msrun-{start.job_id}{node}")),
        master_port=master_port,
        fleet=fleet,
        server_token=server_token,
    )
    if spec.rank_table_file:
        check_rank_table(spec.rank_table_file, plan.world_size, plan.device_target)
    shadowed = describe_shadowed_package(spec, {**start.caller, **dict(spec.env)})
    return replace(plan, notes=(*plan.notes, shadowed)) if shadowed else plan


def run_job(spec: LaunchSpec, start: Start) -> JobResult:
    """Run a job on this host alone to its end; errors as of `run_part`."""
    with contextlib.ExitStack() as stack:
        user = None
        if spec.interactive_rank is not None and spec.has_terminal:
            user = UserTerminal(spec.interactive_rank, start.say)
            stack.callback(user.give_back)

        def display(spec: LaunchSpec, plan: LaunchPlan, faults: OwnFaults) -> Console:
            return Console(spec, plan, faults, quiet=start.quiet, terminal=user).open_metrics()

        return run_part(spec, start, AgentPart(display, stack.enter_context(job_signals(spec)), user=user))


def run_part(spec: LaunchSpec, start: Start, part: AgentPart) -> JobResult:
    """Run this host's part of a job to its end (UsageError: before any process started; ClusterError: no meeting)."""
    caller = start.caller
    facts = look_at_host(spec, caller)
    spec = settle_mindspore(spec, facts)
    with contextlib.ExitStack() as stack:
        open_files = raise_open_files()
        stack.callback(set_open_files, open_files)
        if spec.is_several:
            check_part(spec, facts)
        if part.link:
            part.link.obey(part.signals)
        plan, listener = _take_directory(stack, spec, facts, start, part)
        start.on_directory(start.job_id, spec.log_dir)
        home = plan.log_dir if part.home is None else part.home
        display: Display
        say_fault = partial(say, quiet=False) if part.home is None else lambda text: display.say(text)
        faults = OwnFaults(plan.log_dir, say_fault, found_in=home)
        if part.home is None:
            stack.enter_context(faults.named())
        display = part.display(spec, plan, faults)
        stack.enter_context(faults)
        # `monitor & exec msrun` makes the monitor a child of msrun
        strangers = frozenset(descendants(os.getpid())) - ({part.early_server.pid} if part.early_server else set())
        events = stack.enter_context(contextlib.closing(EventLog(Path(plan.log_dir) / contract.EVENTS_JSONL)))
        written = [path for worker in plan.hosts[0].workers for path in worker.log_paths]
        limit = LogLimit(plan.log_max_bytes, plan.log_keep) if plan.log_max_bytes else None
        bounded = BoundedLogs(written, limit, display.say)
        stack.callback(bounded.end)
        terminal = _rank_terminal(stack, plan, part.user, display)
        own = OwnStart(
            plan,
            caller,
            listener,
            has_store=part.fleet is None or part.store_listener is not None,
            early=part.early_server,
            warm=(early_imports(spec, caller), spec.warm_time_s) if spec.is_warm else None,
            stdin_fd=terminal.stdin_fd if terminal is not None else -1,
            open_files=open_files,
            stopped_limit_s=part.stopped_limit_s,
        )
        host = plan.hosts[0]
        ranks = {host.node_rank: tuple(worker.global_rank for worker in host.workers)}
        alone = Coordinator(plan.job_id, ranks, RestartPolicy.of(plan))
        link = part.link or stack.enter_context(contextlib.closing(OwnLink(alone, host.node_rank)))
        supervisor = Supervisor(
            plan,
            host,
            own.start,
            stack.enter_context(contextlib.closing(ProgressBoard(Path(plan.run_dir, PROGRESS_BOARD), plan.world_size))),
            Observers([events, own, *display.observers, bounded], faults),
            orders=link.orders,
            send=link.pass_on,
            describe=partial(report_failure, plan),
            caller=caller,
            strangers=strangers,
            home=home,
            stopped_limit_s=spec.heartbeat_time_out_s,
            stop_self=display.stop_self,
            terminal=terminal,
            check_again=partial(check_restart, spec, caller),
        )
        adopt_orphans()
        result = supervisor.run(part.signals)
        failure = failure_of_job(plan, result)
        problem = write_failure(plan, failure) if failure and not supervisor.goes_on else ""
        if problem := describe_removed(Path(plan.log_dir), events.folder) or problem:
            display.say(problem)
        display.finish(failure, result.last.membership, result.last.number)
        return JobResult(plan, failure, result.survivors, supervisor.goes_on, supervisor.take_server())


def _take_directory(
    stack: contextlib.ExitStack, spec: LaunchSpec, facts: HostFacts, start: Start, part: AgentPart
) -> tuple[LaunchPlan, socket.socket]:
    """Return the plan of this host's part, for which its log directory is locked and filled, and the store's socket."""
    lock = stack.enter_context(JobLock(spec.log_dir, start.job_id))  # entered early, so that it is given up last
    if part.fleet is None:
        listener = listen(facts.address, spec.master_port)
    else:  # on a host without the workers' store, one that nobody uses
        listener = part.store_listener.dup() if part.store_listener else socket.socket()
    stack.enter_context(listener)
    table_text, server_token = linked_table(spec.rank_table_file), spec.server_token
    if spec.is_several and not server_token:
        from msrun.cluster.connection import token_of_servers

        server_token = token_of_servers(spec.token, start.job_id)
    port = part.store_port if part.fleet else listener.getsockname()[1]
    plan = plan_part(spec, facts, start, part.fleet, port, server_token or os.urandom(32).hex())
    stack.callback(shutil.rmtree, plan.run_dir, ignore_errors=True)  # made when the fork server is ready
    lock.take()
    if spec.first_attempt:
        keep_logs(plan.log_paths, spec.first_attempt - 1)
    prepare_log_directory(plan)
    write_rank_table(plan, table_text)
    if spec.worker_log_dir and (spec.rank_table_file is None or table_text is not None):  # where workers read it
        write_rank_table(plan, table_text, spec.worker_log_dir)
    publish(spec.log_dir, plan.job_id, plan.log_paths, spec.log_keep_jobs)
    return plan, listener


def job_signals(spec: LaunchSpec) -> SignalPipe:
    """Return what reads the signals of a process that does nothing after its job, and ignores later ones."""
    return SignalPipe((*spec.forward_signals, *OF_PAUSE), ignore_afterwards=True, time_limit_s=spec.time_limit_s)


def check_part(spec: LaunchSpec, facts: HostFacts) -> None:
    """Refuse before other hosts are bothered what is wrong here alone; UsageError: devices, or the rank table, are."""
    devices = place_devices(spec.device_target, spec.local_worker_num, facts, spec.own_device_ids)
    if spec.rank_table_file:
        check_rank_table(spec.rank_table_file, spec.worker_num, devices.target)


_ROOT = Path(__file__).parents[2]


def describe_shadowed_package(spec: LaunchSpec, environment: Mapping[str, str]) -> str:
    """Return which package of the user's cannot be imported by its name msrun in this environment; else nothing."""
    if not spec.program.is_python or spec.start_method == "exec":
        return ""
    at, paths = spec.working_directory, environment.get("PYTHONPATH", "").split(os.pathsep)
    first = (at / spec.program.target).parent if spec.program.kind == "script" else at
    folders = [*([] if environment.get("PYTHONSAFEPATH") else [first]), *(at / path for path in paths if path)]
    for folder in folders:
        if folder.resolve() == _ROOT or _has_same_msrun(folder):
            return ""
        for found in (folder / "msrun", folder / "msrun.py"):
            if (found / "__init__.py").is_file() or (found.suffix and found.is_file()):
                return (
                    f"{found.resolve()}: workers import msrun's own package of that name, not this one; rename it, or "
                    "give --start_method exec, with which they import it and not msrun.runtime"
                )
    return ""


def _has_same_msrun(folder: Path) -> bool:
    """Return whether the package there is a copy of this one: the clone that it was installed from."""
    copy = folder / "msrun" / "contract.py"
    return copy.is_file() and copy.read_bytes() == Path(contract.__file__).read_bytes()


RECORD_S = 2.0  # how long the scheduler may leave the record of a moment unread before it gets no more


class OwnStart(Observer):
    """Starts the fork server and scheduler of a job, again when lost; that scheduler writes the moments down."""

    def __init__(
        self,
        plan: LaunchPlan,
        caller: Mapping[str, str],
        listener: socket.socket,
        *,
        has_store: bool,
        early: ForkServerHandle | None = None,
        warm: tuple[tuple[str, ...], float] | None = None,
        **given: int | float,
    ) -> None:
        """Args:
        listener: the socket of the workers' store; open as long as the job may start again, closed by the caller.
        has_store: the store is on this host.
        early: a fork server that was started before the plan was made; ended here if it cannot serve.
        given: open_files, stopped_limit_s and stdin_fd of `ForkServerHandle.begin`."""
        self._plan, self._caller, self._listener, self._has_store = plan, caller, listener, has_store
        self._early, self._warm = early, warm
        self._given: Any = given
        self._channel: Channel | None = None

    def follow(self, channel: Channel) -> None:
        """Tell this scheduler which job it is, and from now on everything else."""
        self._channel = channel
        host = self._plan.hosts[0]
        job = {"job_id": self._plan.job_id, "world_size": len(host.workers), "host": host.where}
        is_needed = host.common_env[contract.TORCHELASTIC_USE_AGENT_STORE] == "True"
        self.note("job", {**job, "has_store": self._has_store, "is_store_needed": is_needed})

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._channel is not None and not self._channel.is_closed:
            try:
                self._channel.send({"type": kind, **fields})
            except TimeoutError:  # it is stopped: the job can do without its record
                self._channel.is_closed = True

    def start(self) -> tuple[ForkServerHandle, Channel]:
        """Return a fork server with its job, and the channel to its scheduler; both are the caller's (ClusterError)."""
        job, folder = self._plan.job_id, self._plan.hosts[0].working_directory
        env = server_environment(self._caller, self._plan.hosts[0].common_env)
        try:
            if self._channel is not None and self._has_store:
                self._listener.listen(BACKLOG)  # a scheduler without torch has shut it
                forget_waiting(self._listener)
            log = open_own_file(Path(self._plan.log_dir) / contract.SCHEDULER_LOG, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise ClusterError(f"cannot start the fork server: {error.filename or 'store'}: {error.strerror}") from None
        ours, theirs = socket.socketpair()
        ours.settimeout(RECORD_S)
        with os.fdopen(log, "ab"), theirs:
            server, self._early = self._early, None
            if server is not None and not server.can_serve(env, folder):
                server.kill()
                server = None
            warm, self._warm = self._warm, None  # what it starts beside the job must not be adopted, as all is by then
            if server is None and warm and warm[0]:
                from msrun.agent.warm import WarmStart, start_warm  # for jobs with --warm

                start = partial(start_warm, WarmStart(*warm), working_directory=folder, job_id=job)
                server = start(env=env, caller=self._caller)
            server = server or start_fork_server(env=env, working_directory=folder, log_fd=log)
            descriptors = {"log_fd": log, "scheduler_fd": theirs.fileno(), "listener_fd": self._listener.fileno()}
            server.begin(env, **descriptors, **self._given)
        scheduler = Channel(ours)
        self.follow(scheduler)
        return server, scheduler


def _rank_terminal(
    stack: contextlib.ExitStack, plan: LaunchPlan, user: UserTerminal | None, display: Display
) -> RankTerminal | None:
    logs = {worker.global_rank: worker.log_path for worker in plan.hosts[0].workers}
    rank = plan.interactive_rank
    if rank is None or rank not in logs:
        return None

    def tell_lost(rank: int, reason: str, count: int) -> None:
        display.say(f"logs are not complete ({reason}): lost {count} bytes of rank {rank}")

    terminal = RankTerminal(rank, logs[rank], user, on_lost=tell_lost)
    return stack.enter_context(contextlib.closing(terminal))
