"""Bring the ranks of a world together where no launcher does, as in MindSpore's dynamic cluster by hand (MS_ROLE):
everybody registers, then all share one store.
"""

from __future__ import annotations

import atexit
import os
import random
import runpy
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import ClusterError, MsrunError, RendezvousTimeout, WorldError, near_miss
from msrun.runtime.joining.network import LineStream, keep_to_interface, listen_at, listen_beside, own_address
from msrun.runtime.joining.registrar import Registrar, Registry, Request, Seat
from msrun.runtime.joining.spec import Meeting, WorldSpec, join_place, parse_number


class Lifeline:
    """Watches the scheduler in a thread: when it, or another process, fails, this one gets SIGTERM; so does a parameter
    server when all workers have left.

    Source: MindSpore's workers send themselves SIGTERM when the scheduler is lost or reports a lost worker.
    """

    def __init__(self, stream: LineStream, place: str) -> None:
        """Take over the stream; `place` says where the scheduler is, for people."""
        self._stream = stream
        self._place = place
        self._has_left = False
        self.has_failed = False
        """The job has, elsewhere."""
        stream.socket.settimeout(None)
        os.register_at_fork(after_in_child=stream.close)  # else a forked child would hold the line of a dead parent
        threading.Thread(target=self._watch, name="msrun-lifeline", daemon=True).start()

    def leave(self) -> None:
        """Say that this process has done its part; after that nobody cares how it ends."""
        self._has_left = True
        self._stream.send({"left": True})
        with suppress(OSError):  # the scheduler may have closed first
            self._stream.socket.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        try:
            messages = self._stream.receive()
        except ValueError as error:
            messages = [{"failed": f"it has sent {error}"}]
        if self._has_left:
            return
        if messages and "over" in messages[0]:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.has_failed = True
        if messages is None:
            told = f"lost the scheduler at {self._place}"
        else:
            told = f"the scheduler at {self._place} ends the job: {messages[0].get('failed', messages[0])}"
        sys.stderr.write(f"msrun: error: {told}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)


REPORT_EVERY_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CONNECT_S = 5.0
_MORE_THAN_KEEPER_S = 15.0
"""The keeper's time may have begun later; its answer, which names the missing, is better than a time-out here."""


@dataclass(frozen=True)
class Registration:
    """A process's place, and what it needs to join the others."""

    seat: Seat
    keeper_address: str
    """Where this process reaches the keeper, and its store."""
    store_port: int
    own_address: str
    """This host's address for the others."""
    stream: LineStream
    """To the keeper; open."""
    token: str = ""
    """By which workers and parameter servers know each other."""


def register(
    meeting: Meeting, request: Request, limit_s: float, silence_s: int, source_address: str = ""
) -> Registration:
    """Register with the keeper of a meeting, which may not be there yet.

    Args:
        silence_s: after how long without a sign of life the keeper's host counts as lost.
        source_address: which of this host's addresses to use; empty leaves it to the system.

    Raises:
        WorldError: nobody keeps the meeting, not everybody came in time, or this process is refused.
    """
    end = time.monotonic() + limit_s
    stream = LineStream(_connect(meeting, request, end, limit_s, source_address))
    stream.watch_for_silence(silence_s)
    stream.send(request.to_json())
    own, peer = (str(pair[0]) for pair in (stream.socket.getsockname(), stream.socket.getpeername()))
    message = _await_answer(meeting, stream, end, limit_s)
    for word, told in (("refused", "has refused this process"), ("failed", "ends the job")):
        if word in message:
            stream.close()
            raise WorldError(f"{meeting.keeper} at {meeting.place} {told}: {message[word]}")
    address = message["address"] if own == peer and message["address"] else own
    return Registration(Seat(**message["seat"]), peer, message["store_port"], address, stream, message.get("token", ""))


def _connect(meeting: Meeting, request: Request, end: float, limit_s: float, source_address: str) -> socket.socket:
    pause_s = _FIRST_PAUSE_S
    report_at = time.monotonic() + REPORT_EVERY_S
    while True:
        reason = ""
        for address in meeting.addresses:
            try:
                wait_s = max(0.1, min(_CONNECT_S / len(meeting.addresses), end - time.monotonic()))
                source = (source_address, 0) if source_address else None
                connection = socket.create_connection((address, meeting.port), wait_s, source)
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                continue
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()  # a free port of the own host may be given to the very socket that asks for it
        now = time.monotonic()
        if now >= end:
            raise WorldError(
                f"{meeting.keeper} was not at {meeting.place} ({meeting.named_by}) within {limit_s:g} s ({reason}): "
                "start it, or correct the address and port"
            )
        if now >= report_at:
            who = f"rank {request.global_rank}" if request.global_rank >= 0 else "a worker"
            sys.stderr.write(f"msrun: {who} waits for {meeting.keeper} at {meeting.place} ({reason})\n")
            report_at = now + REPORT_EVERY_S
        time.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, end - now)))  # noqa: S311
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _await_answer(meeting: Meeting, stream: LineStream, end: float, limit_s: float) -> dict[str, Any]:
    wait_s = end + _MORE_THAN_KEEPER_S - time.monotonic()
    stream.socket.settimeout(None if wait_s == float("inf") else wait_s)
    try:
        while True:
            messages = stream.receive()
            if messages:
                return messages[0]
            if messages is None:
                told = "has closed the connection: it has ended, or another program listens there"
                break
    except TimeoutError:
        told = f"has not answered within {limit_s:g} s: not everybody came, or another program listens there"
    except ValueError as error:
        told = f"has answered with {error}: another program listens there"
    stream.close()
    raise WorldError(f"{meeting.keeper} at {meeting.place} ({meeting.named_by}) {told}")


