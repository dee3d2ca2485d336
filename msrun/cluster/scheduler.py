"""The scheduler process: hosts the store that plain torch scripts meet on and keeps the job's record.

It never runs user code and never carries a rank. It ends when the agent's end of its channel closes, so it cannot
outlive the job; the job ends when the scheduler does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from msrun import contract
from msrun.cluster.membership import describe_delay
from msrun.cluster.messages import Channel, Message, await_input
from msrun.cluster.own_thread import OwnThread, print_fault
from msrun.cluster.rendezvous import serve_tcp_store
from msrun.planning.ranks import count_workers

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def run_scheduler(channel_fd: int, listener_fd: int) -> int:
    """Serve until the agent goes away; stdout is `scheduler.log`.

    Returns EXIT_OK, or EXIT_CLUSTER when the agent went away before it said that the job is over.

    The store starts in a thread: importing torch takes seconds where it was not preloaded, and the record must not
    wait for it, nor be lost when the job is over sooner.
    """
    channel = Channel(socket.socket(fileno=channel_fd))
    record = Record(sys.stdout)
    host = StoreHost(socket.socket(fileno=listener_fd), record, STORE_BYTES)
    has_store = is_store_needed = True
    while not channel.is_closed:
        for message in channel.receive():
            record.note(message)
            if message.get("type") == "job":
                has_store = message.get("has_store", True)
                is_store_needed = message.get("is_store_needed", True)
            if message.get("type") == "ready" and has_store:
                if find_spec("torch") is None:
                    host.do_without(is_store_needed=is_store_needed)
                    continue
                host.is_wanted_late = message["start_method"] == "fork" and "torch" not in sys.modules
                OwnThread("msrun-store", host.open, _end).start()
            if message.get("type") == "restarting":
                host.renew()
                channel.send({"type": "store_ready", "attempt": message["attempt"]})
    channel.close()
    record.write("agent has gone: scheduler ends")
    return contract.EXIT_OK if record.is_over else contract.EXIT_CLUSTER


STORE_BYTES = 1 << 30
"""For what workers, and strangers who reach the store, put into it: a rendezvous needs a few kilobytes for a rank."""


class StoreHost:
    """Hosts the store for the rest of this process's life; without it the scheduler is of no use and ends."""

    def __init__(self, listener: socket.socket, record: Record, max_bytes: int = 0) -> None:
        """`max_bytes`: of memory, beside what the process has when the store begins; 0 = no limit."""
        self._listener = listener
        self._record = record
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self.is_wanted_late = False
        """Wait for somebody to connect: a script whose imports were read and hold no torch hardly ever does."""

    def open(self) -> None:
        """Start the store. Takes as long as importing torch, which costs a core for more than a second."""
        address, port = self._listener.getsockname()[:2]
        if self.is_wanted_late:
            await_input(self._listener)
        import torch.distributed  # noqa: F401 - the long part, outside the lock

        if self._max_bytes:
            limit_memory(self._max_bytes)
        with self._lock:
            self._store = serve_tcp_store(self._listener.dup())
        self._record.write(f"scheduler pid {os.getpid()}: store listens on {address}:{port}")

    def do_without(self, *, is_store_needed: bool) -> None:
        """Act for a Python without torch, which hardly any worker then asks for a store.

        On one host rank 0 of a torch program of another Python opens the store itself, at the same address. The
        workers of several hosts have been told to expect it: the first that asks for it ends the job.
        """
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

    def renew(self) -> None:
        """Replace the store by an empty one on the same socket: torch takes what it finds there for its own job's."""
        with self._lock:
            if self._store is not None:
                self._store = None
                self._store = serve_tcp_store(self._listener.dup())


def _end(error: BaseException) -> None:
    """End the process, so that the agent learns that the store is gone."""
    print_fault(error)
    os._exit(1)


def limit_memory(more_bytes: int) -> None:
    """Let this process have so much more memory than it has now, and no more.

    torch's store takes memory for a value when its length has come; it has no limit, and nobody proves who he is.
    """
    status = Path("/proc/self/status").read_bytes()
    now = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(b"VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [now + more_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


class Record:
    """Writes `scheduler.log`: one line per moment of the job, with the wall-clock time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._world_size = 0
        self._registered = 0
        self.is_over = False
        """True once the agent has said that the job is over."""

    def write(self, text: str) -> None:
        """Write one line and flush it."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        with contextlib.suppress(OSError):  # disk full: no reason to end the job
            print(f"{stamp}.{int(now * 1000) % 1000:03d} {text}", file=self._stream, flush=True)

    def note(self, message: Message) -> None:
        """Write what the agent reports."""
        kind = message.get("type")
        if kind == "job":
            self._world_size = message["world_size"]
            self.write(f"job {message['job_id']}: {count_workers(self._world_size)} on {message['host']}")
        elif kind == "started":
            self._registered += 1
            self.write(
                f"rank {message['global_rank']} registered: pid {message['pid']}, "
                f"{self._registered} of {self._world_size}"
            )
        elif kind == "exited":
            self.write(f"rank {message['global_rank']} ended: {message['how']}")
        elif kind == "stopping":
            self.write(f"stopping the job: {message['reason']}")
        elif kind == "restarting":
            self._registered = 0
            when = describe_delay(message["delay_s"])
            self.write(f"starting again {when}, attempt {message['attempt']}: {message['reason']}")
        elif kind == "hang":
            self.write(f"the job is stuck: {message['reason']}")
        elif kind in ("note", "waiting"):
            self.write(message["text"])
        elif kind == "signal":
            self.write(f"signal {message['name']} passed on to {count_workers(len(message['global_ranks']))}")
        elif kind == "over":
            self.is_over = True
            self.write(f"job over: {message['reason']}")
