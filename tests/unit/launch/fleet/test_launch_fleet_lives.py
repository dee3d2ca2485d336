"""Random lives of a connection: the launcher's end and the agent's end of it, and a network that the test plays."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from fake_agents import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.errors import ClusterError
from msrun.launch.fleet.agents import MAX_BEAT_S, AgentLink
from msrun.launch.remote.agent import LauncherLink
from msrun.launch.transport import link
from msrun.launch.transport.link import ByteChannel, EventLoop
from msrun.launch.transport.opener import Way
from msrun.launch.transport.pipe import SocketPipe
from msrun.planning.hosts import HostEntry

SILENCE_S = 60.0
SALVAGE = b"salvage"


class Wire:
    """One connection, an `AgentPipe` and the `ByteChannel` over it: bytes arrive when the test says so."""

    address = "10.0.0.1"
    exit_status = None

    def __init__(self, end, path=""):
        """`path`: where the agent listens, who is reached with the first bytes; empty where it is there already."""
        self.socket, self._path = end, path
        end.settimeout(0.0)
        self.to_agent, self.to_launcher = bytearray(), bytearray()
        self.is_cut = self.is_stopped = self.is_started = self.is_salvage = False
        self.has_unsent = False
        self.pipe = self
        self.on_bytes: Callable[[Any, bytes], None]
        self.on_end: Callable[[Any], None]

    def close(self):
        self.socket.close()
        self.is_cut = True

    def stderr_text(self):
        return ""

    def send(self, data):
        """The first bytes are the code for the interpreter."""
        if not self.is_started:
            head, _, rest = data.partition(b"\n")
            count = int(head.split()[0])
            self.is_salvage, data = rest[:count] == SALVAGE, rest[count:]
            if self._path and not self.is_salvage:
                self.socket.connect(self._path)
        self.to_agent += data

    def start(self):
        self.is_started = True

    def stop(self, then):
        if not self.is_stopped:
            self.is_stopped = True
            then()

    def carry(self, rng):
        """Bring some bytes to each end."""
        if self.is_cut:
            return
        count = rng.randint(0, len(self.to_agent))
        with contextlib.suppress(OSError):
            del self.to_agent[: self.socket.send(self.to_agent[:count])]
        with contextlib.suppress(OSError):
            came = self.socket.recv(1 << 16)
            self.to_launcher += came
            self.is_cut = not came
        count = rng.randint(0, len(self.to_launcher))
        data = bytes(self.to_launcher[:count])
        del self.to_launcher[:count]
        if data and not self.is_stopped:
            self.on_bytes(self, data)

    def end_if_cut(self):
        """Tell the launcher's end."""
        if (self.is_cut or self.is_salvage) and self.is_started and not self.is_stopped:
            self.is_stopped = True
            self.on_end(self)


def channel(loop, pipe, on_bytes, on_end):
    """Stand in for `ByteChannel` at the launcher's end."""
    if not isinstance(pipe, Wire):
        return ByteChannel(loop, pipe, on_bytes, on_end)
    pipe.on_bytes, pipe.on_end = on_bytes, on_end
    return pipe


class Tasks:
    """An event loop and its threads: what they are to do waits for the test."""

    def __init__(self):
        self.waiting = []
        self.opening = self.ending = self

    def call(self, function):
        function()

    def run(self, task, on_error):
        def work():
            try:
                task()
            except ClusterError as error:
                on_error(error)

        self.waiting.append(work)

    def call_later(self, seconds, task):
        if seconds < MAX_BEAT_S:  # signs of life are given by the test
            self.waiting.append(task)