TIME_OUT = "MS_TOPO_TIMEOUT"
"""Seconds for all to come, for ever when negative; MindSpore's default is 1800."""
SILENCE = "MS_NODE_TIMEOUT"
"""Seconds without a sign of life after which a worker counts as lost; 30."""
OWN_ADDRESS = "MS_WORKER_IP"
"""Which of its addresses a worker is to use towards the scheduler."""
DEFAULT_SILENCE_S = 30
RECOVERY = "MS_ENABLE_RECOVERY"
RECOVERY_NOTE = (
    f"{RECOVERY}=1 recovers nothing here: workers end with their scheduler, so start all of them again, from a "
    "checkpoint; msrun --max_restarts N does so by itself"
)
_ROLES = (contract.ROLE_WORKER, contract.ROLE_SCHEDULER, contract.ROLE_SERVER)
_OTHERS = (contract.MS_WORKER_NUM, contract.MS_SCHED_HOST, contract.MS_SCHED_PORT)


def find_worker(environ: Mapping[str, str]) -> WorldSpec | None:
    """Return the place of a process with MS_ROLE=MS_WORKER; its rank is -1 when the scheduler is to assign it.

    Raises:
        WorldError: MS_ROLE is none of the roles, or what belongs to it is missing or no number.
    """
    if not environ.get(contract.MS_ROLE):
        return None
    _check_role(environ[contract.MS_ROLE])
    if environ[contract.MS_ROLE] != contract.ROLE_WORKER:
        return None
    size = parse_number(environ, contract.MS_WORKER_NUM)
    device = parse_number(environ, contract.DEVICE_ID) if contract.DEVICE_ID in environ else None
    rank = _asked_rank(environ)
    return WorldSpec("MS_ROLE", rank, size, 0, size, "", _meeting(environ), device)


def find_cluster(environ: Mapping[str, str], role: str) -> tuple[Meeting, int, int] | None:
    """Return where a process with MS_ROLE=MS_SCHED or MS_PSERVER meets the others, and how many workers and parameter
    servers there are; None for a process of another role.

    Raises:
        WorldError: a number is missing or out of its range.
    """
    is_launched = contract.RANK in environ and {contract.WORLD_SIZE, contract.MSRUN_JOB_ID} & environ.keys()
    if environ.get(contract.MS_ROLE) != role or is_launched:
        return None
    size, servers = parse_number(environ, contract.MS_WORKER_NUM), parse_number(environ, contract.MS_SERVER_NUM, 0)
    least = int(role == contract.ROLE_SERVER)
    for name, number, lowest in ((contract.MS_WORKER_NUM, size, 1), (contract.MS_SERVER_NUM, servers, least)):
        if number < lowest:
            raise WorldError(f"{name}={number}: at least {lowest} is expected")
    return _meeting(environ), size, servers


def refuse_without_role(environ: Mapping[str, str]) -> None:
    """Refuse a process that has the other variables of a dynamic cluster, but no role in it.

    Raises:
        WorldError: it names them.
    """
    found = [f"{name}={environ[name]}" for name in _OTHERS if environ.get(name)]
    if len(found) > 1 and not environ.get(contract.MS_ROLE):
        raise WorldError(
            f"{' and '.join(found)} are set, but not {contract.MS_ROLE}: export {contract.MS_ROLE}="
            f"{contract.ROLE_WORKER}, {contract.MS_ROLE}={contract.ROLE_SCHEDULER} for the scheduler, or unset them"
        )


def joining_limit_s(environ: Mapping[str, str], default_s: float) -> float:
    """Return how long to wait for the others: MS_TOPO_TIMEOUT, or the default; infinite when negative."""
    seconds = parse_number(environ, TIME_OUT) if TIME_OUT in environ else default_s
    return seconds if seconds >= 0 else float("inf")


