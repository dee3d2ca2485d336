"""Agents that say what the test wants, for the launcher's side of the connection, and a clock that the test moves."""

from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any

from msrun.cluster.messages import FrameBuffer, Inbox, WakingQueue, encode_message
from msrun.errors import ClusterError
from msrun.launch.transport.opener import Way
from msrun.launch.transport.pipe import MARKER
from msrun.planning.hosts import HostEntry


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class InLoop:
    """What belongs to the thread of a loop, for a test in another one."""

    def __init__(self, loop, inner):
        self._loop, self._inner = loop, inner

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args, **fields):
            done = Future[Any]()
            self._loop.call(lambda: done.set_result(value(*args, **fields)))
            return done.result(60)

        return call


class FakePipe:
    """The pipe of one agent, an `AgentPipe`: `say` is what the agent says, `heard` what it was told."""

    def __init__(self, noise=MARKER, answer=None):
        """
        Args:
            noise: what comes before its first message.
            answer: called with every message that the agent is told.
        """
        self.address = "10.0.0.1"
        self.exit_status = None
        self.stderr = ""
        self.is_closed = False
        self.room = None
        """How many more bytes it takes; None = all."""
        self._answer = answer
        self._said = deque()
        self._wake = WakingQueue[None]()
        if noise:
            self.put(noise)
        self._bytes = b""
        self._answered = 0

    def put(self, data):
        """The agent writes bytes; empty ones are its end."""
        self._said.append(data)
        self._wake.post(None)

    def say(self, kind, **fields):
        self.put(encode_message({"type": kind, **fields}))

    def end(self, exit_status=None, stderr=""):
        """The agent ends; without a status the connection breaks."""
        self.exit_status, self.stderr = exit_status, stderr
        self.put(b"")

    def fileno(self):
        return self._wake.fileno()

    def read(self):
        self._wake.take()
        data = self._said.popleft() if self._said else None
        if self._said:
            self._wake.post(None)
        return data

    def write(self, data):
        if self.is_closed:
            raise BrokenPipeError
        count = len(data) if self.room is None else min(self.room, len(data))
        if self.room is not None:
            self.room -= count
        self._bytes += bytes(data[:count])
        new = self.heard[self._answered :]
        self._answered += len(new)
        for message in new if self._answer else ():
            self._answer(self, message)
        return count

    def close(self):
        self.is_closed = True
        self._wake.close()

    def stderr_text(self):
        return self.stderr

    @property
    def code(self):
        """What the interpreter there was given to run."""
        head, _, rest = self._bytes.partition(b"\n")
        return rest[: int(head.split()[0])] if rest else b""

    @property
    def heard(self):
        """What has come after the code."""
        head, _, rest = self._bytes.partition(b"\n")
        return FrameBuffer().messages(rest[int(head.split()[0]) :]) if rest else []

    def heard_of(self, kind):
        """The first message of a type that it was told."""
        return next(message for message in self.heard if message["type"] == kind)

    @property
    def heard_kinds(self):
        """Their types, without signs of life."""
        return [message["type"] for message in self.heard if message["type"] != "beat"]


class FakeOpener:
    """The way to hosts, a `HostOpener`: gives out the pipes of the test, each once, and refuses where there is none."""

    def __init__(self, pipes):
        """`pipes`: by the host's name."""
        self.pipes = dict(pipes)
        self.is_closed = False

    def can_resume(self, entry):
        return True

    def open(self, entry, deadline):
        if entry.name not in self.pipes:
            raise ClusterError(f"{entry.name}: connection refused")
        return self.pipes.pop(entry.name)

    def way(self, entry, environment, number):
        return Way(partial(self.open, entry), b"start", b"attach", lambda _: b"salvage")

    def close(self):
        self.is_closed = True


class FakeLink:
    """An `AgentLink` that notes what is asked of it."""

    def __init__(self, number):
        self.number = self.node = number
        self.entry = HostEntry(f"host{number}", 1)
        self.is_over = self.is_open = self.is_salvaging = self.has_unseen = False
        self.done = []

    def start(self):
        self.done.append("start")

    def send(self, kind, **fields):
        self.done.append({"type": kind, **fields})

    def begin(self):
        self.done.append("begin")

    def beat(self):
        self.done.append("beat")

    def dismiss(self):
        self.done.append("dismiss")

    def close(self):
        self.done.append("close")

    def give_up(self, reason):
        self.done.append(reason)


class FakeSignals:
    """A `SignalPipe` into which the test puts signals; they come with the next message."""

    time_limit_s = 0.0

    def __init__(self):
        self._inbox = Inbox()

    def put(self, signum):
        self._inbox.post({"type": "signal", "signum": signum})

    def fileno(self):
        return self._inbox.fileno()

    def read(self):
        return [int(message["signum"]) for message in self._inbox.take()]

    def close(self):
        self._inbox.close()