class Life:
    """Both ends, what each has said, and what has arrived."""

    def __init__(self, folder, rng):
        self.rng = rng
        self.tasks = Tasks()
        self.wires = []
        self.may_connect = True
        self.to_launcher = []
        self.to_agent = []
        self.logs = []
        self.unread_logs = deque()
        self.heard_logs = []
        self.posts = []
        self.path = str(folder / "agent")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(100)
        self.listener.settimeout(0.0)
        self.link = AgentLink(
            0,
            HostEntry("host0", 1),
            Way(self._open, b"start", b"attach", lambda _: SALVAGE),
            {"type": "job"},
            lambda _link, message: self.posts.append(message),
            self._take_first,
            cast(EventLoop, self.tasks),
            silence_s=SILENCE_S,
        )
        ours, theirs = socket.socketpair()
        self.first = Wire(ours)
        self.clock = FakeClock()
        self.agent = LauncherLink(SocketPipe(ours=theirs), self.clock)
        self.agent.resume_at(self.listener, SILENCE_S)
        self.agent.send_logs(self._next_log)
        self.link.start()
        self.tasks.waiting.pop()()
        self.link.begin()

    def _open(self, _deadline):
        if self.first is not None:
            wire, self.first = self.first, None
        elif not self.may_connect:
            raise ClusterError("host0: connection refused")
        else:
            wire = Wire(socket.socket(socket.AF_UNIX), self.path)
        self.wires.append(wire)
        return wire

    def _take_first(self, message):
        if message["type"] == "log":
            self.heard_logs.append(message["number"])
        return bool(message["type"] == "log")

    def _next_log(self):
        return (
            {"type": "log", "name": "worker_0.log", "number": self.unread_logs.popleft()} if self.unread_logs else None
        )

    # -- what may happen -----------------------------------------------------------------------------------------------

    def say_to_launcher(self):
        self.to_launcher.append(len(self.to_launcher))
        self.agent.send("event", number=self.to_launcher[-1])

    def say_to_agent(self):
        self.to_agent.append(len(self.to_agent))
        self.link.send("wish", number=self.to_agent[-1])

    def write_log(self):
        self.logs.append(len(self.logs))
        self.unread_logs.append(self.logs[-1])
        self.agent.send_logs(self._next_log)  # which it would ask for in a moment

    def carry(self):
        for wire in self.wires:
            wire.carry(self.rng)

    def look(self):
        for _ in range(4):
            self.agent.loop.turn(0.0)

    def work(self):
        if self.tasks.waiting:
            self.tasks.waiting.pop(self.rng.randrange(len(self.tasks.waiting)))()

    def notice(self):
        for wire in self.wires:
            wire.end_if_cut()

    def beat(self):
        self.link.beat(self.rng.choice((0.1, 0.1, SILENCE_S / 2.5)))

    def cut(self):
        wire = self.rng.choice(self.wires)
        wire.close()

    def refuse(self):
        self.may_connect = not self.may_connect

    def settle(self):
        """Let everything arrive that can."""
        self.may_connect = True
        for _ in range(60):
            for step in (self.look, self.carry, self.notice, self.work, self.work):
                step()
            if not self.link.is_over:
                self.link.beat(0.0)

    def close(self):
        for wire in self.wires:
            wire.socket.close()
        self.agent.start()
        self.agent.close()
        self.listener.close()

    @property
    def heard_by_agent(self):
        wishes = []
        while (wish := self.agent.wait(0.0)) is not None:
            wishes.append(wish)
        return [wish["number"] for wish in wishes if wish["type"] == "wish"]


@contextlib.contextmanager
def living(rng):
    with tempfile.TemporaryDirectory(prefix="life-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "ByteChannel", channel)
        life = Life(Path(folder), rng)
        try:
            yield life
        finally:
            life.close()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 250))
def test_whatever_breaks_each_message_and_log_arrives_once_and_in_its_order(seed, count):
    rng = random.Random(seed)
    with living(rng) as life:
        steps = [life.say_to_launcher, life.say_to_agent, life.write_log, life.beat, life.cut, life.refuse]
        often = [life.carry, life.look, life.work, life.notice]
        for _ in range(count):
            rng.choice([*steps, *often, *often])()
        life.settle()
        heard = [post["number"] for post in life.posts if post["type"] == "event"]
        wishes = life.heard_by_agent
        own = [post["type"] for post in life.posts if post["type"] in ("opened", "cut", "resumed", "lost")]
        if life.link.is_over:  # a silence that was too long
            assert own.count("lost") == 1
            assert heard == life.to_launcher[: len(heard)] and wishes == life.to_agent[: len(wishes)]
            assert life.heard_logs == life.logs[: len(life.heard_logs)]
            return
        assert heard == life.to_launcher and wishes == life.to_agent and life.heard_logs == life.logs
        assert not life.link.has_unseen and not life.agent.unsent_logs
        assert own.count("cut") >= own.count("resumed") and own[-1] in ("opened", "resumed")
