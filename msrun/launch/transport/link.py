"""The connection between a launcher and an agent, of which each has one end, whatever carries it.

Both ends number what they say and keep it until the other one has it. A connection that breaks may be replaced: who
makes the new one says `attach`, the other one `attached`, both with the number of the last message that they have, and
what the other side lacks is said again. Nothing is lost or doubled. Signs of life, `beat`, carry that number, too, and
have none of their own.

`EventLoop` is what moves the bytes of all connections, a launcher's or an agent's, and never waits for one. What has to
wait, as a login does, is done by the loop's few other threads, which end when there is nothing to do.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import selectors
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from msrun.cluster.connection import MAX_UNSENT_BYTES
from msrun.cluster.messages import FrameBuffer, Message, OwnThread, WakingQueue, encode_message, print_fault
from msrun.errors import ClusterError
from msrun.launch.transport.pipe import MARKER, MAX_NOISE_BYTES, AgentPipe

if TYPE_CHECKING:
    from _typeshed import HasFileno

PIECE_BYTES = 1 << 18


class TaskThreads:
    """Runs tasks in the background, so many at a time. A thread begins when there is a task, and ends when none is."""

    def __init__(self, limit: int, name: str, on_fault: Callable[[BaseException], None] = print_fault) -> None:
        """`on_fault`: told what an `on_error` raises."""
        self._limit, self._name, self._on_fault = limit, name, on_fault
        self._tasks: deque[tuple[Callable[[], None], Callable[[Exception], None]]] = deque()
        self._changed = threading.Condition()
        self._count = 0

    def run(self, task: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        """Have a task done; `on_error` gets what it raises, or a ClusterError when no thread can be started here."""
        with self._changed:
            self._tasks.append((task, on_error))
            if self._count == self._limit:
                return
            try:
                OwnThread(self._name, self._work, self._on_fault, goes_on=True).start()
                self._count += 1
                return
            except RuntimeError as error:
                if self._count:
                    return
                self._tasks.pop()
                fault = no_thread(error)
        on_error(fault)

    def join(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, max(0.0, seconds))

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._count -= 1
                    self._changed.notify_all()
                    return
                task, on_error = self._tasks.popleft()
            try:
                task()
            except Exception as error:  # noqa: BLE001 - whoever waits for the task has to learn of it
                on_error(error)


def no_thread(error: RuntimeError) -> ClusterError:
    """Return what a thread that cannot be started means for the user."""
    return ClusterError(f"{error} here; raise ulimit -u, or pids.max of the container")


ENDS_AT_A_TIME = 16
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class EventLoop:
    """Any thread may call. `close` it in the end, and join `opening`."""

    def __init__(
        self,
        connects_at_a_time: int,
        on_fault: Callable[[BaseException], None] = print_fault,
        *,
        name: str = "msrun-hosts",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet. `on_fault`: told, once, what a thread raises, which goes on. `clock`: of `call_later`."""
        self._on_fault, self._name, self._clock = on_fault, name, clock
        self.opening = TaskThreads(connects_at_a_time, "msrun-connect", on_fault)
        self.ending = TaskThreads(ENDS_AT_A_TIME, "msrun-disconnect", on_fault)
        self._thread: threading.Thread | None = None
        self._called = WakingQueue[Callable[[], object]]()
        self._calls: deque[Callable[[], object]] = deque()  # taken, and not made yet
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # a heap; the number keeps the order
        self._numbers = itertools.count()
        self._is_closing = False

    @functools.cached_property
    def selector(self) -> selectors.BaseSelector:
        """What is looked at; of the thread, or who takes its turns."""
        found = selectors.DefaultSelector()
        found.register(self._called, READ)
        return found

    def start(self) -> None:
        """Start the thread. Raises ClusterError: none can be started here."""
        thread = OwnThread(self._name, self._run, self._on_fault, goes_on=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise no_thread(error) from None
        self._thread = thread

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop's thread call a function, which raises nothing and waits for nothing."""
        self._called.post(function)

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have it called after a time; of the loop's thread."""
        heapq.heappush(self._later, (self._clock() + seconds, next(self._numbers), function))

    def close(self, deadline: float) -> None:
        """Do what was called for, and end the threads but those of `opening`; what hangs at the `deadline` is left."""
        self._is_closing, thread = True, self._thread
        self.call(lambda: None)
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
        is_done = self.ending.join(deadline - time.monotonic())
        if self.has_ended:
            while thread is None and self._take_calls() and (is_done or time.monotonic() < deadline):
                self.turn(0.0)
                is_done = self.ending.join(deadline - time.monotonic())
            if "selector" in vars(self):
                self.selector.close()
            self._called.close()

    @property
    def has_ended(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closing or self._take_calls():
            self.turn()

    def turn(self, limit_s: float | None = None) -> None:
        """Do what can be done, and wait for it as long as the limit allows; for the thread, or who has started none."""
        limits = [0.0] if self._calls else [] if limit_s is None else [limit_s]
        limits += [max(0.0, self._later[0][0] - self._clock())] if self._later else []
        for key, mask in self.selector.select(min(limits, default=None)):
            if key.data is not None:
                key.data.handle(mask)
        self._take_calls()
        while self._calls:  # what they call for has its turn after the hosts'
            self._calls.popleft()()
        while self._later and self._later[0][0] <= self._clock():
            heapq.heappop(self._later)[2]()

    def _take_calls(self) -> bool:
        self._calls += self._called.take()
        return bool(self._calls)


class ByteChannel:
    """A pipe in the loop, of its thread: what comes is given away, what is to go waits until there is room."""

    def __init__(
        self,
        loop: EventLoop,
        pipe: AgentPipe,
        on_bytes: Callable[[ByteChannel, bytes], None],
        on_end: Callable[[ByteChannel], None],
    ) -> None:
        """`on_end`: called once, when nothing more will come; not after `stop`."""
        self.pipe, self.on_end = pipe, on_end
        self._loop, self._on_bytes = loop, on_bytes
        writer = getattr(pipe, "writer", pipe)
        self._ends: list[tuple[HasFileno, int]] = [(pipe, READ), (writer, WRITE)]
        if writer.fileno() == pipe.fileno():
            self._ends = [(pipe, READ | WRITE)]
        self._output = bytearray()
        self._is_deaf = False  # the other side takes nothing more; what it has said is still to be read
        self._is_stopped = False
        self._events = 0

    def start(self) -> None:
        self._loop.call(self._begin)

    def send(self, data: bytes) -> None:
        """Have bytes written, in the order of the calls. Where too many wait, the connection is over."""
        if self._is_stopped or self._is_deaf:
            return
        if len(self._output) + len(data) > MAX_UNSENT_BYTES:
            self._loop.call(self._end)
            return
        self._output += data
        if not self._events & WRITE:
            self._flush()

    @property
    def has_unsent(self) -> bool:
        return bool(self._output)

    def stop(self, then: Callable[[], None]) -> None:
        """Leave the pipe; `then` is called when it may be closed, but not where it has ended or was stopped before."""
        if not self._is_stopped:
            self._is_stopped = True
            self._watch(0)
            self._loop.call(then)

    def handle(self, mask: int) -> None:
        """Do what the selector says can be done; a channel in which that fails is over."""
        try:
            if mask & WRITE and not self._is_stopped:
                self._flush()
            if mask & READ and not self._is_stopped:
                self._read()
        except BaseException:
            self._end()
            raise

    def _begin(self) -> None:
        if not self._is_stopped:
            self._watch(self._events | READ)
            self.handle(READ)  # what came in the same breath as an answer is in the pipe already

    def _watch(self, events: int) -> None:
        for end, mask in self._ends:
            old, new = self._events & mask, events & mask
            if new and not old:
                self._loop.selector.register(end, new, self)
            elif old and not new:
                self._loop.selector.unregister(end)
            elif new != old:
                self._loop.selector.modify(end, new, self)
        self._events = events

    def _read(self) -> None:
        try:
            data = self.pipe.read()
        except Exception:  # noqa: BLE001 - whatever a connection meets is its own end, and not that of the loop
            data = b""
        if data == b"":
            self._end()
        elif data:
            self._on_bytes(self, data)

    def _end(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._watch(0)
            self.on_end(self)

    def _flush(self) -> None:
        """Write a piece; the others have their turn before the next."""
        try:
            del self._output[: self.pipe.write(bytes(self._output[:PIECE_BYTES])) if self._output else 0]
        except Exception:  # noqa: BLE001 - as in `_read`
            self._is_deaf = True
            self._output.clear()
        self._watch(self._events & ~WRITE | (WRITE if self._output else 0))


CLOSED = "has closed its connection: msrun was killed there, or the host went down"


class Incoming:
    """What comes over one pipe: from an agent the noise of a login shell, then the marker; then messages."""

    def __init__(self, *, has_begun: bool = False) -> None:
        self._held = b""
        self._frames = FrameBuffer()
        self.has_begun = has_begun  # no noise comes any more
        self.unacknowledged = 0  # bytes since the other side was last told what has come; reset by whoever tells it

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes and return every message that is complete (ValueError: what follows the marker is none)."""
        if not self.has_begun:
            held, marker, data = (self._held + data).partition(MARKER)
            self._held = held if marker else held[-MAX_NOISE_BYTES - 1 :]
            if not marker:
                return []
            self.has_begun = True
        self.unacknowledged += len(data)
        return self._frames.messages(data)

    @property
    def is_noise(self) -> bool:
        """Whether so much has come without a marker that it is no agent."""
        return not self.has_begun and len(self._held) > MAX_NOISE_BYTES

    @property
    def noise(self) -> str:
        """What came in the place of an agent; empty when there is one."""
        return "" if self.has_begun else self._held[-MAX_NOISE_BYTES:].decode("utf-8", "backslashreplace")


class MessageMissing(ValueError):
    """A message of the other end has not come, and a later one has: both come again on another connection."""


class Link(ABC):
    """One end, of the thread of its loop. The launcher's is `AgentLink`, the agent's `LauncherLink`."""

    _is_agent = False  # whether this is the agent's end, which says the marker first and answers each sign of life
    _not_said: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError, ArithmeticError, OSError)
    """What the words of somebody raise who is no msrun, or another one."""

    def __init__(self, loop: EventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.loop, self._clock = loop, clock
        self._kept: deque[tuple[int, bytes]] = deque()  # what the other end may not have, by its number
        self._last = 0  # number of what was said last
        self._seen = 0  # number of the newest message of the other end that was taken
        self._incoming = Incoming()
        self._channel: ByteChannel | None = None  # the connection; None while there is none
        self._is_attached = True  # whether the other end has said what it has seen; until then numbered messages wait

    def _talk(self, pipe: AgentPipe, first: bytes, on_end: Callable[[ByteChannel], None]) -> None:
        self._incoming = Incoming(has_begun=self._is_agent)
        self._channel = channel = ByteChannel(self.loop, pipe, self._on_bytes, on_end)
        channel.send(first)
        channel.start()

    def _put(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.send(data)

    def _put_seen(self, kind: str) -> None:
        self._put(encode_message({"type": kind, "seen": self._seen}))

    def _say(self, message: Message) -> int:
        """Say it, now or when there is a connection, and return its number. Raises ValueError: it is too large."""
        data = encode_message({**message, "seq": self._last + 1})
        self._last += 1
        self._kept.append((self._last, data))
        if self._is_attached:
            self._put(data)
        return self._last

    def _send_unseen(self) -> None:
        for _, data in self._kept:
            self._put(data)

    def _on_bytes(self, channel: ByteChannel, data: bytes) -> None:
        if channel is not self._channel:
            return
        try:
            for message in self._incoming.feed(data):
                self._take(message)
        except MessageMissing:
            self._break(channel)
        except self._not_said as error:
            self._on_garbled(error)
        self._on_heard(channel)

    def _take(self, message: Message) -> None:
        kind = message.get("type")
        if kind == "beat" or kind == ("attach" if self._is_agent else "attached"):
            self._acknowledge(message.get("seen"))
            if self._is_agent:
                self._put_seen("beat" if kind == "beat" else "attached")
            if kind != "beat":
                self._is_attached = True
                self._send_unseen()
                self._on_attached()
            return
        number = message.get("seq")
        if isinstance(number, int):
            if number <= self._seen:  # it came before
                return
            if number != self._seen + 1:
                raise MessageMissing(f"message {number} came after message {self._seen}")
            self._seen = number
        self._on_message(message)

    def _acknowledge(self, seen: object) -> None:
        while isinstance(seen, int) and self._kept and self._kept[0][0] <= seen:
            self._kept.popleft()

    # -- of the ends --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _on_message(self, message: Message) -> None:
        """Take what the other end says for the first time."""

    @abstractmethod
    def _break(self, channel: ByteChannel) -> None:
        """End a connection that is of no use, and see what follows."""

    @abstractmethod
    def _on_garbled(self, error: Exception) -> None:
        """The other end says what no msrun says."""

    def _on_heard(self, channel: ByteChannel) -> None:  # noqa: B027 - an end may leave it
        """Bytes have come."""

    def _on_attached(self) -> None:  # noqa: B027 - an end may leave it
        """Another connection stands."""
