"""This host's part of a job of several on each of which msrun is typed, or started by a cluster manager. The host with
the scheduler leads the job as a launcher over SSH does; every other one dials it, serves it as an agent, and shows its
own part to whoever has typed msrun there."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from msrun import contract
from msrun.agent.observer import OwnFaults
from msrun.agent.own_file import read_end
from msrun.agent.processes.server_handle import ForkServerHandle
from msrun.agent.signals import SignalPipe, stop_this_process
from msrun.cluster.connection import Caller, Connection, HostRequest, NoKey, Refused
from msrun.cluster.protocol import HostPart, protocol
from msrun.cluster.rendezvous import UnresolvedName, resolve_address
from msrun.errors import ClusterError, PeerFailed, refused_as
from msrun.launch.console import Console
from msrun.launch.directory.log_directory import of_job, write_private
from msrun.launch.job import AgentPart, JobResult, Start, check_part, job_signals, look_at_host, plan_dry_run, run_part
from msrun.launch.job_hosts import table_digest
from msrun.launch.remote.agent import (
    FETCH_S,
    STOPPED_SHARE,
    LauncherLink,
    LauncherReport,
    fleet_of_part,
    tell_result,
    told_errors,
)
from msrun.launch.rendezvous import Patience, folder_of, has_scheduler, local_part, open_port
from msrun.planning.environment import settle_mindspore
from msrun.planning.plan import LaunchPlan
from msrun.planning.record import decode_record
from msrun.planning.spec import LaunchSpec

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls import Side, TlsIdentity

KEY_S = 5.0  # how long this host's key may be an earlier job's, or none: a shared disk shows a new file late
MAX_KEY_BYTES = 4096
CONNECT_S = 3.0
GREETING_S = 15.0  # how long the scheduler may take to answer


def run_joined_job(spec: LaunchSpec, start: Start) -> JobResult:
    """Run this host's part of a job to its end (UsageError: seen before any process started; ClusterError,
    RendezvousTimeout, Interrupted: the hosts did not come together, not in time, or a signal came)."""
    facts = look_at_host(spec, start.caller)
    spec = settle_mindspore(spec, facts)
    check_part(spec, facts)
    tell = start.say
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(job_signals(spec))
        patience = Patience(spec, signals, tell)
        tls = _open_tls(spec, "client")
        warnings = tls.warnings if tls else ()
        for warning in warnings:
            tell(warning)
        master_addr = find_master(spec, patience)
        place = (master_addr, spec.meeting_port)
        key = JobKey(spec)

        def request(address: str) -> HostRequest:
            own = spec.stands_for.address if spec.stands_for else address
            numbers = spec.worker_num, spec.local_worker_num, spec.node_rank
            return HostRequest(protocol(), *numbers, facts.name, own, spec.max_restarts, table_digest(spec.table_hosts))

        listener = open_port(spec, place) if has_scheduler(spec, master_addr) else None
        if listener is not None:
            from msrun.launch.fleet.fleet_job import run_fleet_job
            from msrun.launch.fleet.joined_hosts import JoinedHosts

            token = stack.enter_context(key.made())
            if spec.is_under_scheduler and not (spec.token or spec.tls):
                tell(f"no --token_file or MSRUN_TOKEN: whoever reaches {place[0]}:{place[1]} can join this job")
            server = _open_tls(spec, "server")
            for warning in server.warnings if server else ():
                if warning not in warnings:
                    tell(warning)
            spec = of_job(spec, start.job_id)
            joined = JoinedHosts(spec, start, request(master_addr), place, listener, token, server, signals)
            stack.enter_context(joined).meet()
            result = run_fleet_job(joined.whole_spec(), start, joined)
            joined.call_off("the job has ended without this host", result.exit_code)
            return result

        def greet(connection: Connection, own_address: str) -> Caller:
            return Caller(connection, key.read(), f"{place[0]}:{place[1]}", lambda: request(own_address))

        retry_s = 0.0 if key.is_given else KEY_S
        connection, silence_s = dial(place, greet, tls, patience, retry_s=retry_s)
        part = stack.enter_context(DialledPart(spec, connection, silence_s, signals, place))
        tell("registered with the scheduler" + (f" through {connection.tls_version}" if tls else ""))
        while (own := part.await_part(patience)) is not None:
            result = part.run(own, start)
            if not result.goes_on:
                return result
        return JobResult(plan_dry_run(spec, start.caller), None, ())  # nobody has needed this host


class JobKey:
    """What the hosts of a job know each other by: the user's token, or a random one in a log directory that they share.
    With TLS alone certificates say who they are; under a scheduler, whose pods may share no directory, the place where
    they meet."""

    def __init__(self, spec: LaunchSpec) -> None:
        place = f"{spec.master_addr}:{spec.meeting_port}"
        known = b"tls" if spec.tls else place.encode() if spec.is_under_scheduler else b""
        self._given = spec.token.encode() or known
        self.path = spec.log_dir / f".meeting_{spec.meeting_port}"

    @property
    def is_given(self) -> bool:
        return bool(self._given)

    @contextlib.contextmanager
    def made(self) -> Iterator[bytes]:
        """Give the key on the scheduler's host, where the others find it until the end (UsageError: no place)."""
        if self._given:
            yield self._given
            return
        key = secrets.token_hex(32)
        with refused_as(f"--log_dir {self.path.parent}: cannot write {self.path}"):
            self.path.parent.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
            write_private(self.path, key)
        try:
            yield key.encode()
        finally:
            if read_end(self.path, len(key)) == key.encode():
                self.path.unlink(missing_ok=True)

    def read(self) -> bytes:
        """Return the key on another host. Raises Refused: there is none, or not yet."""
        key = self._given or read_end(self.path, MAX_KEY_BYTES)
        if not key:
            raise NoKey(
                f"no key of this job: {self.path} is not there; give all hosts the same --token_file, MSRUN_TOKEN or "
                "--tls_config, or a --log_dir that they share"
            )
        return key


