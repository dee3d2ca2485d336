"""A job of several hosts on each of which msrun is typed, or started by a cluster manager: this host's part of it.

The host with the scheduler leads the job as a launcher over SSH does; every other one comes to it and is an agent.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msrun import contract
from msrun.agent.logs.own_file import read_end
from msrun.cluster.connection import Connection
from msrun.cluster.handshake import Caller
from msrun.cluster.hosts import HostRequest, NoKey
from msrun.cluster.protocol import protocol
from msrun.cluster.rendezvous import UnresolvedName, resolve_address
from msrun.errors import UsageError
from msrun.launch.console import say
from msrun.launch.directory.jobs import new_job_id, of_job
from msrun.launch.directory.log_directory import write_private
from msrun.launch.job import JobResult, check_part, job_signals, look_at_host, plan_dry_run
from msrun.launch.job_hosts import table_digest
from msrun.launch.rendezvous import Patience, has_scheduler, open_port
from msrun.planning.environment import settle_mindspore
from msrun.planning.spec import LaunchSpec

if TYPE_CHECKING:  # loaded for jobs with --tls_config
    from msrun.cluster.tls.identity import Side, TlsIdentity

KEY_S = 5.0
"""How long the key that a host has may be that of an earlier job, or none: a shared disk shows a new file late."""
MAX_KEY_BYTES = 4096


def run_joined_job(
    spec: LaunchSpec,
    caller: Mapping[str, str],
    *,
    quiet: bool = False,
    is_last: bool = False,
    job_id: str = "",
    on_directory: Callable[[str, Path], None] = lambda _id, _folder: None,
) -> JobResult:
    """Run this host's part of a job to the end of the job. Arguments as `launch.job.run_job`.

    Raises:
        UsageError: something is wrong that was seen before any process started.
        ClusterError: the hosts did not come together; nothing was started.
        RendezvousTimeout: not everybody came in time; says who is missing.
        Interrupted: a signal came before all had come.
    """
    facts = look_at_host(spec, caller)
    spec = settle_mindspore(spec, facts)
    check_part(spec, facts)
    tell = partial(say, quiet=quiet)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(job_signals(spec, is_last=is_last))
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
            from msrun.launch.fleet.joined_hosts import JoinedHosts
            from msrun.launch.fleet.starts import run_fleet_job

            token = stack.enter_context(key.made())
            if spec.is_under_scheduler and not (spec.token or spec.tls):
                tell(f"no --token_file or MSRUN_TOKEN: whoever reaches {place[0]}:{place[1]} can join this job")
            job_id = job_id or new_job_id()
            server = _open_tls(spec, "server")
            for warning in server.warnings if server else ():
                if warning not in warnings:
                    tell(warning)
            spec = of_job(spec, job_id)
            joined = JoinedHosts(spec, request(master_addr), job_id, place, listener, token, server, signals, tell)
            stack.enter_context(joined).meet()
            whole = joined.whole_spec()
            result = run_fleet_job(whole, caller, quiet=quiet, job_id=job_id, on_directory=on_directory, joined=joined)
            joined.call_off("the job has ended without this host", result.exit_code)
            return result

        from msrun.launch.remote.dialled_part import DialledPart, dial

        def greet(connection: Connection, own_address: str) -> Caller:
            return Caller(connection, key.read(), f"{place[0]}:{place[1]}", lambda: request(own_address))

        retry_s = 0.0 if key.is_given else KEY_S
        connection, silence_s = dial(place, greet, tls, patience, retry_s=retry_s)
        part = stack.enter_context(DialledPart(spec, connection, silence_s, signals, place))
        tell("registered with the scheduler" + (f" through {connection.tls_version}" if tls else ""))
        while (own := part.await_part(patience)) is not None:
            result = part.run(own, caller, quiet=quiet, on_directory=on_directory, say=tell)
            if not result.goes_on:
                return result
        return JobResult(plan_dry_run(spec, caller), None, ())  # nobody has needed this host


class JobKey:
    """What the hosts of a job know each other by: the user's token, or a random one in a log directory that they share.

    With TLS alone their certificates say who they are. Under a scheduler, whose pods may share no directory, it is the
    place where they meet: whoever reaches that is taken as one of the job's.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        place = f"{spec.master_addr}:{spec.meeting_port}"
        known = b"tls" if spec.tls else place.encode() if spec.is_under_scheduler else b""
        self._given = spec.token.encode() or known
        self.path = spec.log_dir / f".meeting_{spec.meeting_port}"

    @property
    def is_given(self) -> bool:
        """Whether nothing has to be read."""
        return bool(self._given)

    @contextlib.contextmanager
    def made(self) -> Iterator[bytes]:
        """Give the key on the scheduler's host, where the others find it until the end.

        Raises:
            UsageError: the log directory cannot be written.
        """
        if self._given:
            yield self._given
            return
        key = secrets.token_hex(32)
        try:
            self.path.parent.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
            write_private(self.path, key)
        except OSError as error:
            raise UsageError(f"--log_dir {self.path.parent}: cannot write {self.path} ({error.strerror})") from None
        try:
            yield key.encode()
        finally:
            if read_end(self.path, len(key)) == key.encode():
                self.path.unlink(missing_ok=True)

    def read(self) -> bytes:
        """Return the key on another host.

        Raises:
            Refused: there is none, or not yet.
        """
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
    from msrun.cluster.tls.identity import open_identity

    return open_identity(spec.tls, side)


def find_master(spec: LaunchSpec, patience: Patience) -> str:
    """Return the numeric address of the scheduler's host.

    Its name may become known only when its host, or pod, has come up.

    Raises:
        RendezvousTimeout, Interrupted: it has not become known in time, or a signal came.
        UsageError: it stands for this host's own loopback address here.
    """
    while not spec.stands_for:
        try:
            return resolve_address(spec.master_addr)
        except UnresolvedName as error:
            patience.wait(str(error))
    return spec.master_addr
