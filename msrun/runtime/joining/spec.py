"""What a process reads from its environment, where it meets the others, and the sockets and interfaces there."""

from __future__ import annotations

import errno
import hashlib
import importlib
import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from msrun import contract
from msrun.errors import WorldError

FIRST_PORT, PORTS = 20000, 12000
"""Ports that follow from a job's key: below those of outgoing connections, which begin at 32768 on Linux."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet that no launcher brings together."""

    addresses: tuple[str, ...]
    """Addresses or names of one host, of which each rank takes the first that it reaches."""
    port: int
    key: str
    """Of the job; who brings another one is refused."""
    named_by: str
    """The variables that told the place, for errors."""
    keeper: str = "rank 0"
    """Who waits there for the others."""
    may_be_foreign: bool = False
    """Whether the keeper's own host may not know the address, as with that of a service in Kubernetes."""

    @property
    def place(self) -> str:
        """Address and port in words."""
        return " or ".join(join_place(address, self.port) for address in self.addresses)


@dataclass(frozen=True)
class WorldSpec:
    """Where a process stands."""

    source: str
    """Which variables said so: dry run, msrun, torchrun, mpirun, Slurm, rank table, MS_ROLE, or alone."""
    global_rank: int
    """-1 when the scheduler of MS_ROLE assigns it."""
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str
    """file:///path, env://, fake:// or empty when alone and where there is a meeting."""
    meeting: Meeting | None = None
    device_id: int | None = None
    """What DEVICE_ID is to say; None leaves it as it is."""


ALONE = WorldSpec("alone", 0, 1, 0, 1, "")


