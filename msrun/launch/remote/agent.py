"""An agent: one host's part of a job that a launcher elsewhere drives. Started through a pipe, see `launch.transport`.

What the two say to each other is in `cluster.protocol`, and in `transport.link` for the connection itself; beside that
the launcher says signal {signum}, pause {}, resume {} and bye {}."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.host.host_facts import read_host_facts
from msrun.agent.observer import OwnFaults
from msrun.agent.processes.server_handle import ForkServerHandle, start_fork_server
from msrun.agent.signals import SignalPipe
from msrun.cluster.coordinator import ORDERS
from msrun.cluster.messages import (
    HEADER,
    Inbox,
    Message,
    await_input,
    decode_body,
    describe_fault,
    print_fault,
    traceback_of,
    unpack_hosts,
    unpack_text,
)
from msrun.cluster.protocol import HostJob, HostPart, protocol
from msrun.cluster.rendezvous import forget_waiting, listen, own_addresses
from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.launch.console import Display
from msrun.launch.directory.log_directory import write_private
from msrun.launch.job import AgentPart, JobResult, Start, job_signals, look_at_host, plan_part, run_part
from msrun.launch.preflight.checks import make_host_report, try_reach
from msrun.launch.remote.logs import GIVEN_TABLE, LogSender, listen_in, make_spool, remove_old_spools, remove_spool
from msrun.launch.transport.link import CLOSED, ByteChannel, EventLoop, Link
from msrun.launch.transport.pipe import MARKER, AgentPipe, FilePipe, SocketPipe
from msrun.planning.build import plan_early_server
from msrun.planning.hosts import Fleet
from msrun.planning.plan import LaunchPlan
from msrun.planning.record import decode_record, encode_record
from msrun.planning.spec import LOOPBACK, LaunchSpec


class StdioPipe(FilePipe):
    """What was stdin and stdout of this process; see `AgentPipe`."""

    def __init__(self) -> None:
        """Take them: what is printed from now on goes to stderr, what is read is empty."""
        sys.stdout.flush()
        super().__init__(os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0))
        with open(os.devnull, "rb") as null:  # noqa: PTH123
            os.dup2(null.fileno(), 0)
        os.dup2(2, 1)


LOG_TICK_S = 0.2
WINDOW_BYTES = 4 << 20  # so much of the logs may be on its way without the launcher having said that it has it
ORPHAN_S = 5.0  # how long an agent whose connection was closed waits for another one; a cut one is given up later
CLOSE_S = 2.0
POLL_S = 0.01
PAUSE_S = 3600.0  # how long a launcher may be silent that has said that it is stopped


class LauncherLink(Link):
    """Serves one agent. `close` it when the agent is done. A fault of its own is told to the launcher as `fault`."""

    _is_agent = True

    def __init__(
        self,
        pipe: AgentPipe,
        clock: Callable[[], float] = time.monotonic,
        *,
        silence_s: float = 60.0,
        explain_loss: Callable[[str], str] | None = None,
    ) -> None:
        """`silence_s`: how long the launcher may give no sign of life; `resume_at` may say it anew. `explain_loss`:
        what the job is told when it has gone, from what it has done; None = a launcher that has started this agent."""
        super().__init__(EventLoop(1, self._tell_fault, name="msrun-launcher-link", clock=clock), clock)
        self._inbox = Inbox()
        self.orders = Inbox()  # what the coordinator says, for the job; `lost` when no launcher has come in time
        self._listener: socket.socket | None = None
        self._next_log: Callable[[], Message | None] | None = None
        self._acknowledge_logs: Callable[[int], None] = lambda _: None
        self._log_bytes: dict[int, int] = {}  # sequence number -> size, of what the launcher may not have yet
        self._logs_end = False  # `logs_end` is to be said when nothing more is to be sent
        self._silence_s, self._explain_loss = silence_s, explain_loss
        self._heard_at = self._parted_at = self._clock()
        self.is_orphan = False  # no launcher has come in time
        self._is_closing = False
        self.goes_on = threading.Event()  # set but while the launcher has said that it is stopped
        self.goes_on.set()
        self._signals: SignalPipe | None = None
        self._early_signals: list[int] = []  # which came before the job could hear them
        self._signal_lock = threading.Lock()
        self.loop.call(partial(self._begin, pipe))
        self.loop.call(self._tick)

    def start(self) -> None:
        self.loop.start()

    # -- for the agent's main thread ----------------------------------------------------------------------------------

    def send(self, kind: str, **fields: object) -> None:
        self.pass_on({"type": kind, **fields})

    def pass_on(self, message: Message) -> None:
        self.loop.call(partial(self._say, message))

    def wait(self, timeout_s: float | None = None) -> Message | None:
        """Return the launcher's next wish; None after the time, or when there is no launcher any more."""
        await_input(self._inbox, timeout_s)
        message = self.take()
        return message if message is not None and message["type"] != "gone" else None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something."""
        return self._inbox.fileno()

    def take(self) -> Message | None:
        """Return the launcher's next wish, `gone {reason}` where there is no launcher any more; None: there is none."""
        return next(iter(self._inbox.take(1)), None)

    def resume_at(self, listener: socket.socket, silence_s: float) -> None:
        """Accept another connection at a socket from now on, when this one breaks; `silence_s` as for the link."""

        def accept() -> None:
            self._listener, self._silence_s = listener, silence_s
            self.loop.selector.register(listener, selectors.EVENT_READ, self)

        self.loop.call(accept)

    def obey(self, signals: SignalPipe) -> None:
        """Have the job, which reads these signals, told of the launcher's from now on."""
        with self._signal_lock:
            self._signals = signals
            for signum in self._early_signals:
                signals.tell(signum)
            self._early_signals.clear()

    def send_logs(
        self, next_log: Callable[[], Message | None], acknowledge: Callable[[int], None] = lambda _: None
    ) -> None:
        """Send what `next_log` gives from now on; `acknowledge` is told how many more have come. Of the thread."""

        def begin() -> None:
            self._next_log, self._acknowledge_logs, self._logs_end = next_log, acknowledge, False
            self._log_bytes.clear()  # of an earlier part of the job, all of whose logs have come
            self._send_logs()

        self.loop.call(begin)

    def finish_logs(self) -> None:
        """Send `logs_end` once everything that is written now has been sent."""

        def finish() -> None:
            self._logs_end = True
            self._send_logs()

        self.loop.call(finish)

    def close(self) -> None:
        """Send what is waiting, if somebody reads it, and end the thread."""
        end, has_begun = time.monotonic() + CLOSE_S, threading.Event()

        def begin() -> None:
            self._is_closing = True
            has_begun.set()

        self.loop.call(begin)
        if not self.loop.has_ended:
            has_begun.wait(CLOSE_S)
        while (channel := self._channel) and channel.has_unsent and not self.loop.has_ended and time.monotonic() < end:
            time.sleep(POLL_S)
        self.loop.call(self._hang_up)
        self.loop.close(time.monotonic() + 1.0)
        if self.loop.has_ended:
            for inbox in (self.orders, self._inbox):
                inbox.close()
            if self._listener is not None:
                self._listener.close()

    @property
    def unsent_logs(self) -> set[str]:
        """Names of the logs of which the launcher lacks something; to be asked when the link is closed."""
        kept = [decode_body(data[HEADER.size :]) for _, data in self._kept]
        with contextlib.suppress(OSError):
            if self._next_log and (more := self._next_log()) is not None:
                kept.append(more)
        return {str(message["name"]) for message in kept if message["type"] == "log"}

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _begin(self, pipe: AgentPipe) -> None:
        self._heard_at = self._clock()
        self._talk(pipe, MARKER, self._on_end)

    def _tick(self) -> None:
        self.loop.call_later(LOG_TICK_S, self._tick)
        self._look_at_clock()
        self._send_logs()

    def _tell_fault(self, error: BaseException) -> None:
        """Have the launcher end the job, which the thread still serves."""
        print_fault(error)  # where no launcher comes any more
        self._say({"type": "fault", "text": describe_fault(error), "traceback": traceback_of(error)})

    def _send_logs(self) -> None:
        while self._channel is not None and self._is_attached and sum(self._log_bytes.values()) < WINDOW_BYTES:
            message = self._next_log() if self._next_log else None
            if message is not None:
                self._log_bytes[self._say(message)] = len(message.get("data", ""))
                continue
            if self._logs_end:
                self._logs_end, self._next_log = False, None
                self._say({"type": "logs_end"})
            return

    def _on_heard(self, _: ByteChannel) -> None:
        self.loop.call(self._send_logs)

    def _on_garbled(self, error: Exception) -> None:
        sys.stderr.write(f"msrun agent: left the launcher, which says {type(error).__name__}: {error}\n")
        self._part()

    def _on_end(self, channel: ByteChannel) -> None:
        channel.pipe.close()
        if channel is self._channel:
            self._part()

    def _take(self, message: Message) -> None:
        self._heard_at = self._clock()
        super()._take(message)

    def _acknowledge(self, seen: object) -> None:
        super()._acknowledge(seen)
        if isinstance(seen, int):
            come = [number for number in self._log_bytes if number <= seen]
            for number in come:
                del self._log_bytes[number]
            if come:
                self._acknowledge_logs(len(come))

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "signal":
            self._signal(int(message["signum"]))
        elif kind in ORDERS:
            self.orders.post(message)
        elif kind in ("pause", "resume"):
            (self.goes_on.clear if kind == "pause" else self.goes_on.set)()
            self._signal(signal.SIGTSTP if kind == "pause" else signal.SIGCONT)
        else:
            self._inbox.post(message)

    def _signal(self, signum: int) -> None:
        with self._signal_lock:
            if self._signals is not None:
                self._signals.tell(signum)
            elif signum == signal.SIGCONT and signal.SIGTSTP in self._early_signals:
                self._early_signals.remove(signal.SIGTSTP)  # there was nothing to stop
            else:
                self._early_signals.append(signum)

    def handle(self, _mask: int) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._hang_up()
        self._is_attached = False
        self._begin(SocketPipe(ours=connection))

    def _hang_up(self) -> None:
        if (channel := self._channel) is not None:
            channel.stop(channel.pipe.close)
            self._channel = None
            if self._is_attached:  # one that comes late for a launcher that has gone says nothing: no sign of life
                self._parted_at = self._clock()

    def _part(self, why: str = CLOSED) -> None:
        self._hang_up()
        if self._listener is None:  # there is nothing to come back for
            self._abandon(why)

    def _break(self, _: ByteChannel) -> None:
        self._part()

    def _look_at_clock(self) -> None:
        now = self._clock()
        silence_s = self._silence_s if self.goes_on.is_set() else PAUSE_S
        if self._channel is not None and now - self._heard_at > silence_s:
            if self._explain_loss is None:  # the launcher, if it is there again, finds it on this process's stderr
                sys.stderr.write(
                    f"msrun agent: the launcher gave no sign of life for {silence_s:g} s (was it stopped?), so the "
                    "agent ended its part of the job; see --heartbeat_time_out\n"
                )
                sys.stderr.flush()
            self._part(f"has given no sign of life for {now - self._heard_at:.0f} s: its host or the network is down")
            self._abandon(CLOSED)
        elif self._channel is None and now - self._parted_at > min(ORPHAN_S, self._silence_s):
            self._abandon(CLOSED)

    def _abandon(self, why: str) -> None:
        if not self.is_orphan and not self._is_closing:
            self.is_orphan = True
            self.goes_on.set()
            reason = self._explain_loss(why) if self._explain_loss else "the launcher has gone"
            self._inbox.post({"type": "gone", "reason": reason})
            self.orders.post({"type": "lost", "reason": reason})


