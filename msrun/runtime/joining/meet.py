"""Bring the ranks of a world together where no launcher does: everybody registers, then all share one store."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.joining.ms_role import OWN_ADDRESS, joining_limit_s, silence_limit_s
from msrun.runtime.joining.lifeline import Lifeline
from msrun.runtime.joining.network import keep_to_interface, listen_at, listen_beside, own_address
from msrun.runtime.joining.registrar import Registrar
from msrun.runtime.joining.registration import Registration, register
from msrun.runtime.joining.registry import Registry, Request
from msrun.runtime.joining.spec import Meeting, WorldSpec, join_place

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
