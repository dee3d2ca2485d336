"""This host's part of a job whose hosts come to the one with the scheduler, on all the others: msrun is an agent then.

It serves the launcher of that host as an agent over SSH does, over a connection that it has made itself, and shows its
own part of the job to whoever has typed msrun here.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msrun.agent.observer import OwnFaults
from msrun.agent.pause import stop_this_process
from msrun.agent.processes.server_handle import ForkServerHandle
from msrun.agent.signals import SignalPipe
from msrun.cluster.connection import Connection
from msrun.cluster.handshake import Caller
from msrun.cluster.hosts import NoKey, Refused
from msrun.cluster.protocol import HostPart
from msrun.errors import ClusterError, PeerFailed
from msrun.launch.console import Console
from msrun.launch.directory.jobs import of_job
from msrun.launch.job import AgentPart, JobResult, run_part
from msrun.launch.remote.agent import FETCH_S, STOPPED_SHARE, LauncherReport, fleet_of_part, tell_result, told_errors
from msrun.launch.remote.launcher_link import LauncherLink
from msrun.launch.rendezvous import Patience, folder_of, local_part
from msrun.launch.transport.sealed import SealedPipe
from msrun.planning.plan import LaunchPlan
from msrun.planning.record_json import decode_record
from msrun.planning.spec import LaunchSpec

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls.identity import TlsIdentity

CONNECT_S = 3.0
GREETING_S = 15.0
"""How long the scheduler may take to answer."""


def dial(
    place: tuple[str, int],
    greet: Callable[[Connection, str], Caller],
    tls: TlsIdentity | None,
    patience: Patience,
    *,
    retry_s: float = 0.0,
) -> tuple[Connection, float]:
    """Return a connection to a scheduler that has let this host in, and how long that may be silent.

    Its host, or msrun there, may come later than this one.

    Args:
        place: numeric address and port of the scheduler.
        greet: begins to speak over a connection; gets this host's address towards the scheduler, too.
        retry_s: how long the key of this host may be another than the scheduler's.

    Raises:
        ClusterError: it refuses this host, or is none.
        RendezvousTimeout, Interrupted: nobody was there in time, or a signal came.
    """
    unknown_since = 0.0
    while True:
        why = "it closed the connection"
        try:
            stream = socket.create_connection(place, timeout=CONNECT_S)
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        else:
            with contextlib.ExitStack() as stack:
                connection = Connection(stream, tls.open_session() if tls else None)
                stack.callback(connection.close)
                try:
                    caller = greet(connection, stream.getsockname()[0].partition("%")[0])
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
    """Return how long the scheduler may be silent, which lets this host in; None when it has hung up."""
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
        self._spec, self._signals = spec, signals
        self._silence_s = silence_s
        self._server: ForkServerHandle | None = None
        """The fork server of the part before, for the next."""
        self._has_run = False
        pipe = SealedPipe(connection, place[0])
        where = f"the scheduler at {place[0]}:{place[1]}"

        def explain(why: str) -> str:
            changed = f"has sent what cannot be read ({pipe.fault}): something between the hosts changes it"
            return f"lost {where}, which {changed if pipe.fault else why}"

        self._link = LauncherLink(pipe, silence_s=silence_s, explain_loss=explain)

    def __enter__(self) -> DialledPart:
        self._link.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        if self._server is not None:
            self._server.kill()

    def await_part(self, patience: Patience) -> HostPart | None:
        """Return what the launcher says when all hosts have come, or come together again; None: the job has ended well
        without this one.

        Raises:
            ClusterError: the scheduler has gone.
            PeerFailed: the job is called off.
        """
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

    def run(
        self,
        part: HostPart,
        caller: Mapping[str, str],
        *,
        quiet: bool,
        on_directory: Callable[[str, Path], None],
        say: Callable[[str], None],
    ) -> JobResult:
        """Run this host's part, from what `await_part` has returned. Other arguments and errors as `run_part`."""
        link, self._has_run = self._link, True
        fleet = fleet_of_part(part, self._spec)
        assert fleet is not None, "a job of this host alone"
        came = "come together again" if part.first_attempt else "come"
        say(f"all {len(fleet.hosts)} hosts have {came}; this is {fleet.own.describe()}")

        def display(spec: LaunchSpec, plan: LaunchPlan, faults: OwnFaults) -> Console:
            shown = Console(spec, plan, faults, quiet=quiet).open_metrics()
            shown.also, shown.stop_self = LauncherReport(link, plan, None), self._stop
            return shown

        limit_s = STOPPED_SHARE * self._silence_s
        own = AgentPart(
            display, self._signals, link, fleet, part.master_port, early_server=self._server, stopped_limit_s=limit_s
        )
        with told_errors(link):
            spec = replace(
                local_part(of_job(self._spec, part.job_id), fleet),
                log_dir=folder_of(of_job(self._spec, part.job_id).log_dir, part.folder),
                first_attempt=part.first_attempt,
                max_restarts=part.max_restarts,
            )
            result = run_part(spec, caller, own, job_id=part.job_id, on_directory=on_directory)
        self._server = result.server
        tell_result(link, result)
        if result.goes_on:
            say(f"{result.failure.reason if result.failure else 'the job starts again'}; waiting for its next start")
        else:
            with contextlib.suppress(KeyboardInterrupt):
                link.wait(FETCH_S)
        return result

    def _stop(self) -> None:
        """Stop as Ctrl-Z wants: here, or at the launcher, which has said so and goes on some time."""
        if self._link.goes_on.is_set():
            stop_this_process()
        self._link.goes_on.wait()