class LauncherReport(Display):
    """Passes a job's moments on to the launcher; the result says it all."""

    def __init__(self, link: LauncherLink, plan: LaunchPlan, logs: LogSender | None) -> None:
        """`logs`: None where they stay on this host."""
        self._link, self._logs = link, logs
        tell_plan(link, plan, logs.names if logs else [])

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "restarting" and self._logs is not None:  # before the logs of the attempt that is over are renamed
            self._logs.hold()
        self._link.send("event", moment=kind, fields=dict(fields))


STDERR = 2
STOPPED_SHARE = 2.0  # times --heartbeat_time_out: how long an agent may be stopped
FETCH_S = 20.0  # how long the launcher may take to fetch the last of the logs while its connection is broken


def fleet_of_part(part: HostPart, spec: LaunchSpec) -> Fleet | None:
    """Return all hosts of the job as one sees them; None when it is the only one."""
    hosts = unpack_hosts(part.hosts)
    if not hosts:
        return None
    address = LOOPBACK if spec.stands_for else hosts[part.node_rank].address
    return Fleet(part.node_rank, hosts, part.master_addr, own_addresses().get(address, ""))


class Agent:
    """Serves one launcher from `job` to `bye`."""

    def __init__(self, link: LauncherLink) -> None:
        self._link = link
        self._spool: Path | None = None
        self._hold = -1  # descriptor that keeps other agents from removing the spool
        self._listener: socket.socket | None = None
        self._job: HostJob | None = None
        self._caller: dict[str, str] = {}
        self._server: ForkServerHandle | None = None
        self._logs: LogSender | None = None
        self._signals: SignalPipe | None = None  # of all parts: one that comes between is the next one's
        self._open = contextlib.ExitStack()

    def run(self) -> None:
        """Do what the launcher wants until it wants nothing more, or has gone."""
        try:
            while (message := self._link.wait()) is not None and message["type"] != "bye":
                kind = message["type"]
                if kind == "job":
                    self._prepare(message)
                elif kind == "listen":
                    self._listen(message)
                elif kind == "reach":
                    self._link.send("reached", result=encode_record(try_reach(message["address"], message["port"])))
                elif kind == "plan":
                    self._plan(decode_record(HostPart, message["part"]))
                elif kind == "run":
                    self._run_job(decode_record(HostPart, message["part"]))
        finally:
            self._open.close()
            if self._listener is not None:
                self._listener.close()
            if self._server is not None:
                self._server.kill()

    def clean_up(self) -> None:
        """Remove what is on the disk, once the link is closed; logs that nobody has are left where they are."""
        unsent = self._link.unsent_logs | (self._logs.unreadable if self._logs else set())
        if self._spool is not None and not unsent - {contract.SCHEDULER_LOG}:
            remove_spool(self._spool)
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1

    def _tell_unfreed(self, reason: str) -> None:
        text = (
            f"{socket.gethostname()}: {self._spool} keeps a copy of the logs until the end, for its file system cannot "
            f"free part of a file ({reason}); set TMPDIR there to another one"
        )
        self._link.send("event", moment="note", fields={"text": text})

    def _prepare(self, message: Message) -> None:
        asked_at = time.time()
        spoken = message["job"].get("protocol")  # first of all: another msrun's has other fields
        if spoken != protocol():
            raise ClusterError(f"msrun here speaks protocol {protocol()}, the launcher {spoken}: install the same")
        job = self._job = decode_record(HostJob, message["job"])
        remove_old_spools(asked_at)
        self._spool, self._hold = make_spool(job.job_id, job.number)
        if job.can_resume:
            self._link.resume_at(listen_in(self._spool), job.silence_s)
        # Not for workers: what is of the connection and, where this is the launcher's host, its settings and secrets.
        login = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "MSRUN_"))}
        self._caller = {**({} if job.is_launchers_host else login), **job.environment}
        if job.will_run:
            self._server = _start_early(job.spec, self._caller, job.job_id)
        if not job.is_launchers_host:
            shown, name = job.shown, job.master_name
            report = make_host_report(job.spec, self._caller, asked_at=asked_at, shown=shown, master_name=name)
            self._link.send("checked", report=encode_record(report))

    def _listen(self, message: Message) -> None:
        if self._listener is not None:  # of an earlier start
            self._listener.close()
        try:
            self._listener = listen(
                message["address"], message["port"], "end who uses it, or leave --master_port out to take a free one"
            )
            self._link.send("listening", port=self._listener.getsockname()[1], error="")
        except UsageError as error:
            self._link.send("listening", port=0, error=str(error))

    def _own_spec(self, part: HostPart) -> LaunchSpec:
        assert self._spool is not None and part.spec is not None, "an agent that has no command line of its own"
        table = None
        if text := unpack_text(part.rank_table):
            table = self._spool / GIVEN_TABLE
            write_private(table, text)
        return replace(
            part.spec,
            master_addr=part.master_addr,
            master_port=part.master_port,
            log_dir=self._spool,
            worker_log_dir=part.spec.log_dir if part.use_shared else None,
            rank_table_file=table or part.spec.rank_table_file,
            log_max_bytes=part.spec.log_max_bytes if part.use_shared else 0,  # what was sent is freed anyway
        )

    def _plan(self, part: HostPart) -> None:
        assert self._job is not None
        spec, start = self._own_spec(part), Start(self._caller, self._job.job_id)
        facts, fleet = look_at_host(spec, self._caller), fleet_of_part(part, spec)
        tell_plan(self._link, plan_part(spec, facts, start, fleet, 0), [])

    def _run_job(self, part: HostPart) -> None:
        assert self._job is not None
        job, link = self._job, self._link
        spec = self._own_spec(part)
        has_scheduler = job.is_launchers_host or part.node_rank == 0

        def display(_spec: LaunchSpec, plan: LaunchPlan, _faults: OwnFaults) -> LauncherReport:
            paths = _paths_to_send(plan, is_shared=part.use_shared, has_scheduler=has_scheduler)
            logs = self._logs = LogSender(paths, on_refused=self._tell_unfreed)
            link.send_logs(logs.next, logs.acknowledge)
            return LauncherReport(link, plan, logs)

        if self._listener is not None:
            forget_waiting(self._listener)
        if self._logs is not None:
            self._logs.close()
        if self._signals is None:
            self._signals = self._open.enter_context(job_signals(spec))
        own = AgentPart(
            display,
            self._signals,
            link,
            fleet_of_part(part, spec),
            part.master_port,
            self._listener if has_scheduler else None,
            early_server=self._server,
            home=str(job.spec.log_dir) if has_scheduler else "",
            stopped_limit_s=STOPPED_SHARE * job.silence_s,
        )
        result = run_part(spec, Start(self._caller, job.job_id), own)
        self._server = result.server
        tell_result(link, result)