def _open_tls(spec: LaunchSpec, side: Side) -> TlsIdentity | None:
    if spec.tls is None:
        return None
    from msrun.cluster.tls import open_identity

    return open_identity(spec.tls, side)


def find_master(spec: LaunchSpec, patience: Patience) -> str:
    """Return the numeric address of the scheduler's host, whose name may become known only when that has come up
    (RendezvousTimeout, Interrupted: not in time, or a signal came; UsageError: it stands for this host's own loopback
    address)."""
    while not spec.stands_for:
        try:
            return resolve_address(spec.master_addr)
        except UnresolvedName as error:
            patience.wait(str(error))
    return spec.master_addr


def dial(
    place: tuple[str, int],
    greet: Callable[[Connection, str], Caller],
    tls: TlsIdentity | None,
    patience: Patience,
    *,
    retry_s: float = 0.0,
) -> tuple[Connection, float]:
    """Return a connection to a scheduler at `place` that has let this host in, maybe later than now, and how long that
    may be silent (ClusterError: it refuses this host, or is none; RendezvousTimeout, Interrupted). `greet`: begins to
    speak over a connection, with this host's address towards the scheduler; `retry_s`: how long this host's key may be
    another."""
    unknown_since = 0.0
    while True:
        why = "it closed the connection"
        try:
            stream = socket.create_connection(place, timeout=CONNECT_S)
            own_address = stream.getsockname()[0].partition("%")[0]
            connection = Connection(stream, tls)
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        else:
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                try:
                    caller = greet(connection, own_address)
                    if (silence_s := _await_answer(caller, patience)) is not None:
                        stack.pop_all()
                        return connection, silence_s
                except NoKey as error:
                    why, unknown_since = str(error), unknown_since or time.monotonic()
                    if time.monotonic() - unknown_since >= retry_s:
                        raise ClusterError(why) from None
                except Refused as error:
                    raise ClusterError(str(error)) from None
        remedy = "; start msrun there, and check --master_addr, --master_port and firewalls"
        patience.wait(f"no scheduler at {place[0]}:{place[1]} ({why})", remedy)


