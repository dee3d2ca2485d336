"""Where the workers of a job meet: a FileStore on one host, and a live TCPStore for plain torch scripts, which the
scheduler process hosts beside the job's record.

That process never runs user code and never carries a rank. It ends when the agent's end of its channel closes, so it
cannot outlive the job; the job ends when the scheduler does.

torch's own TCPStore server listens on every interface. Here it is handed a socket that is already bound to the address
of the job, so a one-host job is not reachable from outside. Connections made before the server runs wait in the
socket's backlog: no worker can come too early."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from msrun import contract
from msrun.cluster.messages import Channel, Message, OwnThread, await_input, print_fault
from msrun.errors import ClusterError, UsageError, refused_as
from msrun.planning.hosts import count_workers

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


class UnresolvedName(ClusterError):
    """A host name that nobody knows, or not yet: in a cluster it may come up together with its host."""


def resolve_address(name: str) -> str:
    """Return the numeric address of the scheduler's host; a numeric one comes back as it is. Raises UnresolvedName:
    nothing of that name is known now. Raises UsageError: this host takes it for its own loopback address."""
    from msrun.planning.spec import is_loopback  # not for the scheduler

    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise UnresolvedName(
            f"--master_addr {name}: cannot be resolved ({reason}); give an address, or a name that this host knows"
        ) from None
    address = str(found[0][4][0]).partition("%")[0]
    # Many systems have their own name in /etc/hosts as 127.0.1.1.
    if ipaddress.ip_address(address).is_loopback and not is_loopback(name):
        raise UsageError(
            f"--master_addr {name}: is {address} on this host, which no other can reach; give the address itself"
        )
    return address


def own_addresses() -> Mapping[str, str]:
    """Return numeric address -> name of the network interface, of all interfaces of this host."""
    import psutil

    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


BACKLOG = 4096
_NEIGHBOUR_TRIES = 20


def listen(address: str, port: int, remedy: str = "leave it out to take a free port") -> socket.socket:
    """Return a listening socket on `address`, IPv4 or IPv6; port 0 takes a free one, where possible before another.
    `remedy`: what the user can do when the port is taken. Raises UsageError: the port is in use or not allowed."""
    with refused_as(f"--master_port {port}: cannot listen on {address}:{port}", remedy):
        listener = _bound(address, port)
        for _ in range(_NEIGHBOUR_TRIES if port == 0 else 0):
            try:
                _bound(address, listener.getsockname()[1] + 1).close()  # for MindSpore's scheduler, if there is one
                break
            except (OSError, OverflowError):
                listener.close()
                listener = _bound(address, port)
        listener.listen(BACKLOG)
    return listener


def _bound(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except BaseException:
        listener.close()
        raise
    return listener


def forget_waiting(listener: socket.socket) -> None:
    """Close the connections that wait at a listening socket: whoever tried whether it can be reached is no client."""
    listener.settimeout(0.0)
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while True:
            listener.accept()[0].close()
    listener.settimeout(None)


def run_scheduler(channel_fd: int, listener_fd: int) -> int:
    """Serve until the agent goes away; stdout is `scheduler.log`. Returns EXIT_OK, or EXIT_CLUSTER when the agent went
    away before it said that the job is over. The store starts in a thread: importing torch takes seconds where it was
    not preloaded, and the record must not wait for it, nor be lost when the job is over sooner."""
    channel = Channel(socket.socket(fileno=channel_fd))
    record = Record(sys.stdout)
    host = StoreHost(socket.socket(fileno=listener_fd), record)
    job: Message = {}
    while not channel.is_closed:
        for message in channel.receive():
            record.note(message)
            kind = message.get("type")
            if kind == "job":
                job = message
            elif kind == "ready" and job.get("has_store", True):
                if find_spec("torch") is None:
                    host.do_without(is_store_needed=job.get("is_store_needed", True))
                    continue
                host.is_wanted_late = message["start_method"] == "fork" and "torch" not in sys.modules
                OwnThread("msrun-store", host.open, _end).start()
            elif kind == "restarting":
                host.renew()
                channel.send({"type": "store_ready", "attempt": message["attempt"]})
    channel.close()
    record.write("agent has gone: scheduler ends")
    return contract.EXIT_OK if record.is_over else contract.EXIT_CLUSTER


STORE_BYTES = 1 << 30
"""Of memory for what workers, and strangers, put into it, beside what the process has when the store begins: a rank
needs a few kilobytes."""


class StoreHost:
    """Hosts the store for the rest of this process's life; without it the scheduler is of no use and ends."""

    def __init__(self, listener: socket.socket, record: Record) -> None:
        self._listener, self._record = listener, record
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self.is_wanted_late = False  # wait for somebody to connect: of a script without torch hardly anybody

    def open(self) -> None:
        """Start the store. Takes as long as importing torch, which costs a core for more than a second."""
        address, port = self._listener.getsockname()[:2]
        if self.is_wanted_late:
            await_input(self._listener)
        import torch.distributed  # noqa: F401 - the long part, outside the lock

        limit_memory(STORE_BYTES)
        with self._lock:
            self._store = self._serve()
        self._record.write(f"scheduler pid {os.getpid()}: store listens on {address}:{port}")

    def renew(self) -> None:
        """Replace the store by an empty one on the same socket: torch takes what it finds there for its own job's."""
        with self._lock:
            if self._store is not None:
                self._store = None
                self._store = self._serve()

    def _serve(self) -> TCPStore:
        """Start torch's store on the socket; the libuv server cannot take one over (torch 2.11 to 2.13)."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, port = self._listener.getsockname()[:2]
        descriptor = self._listener.dup().detach()
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=False
        )

    def do_without(self, *, is_store_needed: bool) -> None:
        """Act for a Python without torch, which hardly any worker then asks for a store. On one host rank 0 of a torch
        program of another Python opens the store itself, at the same address. The workers of several hosts have been
        told to expect it: the first that asks for it ends the job."""
        if is_store_needed:
            OwnThread("msrun-store", self._end_at_first_client, _end).start()
        else:
            self._listener.shutdown(socket.SHUT_RDWR)  # also for whoever else holds the descriptor
            self._listener.close()

    def _end_at_first_client(self) -> None:
        await_input(self._listener)
        self._record.write(
            f"a worker asks for torch's store, which needs torch for {sys.executable}: pip install 'msrun[runtime]'"
        )
        os._exit(1)


def _end(error: BaseException) -> None:
    print_fault(error)
    os._exit(1)


def limit_memory(more_bytes: int) -> None:
    """Let this process have so much more memory, and no more: strangers make torch's store take any amount."""
    status = Path("/proc/self/status").read_bytes()
    now = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(b"VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [now + more_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


class Record:
    """Writes `scheduler.log`: one line per moment of the job, with the wall-clock time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._world_size = self._registered = 0
        self.is_over = False  # true once the agent has said that the job is over

    def write(self, text: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        with contextlib.suppress(OSError):  # disk full: no reason to end the job
            print(f"{stamp}.{int(now * 1000) % 1000:03d} {text}", file=self._stream, flush=True)

    def note(self, message: Message) -> None:
        match message:
            case {"type": "job", "job_id": job_id, "world_size": world_size, "host": host}:
                self._world_size = world_size
                self.write(f"job {job_id}: {count_workers(world_size)} on {host}")
            case {"type": "started", "global_rank": rank, "pid": pid}:
                self._registered += 1
                self.write(f"rank {rank} registered: pid {pid}, {self._registered} of {self._world_size}")
            case {"type": "exited", "global_rank": rank, "how": how}:
                self.write(f"rank {rank} ended: {how}")
            case {"type": "stopping", "reason": reason}:
                self.write(f"stopping the job: {reason}")
            case {"type": "restarting", "attempt": attempt, "delay_s": delay_s, "reason": reason}:
                from msrun.cluster.membership import describe_delay  # not in every scheduler

                self._registered = 0
                self.write(f"starting again {describe_delay(delay_s)}, attempt {attempt}: {reason}")
            case {"type": "hang", "reason": reason}:
                self.write(f"the job is stuck: {reason}")
            case {"type": "note" | "waiting", "text": text}:
                self.write(text)
            case {"type": "signal", "name": name, "global_ranks": ranks}:
                self.write(f"signal {name} passed on to {count_workers(len(ranks))}")
            case {"type": "over", "reason": reason}:
                self.is_over = True
                self.write(f"job over: {reason}")
