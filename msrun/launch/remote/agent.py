"""An agent: one host's part of a job that a launcher elsewhere drives. Started through a pipe, see `launch.transport`.

Messages (`remote.launcher_link` has those of the connection itself, `cluster.coordinator` those of the running job):
    launcher -> agent   job {HostJob}      listen {address, port}   reach {address, port}
                        plan and run {part: HostPart}
                        signal {signum}    pause {}    resume {}    bye {}
    agent -> launcher   checked {report}   listening {port, error}   reached {result}
                        planned {host, notes, target, logs}    event {moment, fields}    log {...}
                        logs_end {}    result {failure, survivors}      error {text, exit_code, traceback}
                        fault {text, traceback}
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.host.host_facts import LOOPBACK, read_host_facts
from msrun.agent.observer import Observer, OwnFaults
from msrun.agent.processes.server_handle import ForkServerHandle, start_fork_server
from msrun.agent.signals import SignalPipe
from msrun.cluster.failure import JobFailure
from msrun.cluster.membership import Membership
from msrun.cluster.messages import Message, unpack_hosts, unpack_text
from msrun.cluster.own_thread import describe_fault, print_fault, traceback_of
from msrun.cluster.protocol import HostJob, HostPart, protocol
from msrun.cluster.rendezvous import forget_waiting, listen, own_addresses
from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.launch.directory.log_directory import write_private
from msrun.launch.job import AgentPart, JobResult, job_signals, look_at_host, plan_part, run_part
from msrun.launch.preflight.checks import make_host_report, try_reach
from msrun.launch.remote.launcher_link import LauncherLink, StdioPipe
from msrun.launch.remote.logs import LogSender
from msrun.launch.remote.spool import GIVEN_TABLE, listen_in, make_spool, remove_old_spools, remove_spool
from msrun.planning.build import plan_early_server
from msrun.planning.host_assignment import Fleet
from msrun.planning.plan import LaunchPlan
from msrun.planning.record_json import decode_record, encode_record
from msrun.planning.spec import LaunchSpec


class LauncherReport(Observer):
    """Passes a job's moments on to the launcher. A `Display`."""

    def __init__(self, link: LauncherLink, plan: LaunchPlan, logs: LogSender | None) -> None:
        """`logs`: None where they stay on this host."""
        self._link = link
        self.stop_self: Callable[[], None] | None = None
        self._logs = logs
        self._is_between = False  # an attempt is over, and no worker of the next has started
        tell_plan(link, plan, logs.names if logs else [])

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "restarting" and self._logs is not None:  # before the logs of the attempt that is over are renamed
            self._logs.end_attempt()
            self._is_between = True
        elif kind == "started" and self._logs is not None and self._is_between:
            self._logs.begin_attempt()
            self._is_between = False
        self._link.send("event", moment=kind, fields=dict(fields))

    @property
    def observers(self) -> tuple[Observer, ...]:
        return (self,)

    def say(self, text: str) -> None:
        self.note("note", {"text": text})

    def finish(self, failure: JobFailure | None, membership: Membership, restarts: int) -> None:
        """The result says it all."""


STDERR = 2
STOPPED_SHARE = 2.0
"""Times --heartbeat_time_out: how long an agent may be stopped; the launcher, if it is there, ends it earlier."""
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
        self._signals: SignalPipe | None = None
        """Of all parts of the job: one that comes between two of them is the next one's."""
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
            f"free part of a file ({reason}); set TMPDIR there to another one, or give --log_max_bytes"
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
        )

    def _plan(self, part: HostPart) -> None:
        assert self._job is not None
        spec, job_id = self._own_spec(part), self._job.job_id
        facts, fleet = look_at_host(spec, self._caller), fleet_of_part(part, spec)
        tell_plan(self._link, plan_part(spec, facts, self._caller, job_id=job_id, fleet=fleet, master_port=0), [])

    def _run_job(self, part: HostPart) -> None:
        assert self._job is not None
        job, link = self._job, self._link
        spec = self._own_spec(part)
        has_scheduler = job.is_launchers_host or part.node_rank == 0

        def display(_spec: LaunchSpec, plan: LaunchPlan, _faults: OwnFaults) -> LauncherReport:
            paths = _paths_to_send(plan, is_shared=part.use_shared, has_scheduler=has_scheduler)
            kept = plan.log_keep if plan.log_max_bytes else 0
            logs = self._logs = LogSender(paths, keep=kept, on_refused=self._tell_unfreed)
            link.send_logs(logs.next, logs.acknowledge)
            return LauncherReport(link, plan, logs)

        if self._listener is not None:
            forget_waiting(self._listener)
        if self._logs is not None:
            self._logs.close()
        if self._signals is None:
            self._signals = self._open.enter_context(job_signals(spec, is_last=True))
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
        result = run_part(spec, self._caller, own, job_id=job.job_id)
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