def _await_answer(caller: Caller, patience: Patience) -> float | None:
    end, connection = time.monotonic() + GREETING_S, caller.connection
    with selectors.DefaultSelector() as selector:
        for source in (patience.signals, connection):
            selector.register(source, selectors.EVENT_READ)
        while not connection.is_closed:
            if time.monotonic() >= end:
                raise Refused(f"the scheduler at {caller.place} does not answer: is it another program?")
            if any(key.fileobj is patience.signals for key, _ in selector.select(max(0.0, end - time.monotonic()))):
                patience.heed_signals()
            connection.flush()
            while bodies := caller.receive():
                if (silence_s := caller.take(bodies[0])) is not None:
                    return silence_s
    return None


class DialledPart:
    """This host's part after the scheduler has let it in. A context."""

    def __init__(
        self, spec: LaunchSpec, connection: Connection, silence_s: float, signals: SignalPipe, place: tuple[str, int]
    ) -> None:
        """`silence_s`: how long the scheduler may give no sign of life; `place`: where it is."""
        self._spec, self._signals, self._silence_s = spec, signals, silence_s
        self._server: ForkServerHandle | None = None  # the fork server of the part before, for the next
        self._has_run = False
        where = f"the scheduler at {place[0]}:{place[1]}"

        def explain(why: str) -> str:
            changed = f"has sent what cannot be read ({connection.fault}): something between the hosts changes it"
            return f"lost {where}, which {changed if connection.fault else why}"

        self._link = LauncherLink(connection, silence_s=silence_s, explain_loss=explain)

    def __enter__(self) -> DialledPart:
        self._link.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        if self._server is not None:
            self._server.kill()

    def await_part(self, patience: Patience) -> HostPart | None:
        """Return what the launcher says when all have joined; None: the job did without (ClusterError, PeerFailed)."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            selector.register(self._link, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._signals:
                        patience.heed_signals()
                while (message := self._link.take()) is not None:
                    kind = message["type"]
                    if kind == "run":
                        return decode_record(HostPart, message["part"])
                    if kind == "waiting":
                        patience.tell(message["text"])
                    elif kind == "called_off" and not message["exit_code"]:
                        patience.tell(message["reason"])
                        return None
                    elif kind == "called_off":
                        raise PeerFailed(message["reason"], message["exit_code"])
                    elif kind == "gone":
                        moment = "the job went on" if self._has_run else "all hosts had come"
                        raise ClusterError(f"{message['reason']}, before {moment}")

    def run(self, part: HostPart, start: Start) -> JobResult:
        """Run this host's part, from what `await_part` has returned; errors as `run_part`."""
        link, self._has_run = self._link, True
        fleet = fleet_of_part(part, self._spec)
        assert fleet is not None, "a job of this host alone"
        came = "come together again" if part.first_attempt else "come"
        start.say(f"all {len(fleet.hosts)} hosts have {came}; this is {fleet.own.describe()}")

        def display(spec: LaunchSpec, plan: LaunchPlan, faults: OwnFaults) -> Console:
            shown = Console(spec, plan, faults, quiet=start.quiet).open_metrics()
            shown.also, shown.stop_self = LauncherReport(link, plan, None), self._stop
            return shown

        limit_s = STOPPED_SHARE * self._silence_s
        own = AgentPart(
            display, self._signals, link, fleet, part.master_port, early_server=self._server, stopped_limit_s=limit_s
        )
        with told_errors(link):
            asked = of_job(self._spec, part.job_id)
            spec = replace(
                local_part(asked, fleet),
                log_dir=folder_of(asked.log_dir, part.folder),
                first_attempt=part.first_attempt,
                max_restarts=part.max_restarts,
            )
            result = run_part(spec, replace(start, job_id=part.job_id), own)
        self._server = result.server
        tell_result(link, result)
        if result.goes_on:
            why = result.failure.reason if result.failure else "the job starts again"
            start.say(f"{why}; waiting for its next start")
        else:
            with contextlib.suppress(KeyboardInterrupt):
                link.wait(FETCH_S)
        return result

    def _stop(self) -> None:
        """Stop as Ctrl-Z wants: here, or at the launcher, which has said so and goes on some time."""
        if self._link.goes_on.is_set():
            stop_this_process()
        self._link.goes_on.wait()