def tell_plan(link: LauncherLink, plan: LaunchPlan, logs: Sequence[str]) -> None:
    """Tell the launcher what this host will run, and which logs of that it will get."""
    host = encode_record(plan.hosts[0])
    link.send("planned", host=host, notes=list(plan.notes), target=plan.device_target, logs=logs)


def tell_result(link: LauncherLink, result: JobResult) -> None:
    """Tell the launcher how this host's part has ended, and after that everything: the end of its logs comes last."""
    failure = encode_record(result.failure) if result.failure else None
    link.send("result", failure=failure, survivors=list(result.survivors))
    link.finish_logs()


def _start_early(spec: LaunchSpec, caller: Mapping[str, str], job_id: str) -> ForkServerHandle | None:
    """Start a fork server that imports while the hosts come together; None where that cannot be: the checks say why."""
    with contextlib.suppress(MsrunError, OSError):
        early = plan_early_server(spec, read_host_facts({**caller, **dict(spec.env)}), caller, job_id)
        if early is not None:
            server = start_fork_server(env=early.environment, working_directory=early.working_directory, log_fd=STDERR)
            server.import_early(early.imports)
            return server
    return None


def _paths_to_send(plan: LaunchPlan, *, is_shared: bool, has_scheduler: bool) -> list[str]:
    """Return the logs that the launcher cannot read itself; that of one scheduler is the job's."""
    host, own = plan.hosts[0], [worker.global_rank for worker in plan.workers]
    paths = [] if is_shared else host.log_paths
    for variable, name in (
        (contract.MSRUN_TRACE_DIR, contract.trace_file_name),
        (contract.MSRUN_FLIGHT_RECORDER, contract.flight_recorder_name),
    ):
        if not is_shared and variable in host.common_env:
            paths += [f"{plan.log_dir}/{name(rank)}" for rank in own]
    return [*paths, *([f"{plan.log_dir}/{contract.SCHEDULER_LOG}"] if has_scheduler else [])]


def main() -> None:
    link = LauncherLink(StdioPipe())
    link.start()
    agent = Agent(link)
    try:
        with contextlib.suppress(MsrunError), told_errors(link):
            agent.run()
    except Exception as error:  # noqa: BLE001 - the launcher has it
        print_fault(error)
    finally:
        link.close()
        agent.clean_up()
    os._exit(0)  # nothing is left to be done, and threads of libraries must not hold it up


@contextlib.contextmanager
def told_errors(link: LauncherLink) -> Iterator[None]:
    """Have the launcher know of an error that ends the agent, and wait a while until it does."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, MsrunError):
            link.send("error", text=str(error), exit_code=error.exit_code)
        else:
            text, trace = describe_fault(error), traceback_of(error)
            link.send("error", text=text, traceback=trace, exit_code=contract.EXIT_CLUSTER)
        with contextlib.suppress(KeyboardInterrupt):
            link.wait(FETCH_S)
        raise