def join_place(address: str, port: int) -> str:
    """Return `address:port`, with brackets around IPv6."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the whole number that a variable holds."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise WorldError(f"{name}={text!r}: a whole number is expected; start the job with msrun") from None


def derive_port(key: str) -> int:
    """Return the port of a job that was given none: 20000 to 31999 by the SHA-256 of its key."""
    return FIRST_PORT + int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % PORTS


def choose_meeting(environ: Mapping[str, str], addresses: tuple[str, ...], named_by: str, key: str) -> Meeting:
    """Return where a job meets: at MASTER_ADDR and MASTER_PORT, and where they are not set at what the source tells.

    Args:
        addresses: of rank 0's host, as the source tells; empty when it does not.
        named_by: who told; without addresses the remedy.
        key: of the job; its port follows from it.
    """
    port = derive_port(key)
    if contract.MASTER_PORT in environ:
        port = parse_number(environ, contract.MASTER_PORT)
        if not 0 < port < 65536:
            raise WorldError(f"{contract.MASTER_PORT}={port}: a port from 1 to 65535 is expected, or leave it unset")
    if environ.get(contract.MASTER_ADDR):
        address = environ[contract.MASTER_ADDR]
        return Meeting((address,), port, key, contract.MASTER_ADDR, may_be_foreign=True)
    if not addresses:
        raise WorldError(f"{contract.MASTER_ADDR} is not set: {named_by}, or start with msrun")
    return Meeting(addresses, port, key, named_by)


BACKLOG = 4096
LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"  # noqa: S104  # only where a name leaves open which of the host's addresses is meant
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def listen_at(meeting: Meeting) -> socket.socket:
    """Return a socket that listens where others will come: on the address of the meeting alone.

    On all addresses where there is a choice: with several addresses, with a name that this host takes for its loopback
    (as in Debian's /etc/hosts), and with an address that may be that of a service in front of this host.
    """
    address = _bind_address(meeting)
    try:
        return _listen(address, meeting.port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return _listen_everywhere(meeting, address)
        raise _cannot_listen(meeting, error) from None


def listen_beside(listener: socket.socket) -> socket.socket:
    """Return a socket that listens on a free port of the same address."""
    return _listen(listener.getsockname()[0], 0)


def own_address(listener: socket.socket) -> str:
    """Return an address at which this process itself reaches its listener."""
    address = str(listener.getsockname()[0])
    return {ANY: LOOPBACK, "::": "::1"}.get(address, address)


def keep_to_interface(environ: MutableMapping[str, str], address: str) -> None:
    """Have gloo and TensorPipe use the interface that has `address`, unless the user chose one.

    Without that gloo takes the address of the host's name, which may be one that no other host reaches.
    """
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            for variable in _INTERFACE_VARIABLES:
                environ.setdefault(variable, name)
            return


def _bind_address(meeting: Meeting) -> str:
    if len(meeting.addresses) > 1:
        return ANY
    name = meeting.addresses[0]
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise WorldError(
            f"{meeting.named_by}: {name} cannot be resolved ({reason}); name an address of {meeting.keeper}'s host"
        ) from None
    address = str(found[0][4][0])
    is_named = name not in (address, "localhost")
    return ANY if is_named and ipaddress.ip_address(address.partition("%")[0]).is_loopback else address


def _listen_everywhere(meeting: Meeting, address: str) -> socket.socket:
    if not meeting.may_be_foreign:
        raise WorldError(
            f"{meeting.keeper} should be on the host {address} ({meeting.named_by}), but this host has no such "
            "address; start it there, or export MASTER_ADDR"
        )
    try:
        return _listen("::" if ":" in address else ANY, meeting.port)
    except OSError as error:
        raise _cannot_listen(meeting, error) from None


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _cannot_listen(meeting: Meeting, error: OSError) -> WorldError:
    name = "MS_SCHED_PORT" if meeting.keeper == "the scheduler" else "MASTER_PORT"
    return WorldError(
        f"{name} {meeting.port}: cannot listen on {join_place(meeting.addresses[0], meeting.port)} ({error.strerror}); "
        f"end what uses it, or export another {name} to all"
    )


def watch_for_silence(connection: socket.socket, seconds: int) -> None:
    """Have a connection break when the other host is silent for so long: cut off, asleep or gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, max(1, seconds // 3)),
        (socket.TCP_KEEPINTVL, max(1, seconds // 6)),
        (socket.TCP_USER_TIMEOUT, seconds * 1000),  # counts for what the two above send, too
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def address_of(pair: tuple[object, ...]) -> str:
    """Return the numeric address of one end of a connection, without the zone of IPv6."""
    return str(pair[0]).partition("%")[0]


def order_of(address: str) -> tuple[int, int]:
    """Return what sorts numeric addresses by number: 10.0.0.9 before 10.0.0.10."""
    parsed = ipaddress.ip_address(address)
    return parsed.version, int(parsed)


CPU = torch.device("cpu")
_DEVICE_OF_BACKEND = {"nccl": "cuda", "hccl": "npu"}
_REMEDY = "or give --device_target cpu"


def choose_backend(environ: Mapping[str, str], world_size: int) -> str:
    """Return the backend of a job that names none: those of its accelerator, else of the CPU."""
    target = environ.get(contract.MSRUN_DEVICE_TARGET)
    if target == "ascend":
        _import_torch_npu()
        return "cpu:gloo,npu:hccl"
    if target != "cpu" and torch.cuda.is_available():
        return "cpu:gloo,cuda:nccl"
    if target not in ("cpu", "gpu") and hasattr(torch, "npu") and torch.npu.is_available():
        return "cpu:gloo,npu:hccl"
    return environ.get(contract.MSRUN_CPU_BACKEND) or ("shm" if world_size > 1 else "gloo")


def _import_torch_npu() -> None:
    """Let torch know Ascend's devices, also where the script has not imported torch_npu."""
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise WorldError(
            f"--device_target ascend needs torch_npu, and it cannot be imported ({error}): install the torch_npu of "
            f"torch {torch.__version__.partition('+')[0]}, {_REMEDY}"
        ) from None


def check_backend(backend: str) -> None:
    """Refuse backends that torch would take in one another's place."""
    pairs = [part.rpartition(":") for part in backend.split(",")]
    if len(pairs) > 1 and any(name == "shm" for _, _, name in pairs):
        raise WorldError(f"init({backend!r}): shm carries tensors of the CPU alone; give cpu:gloo beside other devices")


def kind_of(backend: str) -> str:
    """Return what torch calls the devices of a backend such as `cpu:gloo,cuda:nccl`: its accelerator's, else `cpu`."""
    kinds = []
    for part in backend.lower().split(","):
        kind, _, name = part.rpartition(":")
        kinds.append(kind or _DEVICE_OF_BACKEND.get(name, "cpu"))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def use_device(spec: WorldSpec, backend: str) -> torch.device:
    """Make this rank's device torch's current one, and return it: what names no device goes there."""
    kind = kind_of(backend)
    if kind == "cpu":
        return CPU
    if kind == "npu" and not hasattr(torch, "npu"):
        _import_torch_npu()
    devices, index = torch.get_device_module(kind), int(os.environ.get(contract.DEVICE_ID, spec.local_rank))
    count = devices.device_count()
    if index >= count:
        raise WorldError(
            f"rank {spec.global_rank} is to use {kind} device {index}, and this host has {count}: start at most one "
            f"worker for each device, {_REMEDY}"
        )
    devices.set_device(index)
    return torch.device(kind, index)


def device_of_group() -> torch.device:
    """Return the device of a rank whose script has made torch's default group itself: the current one of its kind."""
    names = {part.rpartition(":")[2] for part in dist.get_backend_config().split(",")}
    kind = next((kind for name, kind in _DEVICE_OF_BACKEND.items() if name in names), "cpu")
    return CPU if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