def silence_limit_s(environ: Mapping[str, str]) -> int:
    """Return after how many silent seconds a host counts as lost."""
    seconds = parse_number(environ, SILENCE, DEFAULT_SILENCE_S)
    if seconds < 1:
        raise WorldError(f"{SILENCE}={seconds}: at least 1 is expected")
    return seconds


def _asked_rank(environ: Mapping[str, str]) -> int:
    """Return RANK_ID, or MS_NODE_ID where it is a number; -1 without either.

    Source: in MindSpore a numeric node id asks for that rank.
    """
    node = environ.get(contract.MS_NODE_ID, "")
    named = int(node) if node.isdecimal() else -1
    rank = parse_number(environ, contract.RANK_ID, named)
    if named not in (-1, rank):
        raise WorldError(f"{contract.RANK_ID}={rank}, but {contract.MS_NODE_ID}={node}: make them equal, or unset one")
    if contract.RANK_ID in environ and rank < 0:
        raise WorldError(f"{contract.RANK_ID}={rank}: 0 or more is expected, or unset it to be given a rank")
    return rank


def _meeting(environ: Mapping[str, str]) -> Meeting:
    port = parse_number(environ, contract.MS_SCHED_PORT)
    if not 0 < port < 65536:
        raise WorldError(f"{contract.MS_SCHED_PORT}={port}: a port from 1 to 65535 is expected")
    host = environ.get(contract.MS_SCHED_HOST) or "127.0.0.1"
    return Meeting((host,), port, "MS_ROLE", contract.MS_SCHED_HOST, "the scheduler", may_be_foreign=True)


def _check_role(role: str) -> None:
    if role not in _ROLES:
        known = f"{', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
        raise WorldError(f"{contract.MS_ROLE}={role!r}: {known} is expected{near_miss(role, _ROLES)}")


SCHEDULER = "the scheduler"
STORE = "tcp://"
"""Before address and port of the scheduler's store, in MSRUN_RENDEZVOUS."""


@dataclass(frozen=True)
class Met:
    """A world whose ranks have met."""

    spec: WorldSpec
    """Complete: with the rank that was assigned."""
    store: Store
    lifeline: Lifeline | None
    """To the scheduler of MS_ROLE, which is to know how this process ends."""


def meet(spec: WorldSpec, meeting: Meeting, environ: MutableMapping[str, str], timeout_s: float) -> Met:
    """Wait until all ranks have come, and return the store that they share.

    Writes the interface towards the others into `environ`, unless the user chose one.

    Raises:
        WorldError: not everybody came in time (MS_TOPO_TIMEOUT, else `timeout_s`), or this process is refused.
    """
    limit_s, silence_s = joining_limit_s(environ, timeout_s), silence_limit_s(environ)
    request = Request(meeting.key, spec.world_size, spec.global_rank, describe_process(environ))
    if meeting.keeper == SCHEDULER:
        return _meet_at_scheduler(spec, meeting, request, environ, timeout_s)
    if spec.global_rank == 0:
        store, address = _keep(meeting, request, limit_s, silence_s)
    else:
        registration = register(meeting, request, limit_s, silence_s)
        registration.stream.close()
        store = connect_store(registration.keeper_address, registration.store_port)
        address = registration.own_address
    keep_to_interface(environ, address)
    return Met(spec, store, None)


def tell_server_places(environ: MutableMapping[str, str], registration: Registration) -> None:
    """Write down for this process where workers and parameter servers find each other, and by what they are known."""
    place = join_place(registration.keeper_address, registration.store_port)
    environ[contract.MSRUN_RENDEZVOUS] = f"{STORE}{place}"
    environ[contract.MSRUN_SERVER_TOKEN] = registration.token


def describe_process(environ: MutableMapping[str, str]) -> str:
    """Return who this process is, for people."""
    node = environ.get("MS_NODE_ID", "")
    return f"{node + ', ' if node else ''}pid {os.getpid()} on {socket.gethostname()}"


def serve_store(listener: socket.socket) -> TCPStore:
    """Start torch's store on a socket that listens already; the libuv server of torch cannot take one over."""
    address, port = own_address(listener), int(listener.getsockname()[1])
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=False
    )


def connect_store(address: str, port: int) -> TCPStore:
    """Connect to a store that is served."""
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    except RuntimeError as error:
        raise WorldError(
            f"the store at {address}, port {port}, cannot be reached ({str(error).splitlines()[0]}); is it behind a "
            "firewall?"
        ) from None


