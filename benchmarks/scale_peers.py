"""Hosts that do nothing but speak with their launcher, for `scale.py`."""

from __future__ import annotations

import selectors
import socket
import time
from functools import partial

from msrun import __version__
from msrun.cluster.failure import FailureReport, fault_of_job
from msrun.cluster.host_report import HostAddress, HostReport
from msrun.cluster.messages import FrameBuffer, Message, encode_message
from msrun.launch.transport.opener import Way
from msrun.launch.transport.pipe import MARKER, AgentPipe
from msrun.planning.hosts import HostEntry
from msrun.planning.plan import HostPlan, WorkerPlan
from msrun.planning.program import Program
from msrun.planning.record import encode_record

PORT = 4711
FAILED_STATUS = 7 << 8


def name_of(node: int) -> str:
    return f"node{node:05}"


def address_of(node: int) -> str:
    return f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}"


class Peer:
    """An agent that does nothing but speak."""

    def __init__(self, node: int, workers: int, stream: socket.socket, sources: list[list[str]]) -> None:
        self.node = node
        self.ranks = range(node * workers, (node + 1) * workers)
        self.stream = stream
        self._sources = sources
        self._said = self._seen = 0  # numbers of the newest messages from here and from the launcher
        self._buffer = FrameBuffer()
        self._opening = b""
        self._has_begun = False

    def take(self, data: bytes) -> None:
        """Take what the launcher has sent: first the code of an agent, then messages."""
        if not self._has_begun:
            self._opening += data
            head, _, rest = self._opening.partition(b"\n")
            if len(rest) < int(head.split()[0] or 0):
                return
            self._has_begun, data = True, rest[int(head.split()[0]) :]
            self.stream.sendall(MARKER)
        for message in self._buffer.messages(data):
            if message["type"] == "beat":
                self.stream.sendall(encode_message({"type": "beat", "seen": self._seen}))
            elif message.get("seq", self._seen + 1) > self._seen:
                self._seen = message.get("seq", self._seen)
                getattr(self, f"_on_{message['type']}", lambda _: None)(message)

    def say(self, kind: str, **fields: object) -> None:
        self._said += 1
        self.stream.sendall(encode_message({"type": kind, "seq": self._said, **fields}))

    def tell(self, moment: str, **fields: object) -> None:
        self.say("event", moment=moment, fields=fields)

    def _on_job(self, _: Message) -> None:
        now = time.time()
        report = HostReport(
            host_name=name_of(self.node),
            python_version="3.11.2",
            msrun_version=__version__,
            architecture="x86_64",
            boot_id=str(self.node),
            device_target="cpu",
            received_at=now,
            made_at=now,
            addresses=(HostAddress(address_of(self.node), "eth0", 8),),
        )
        self.say("checked", report={**encode_record(report), "sources": self._sources})

    def _on_listen(self, _: Message) -> None:
        self.say("listening", port=PORT, error="")

    def _on_reach(self, _: Message) -> None:
        way = {"error": "", "source": address_of(self.node), "interface": "eth0", "is_own": False}
        self.say("reached", result=way)

    def _on_run(self, _: Message) -> None:
        workers = tuple(
            WorkerPlan(rank, index, index, {"RANK": str(rank), "LOCAL_RANK": str(index)}, f"/spool/worker_{rank}.log")
            for index, rank in enumerate(self.ranks)
        )
        program, name = Program("script", "/train.py"), name_of(self.node)
        host = HostPlan(self.node, name, address_of(self.node), program, "/", "fork", (), {"A": "b"}, workers)
        self.say("planned", host=encode_record(host), notes=[], target="cpu", logs=[])
        self.tell("preparing", preload=["torch"])
        self.tell("ready", start_method="fork", reason="", prepare_s=0.5)
        for rank in self.ranks:
            self.tell("started", global_rank=rank, pid=1000 + rank)

    def fail(self) -> None:
        """The first worker ends with exit code 7."""
        rank = self.ranks[0]
        self.tell("exited", global_rank=rank, how="exit code 7", status=FAILED_STATUS, state="failed")
        failure = fault_of_job("JOB", f"rank {rank} failed first: exit code 7", 7)
        self.say("failed", attempt=0, report=encode_record(FailureReport(failure, self.node)))

    def _on_stop(self, message: Message) -> None:
        failed = self.ranks[0] if message["report"]["node_rank"] == self.node else -1
        self.tell("stopping", reason=message["report"]["failure"]["reason"])
        for rank in self.ranks:
            if rank != failed:
                self.tell("exited", global_rank=rank, how="signal SIGTERM", status=15, state="stopped by msrun")
        self.say("ended", attempt=0, can_continue=True, come=[], has_begun=True, report=None)

    def _on_over(self, message: Message) -> None:
        others = [{"global_rank": rank, "state": "stopped by msrun", "doing": ""} for rank in self.ranks]
        failure = {**message["report"]["failure"], "others": others}
        self.say("result", failure=failure, survivors=[])
        self.say("logs_end")

    def _on_bye(self, _: Message) -> None:
        self.stream.shutdown(socket.SHUT_RDWR)


def serve_peers(streams: list[socket.socket], control: socket.socket, workers: int, sources: list[list[str]]) -> None:
    """Be all hosts until the launcher has gone; a byte on `control` has the last of them fail."""
    peers = [Peer(node, workers, stream, sources) for node, stream in enumerate(streams)]
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        for peer in peers:
            selector.register(peer.stream, selectors.EVENT_READ, peer)
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    if not control.recv(1):
                        return
                    peers[-1].fail()
                elif data := _read(key.data.stream):
                    key.data.take(data)
                else:
                    selector.unregister(key.fileobj)


def _read(stream: socket.socket) -> bytes:
    try:
        return stream.recv(1 << 16)
    except OSError:
        return b""


class SocketPipe:
    """The launcher's end of a socket pair, an `AgentPipe`, which counts what goes through."""

    tells_room = True

    def __init__(self, node: int, stream: socket.socket) -> None:
        self.address = address_of(node)
        self.exit_status: int | None = None
        self.sent_bytes = self.received_bytes = 0
        stream.settimeout(0.0)
        self._stream = stream

    def fileno(self) -> int:
        return self._stream.fileno()

    def read(self) -> bytes | None:
        try:
            data = self._stream.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self.received_bytes += len(data)
        return data

    def write(self, data: bytes | memoryview) -> int:
        try:
            count = self._stream.send(data)
        except BlockingIOError:
            return 0
        self.sent_bytes += count
        return count

    def close(self) -> None:
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def stderr_text(self) -> str:
        return ""


class SocketOpener:
    """The way to simulated hosts, a `HostOpener`."""

    def __init__(self, streams: list[socket.socket]) -> None:
        self.pipes = [SocketPipe(node, stream) for node, stream in enumerate(streams)]

    def can_resume(self, _entry: HostEntry) -> bool:
        return True

    def open(self, entry: HostEntry, _deadline: float | None) -> AgentPipe:
        return self.pipes[int(entry.name.removeprefix("node"))]

    def way(self, entry: HostEntry, *_: object) -> Way:
        return Way(partial(self.open, entry), b"pass")

    def close(self) -> None:
        """Nothing of its own is open."""

    def bytes_of_one(self) -> float:
        """Return how much has gone to and come from one host, on average."""
        return sum(pipe.sent_bytes + pipe.received_bytes for pipe in self.pipes) / len(self.pipes)