def _keep(meeting: Meeting, request: Request, limit_s: float, silence_s: int) -> tuple[Store, str]:
    """Keep the meeting as rank 0; returns the store and this host's address."""
    listener = listen_at(meeting)
    own = own_address(listener)
    registrar = Registrar(listener, Registry(meeting.key, request.world_size), "rank 0", silence_s)
    registrar.register_self(request, own)
    try:
        missing = registrar.gather(limit_s)
        if missing:
            reason = f"after {limit_s:g} s {missing}"
            registrar.fail(reason)
            raise WorldError(f"rank 0 at {registrar.place} ({meeting.named_by}): {reason}")
        store_listener = listen_beside(listener)
        port = int(store_listener.getsockname()[1])
        store = serve_store(store_listener)
        registrar.answer(port)
    finally:
        registrar.close()
    return store, registrar.reached_at or own


def _meet_at_scheduler(
    spec: WorldSpec, meeting: Meeting, request: Request, environ: MutableMapping[str, str], timeout_s: float
) -> Met:
    limit_s, silence_s = joining_limit_s(environ, timeout_s), silence_limit_s(environ)
    registration = register(meeting, request, limit_s, silence_s, environ.get(OWN_ADDRESS, ""))
    try:
        store = connect_store(registration.keeper_address, registration.store_port)
    except WorldError:
        registration.stream.close()
        raise
    keep_to_interface(environ, registration.own_address)
    if registration.token:
        tell_server_places(environ, registration)
    seat = registration.seat
    device_id = seat.local_rank if spec.device_id is None else spec.device_id
    found = replace(
        spec,
        global_rank=seat.global_rank,
        local_rank=seat.local_rank,
        local_world_size=seat.local_world_size,
        device_id=device_id,
    )
    lifeline = Lifeline(registration.stream, meeting.place)
    return Met(found, store, lifeline)


TOKEN_BYTES = 32
INTERRUPTED = contract.EXIT_SIGNAL_BASE + 2
SERVER_PROGRAM = "msrun.runtime.server"
"""What msrun starts, too; run by its name, for it stands above this module."""


def run_scheduler(
    meeting: Meeting, world_size: int, servers: int, environ: Mapping[str, str], timeout_s: float
) -> NoReturn:
    """Serve the workers until all have left, then end this process, with 0 when all went well.

    The process ends here, whatever it was started by: pytest, which the documents start scripts with, would take a
    SystemExit for an error of its own. Functions registered with atexit run. Source: MindSpore's scheduler calls exit.
    """
    if environ.get(RECOVERY) == "1":
        sys.stderr.write(f"msrun: scheduler: {RECOVERY_NOTE}\n")
    try:
        serve(meeting, world_size, joining_limit_s(environ, timeout_s), silence_limit_s(environ), servers)
        status = contract.EXIT_OK
    except MsrunError as error:
        sys.stderr.write(f"msrun: error: {error}\n")
        status = error.exit_code
    except KeyboardInterrupt:
        status = INTERRUPTED
    _end_program(status)


def run_server() -> NoReturn:
    """Be a parameter server until all workers have left, then end this process, as `run_scheduler` does."""
    try:
        runpy.run_module(SERVER_PROGRAM, run_name="__main__")
        status = contract.EXIT_OK
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else contract.EXIT_OK
    except KeyboardInterrupt:
        status = INTERRUPTED
    _end_program(status)


def _end_program(status: int) -> NoReturn:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve(meeting: Meeting, world_size: int, limit_s: float, silence_s: int, servers: int = 0) -> None:
    """Take workers and parameter servers in, give them ranks and a store, and wait until all workers have left.

    Raises:
        RendezvousTimeout: not everybody came within the limit; those who did are told who is missing.
        ClusterError: a worker ended without leaving the world; the others are told.
        WorldError: the address cannot be listened on.
    """
    listener = listen_at(meeting)
    registrar = Registrar(listener, Registry(meeting.key, world_size, servers), "scheduler", silence_s)
    try:
        also = f" and {servers} parameter servers" if servers else ""
        registrar.say(f"waiting for {world_size} workers{also}")
        missing = registrar.gather(limit_s)
        if missing:
            reason = f"{TIME_OUT} {limit_s:g}: {missing}"
            registrar.fail(reason)
            raise RendezvousTimeout(reason)
        store_listener = listen_beside(listener)
        port = int(store_listener.getsockname()[1])
        store = serve_store(store_listener)
        registrar.answer(port, secrets.token_hex(TOKEN_BYTES) if servers else "")
        registrar.say(f"all {world_size} workers{also} have come")
        lost = registrar.watch()
        if lost:
            reason = f"{lost} ended without release(): it failed, or its host is lost"
            registrar.fail(reason)
            raise ClusterError(reason)
        registrar.say("all workers have left")
        del store
    finally:
        registrar.close()
