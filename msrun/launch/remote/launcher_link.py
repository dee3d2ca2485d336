"""An agent's end of its connection to the launcher, which is the coordinator of its job.

A thread: gives signs of life, passes signals, orders and wishes on, and sends what the job says and writes, however
slowly the launcher reads. A connection that breaks may be replaced within a limit (`remote.attach`); messages are
numbered, so nothing is lost or doubled. When no launcher comes any more, the agent's part of the job is told so, and
ends. A launcher that is stopped (Ctrl-Z) says so first, and may be silent for longer.

Messages without a number: beat {seen} both ways, attach {seen} and attached {seen}.
"""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from msrun.agent.processes.terminal import TERMINAL_SAYS
from msrun.agent.signals import SignalPipe
from msrun.cluster.coordinator import ORDERS
from msrun.cluster.messages import Ledger, Message, MessageBuffer, MessageMissing, await_input, encode_message
from msrun.cluster.own_thread import Inbox, OwnThread, describe_fault, print_fault, traceback_of
from msrun.launch.transport.pipe import MARKER
from msrun.launch.transport.sealed import SealedPipe

READ_BYTES = 1 << 16
WRITE_BYTES = 1 << 18


class Descriptors:
    """What is read from one descriptor and written to one, which may be the same."""

    def __init__(self, reader: int, writer: int) -> None:
        """Both are this object's from now on."""
        self._reader, self._writer = reader, writer
        for descriptor in {reader, writer}:
            os.set_blocking(descriptor, False)

    def read(self) -> bytes:
        """Return the next bytes; empty at the end. Raises OSError."""
        return os.read(self._reader, READ_BYTES)

    def write(self, data: bytes) -> int:
        """Write as much as there is room for, and return how much that was. Raises OSError."""
        return os.write(self._writer, data)

    def close(self) -> None:
        """Close both."""
        for descriptor in {self._reader, self._writer}:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Stream:
    """Owned by one thread. What cannot be sent at once is kept and sent by `flush`."""

    def __init__(self, reader: int, writer: int, wire: SealedPipe | None = None) -> None:
        """
        Args:
            reader, writer: what a selector looks at.
            wire: what is read and written, this object's from now on; None = the two themselves.
        """
        self.reader, self.writer = reader, writer
        self._wire = wire or Descriptors(reader, writer)
        self._buffer = MessageBuffer()
        self._unsent = bytearray(MARKER)
        self.is_closed = False

    @property
    def unsent_bytes(self) -> int:
        """How much waits for the other side to read."""
        return len(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as can be sent now."""
        self.send_bytes(encode_message(message))

    def send_bytes(self, data: bytes) -> None:
        """Send a message that was encoded before."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as it goes."""
        while self._unsent and not self.is_closed:
            try:
                count = self._wire.write(bytes(self._unsent[:WRITE_BYTES]))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # it has gone; what it has said before is still to be read, and then the end
                count = len(self._unsent)
            if not count:
                return
            del self._unsent[:count]

    def receive(self) -> list[Message]:
        """Return whole messages that have come; sets `is_closed` at the end, and when what comes is no message."""
        try:
            data = self._wire.read()
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        if data is None:
            return []
        try:
            if data:
                return self._buffer.feed(data)
        except ValueError:
            pass
        self.is_closed = True
        return []

    def close(self) -> None:
        """Close what it goes over."""
        self.is_closed = True
        self._wire.close()


def take_stdio() -> Stream:
    """Return stdin and stdout as a stream; what is printed from now on goes to stderr, what is read is empty."""
    sys.stdout.flush()
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return Stream(reader, writer)


CLOSED = "has closed its connection: msrun was killed there, or the host went down"
LOG_TICK_S = 0.2
WINDOW_BYTES = 4 << 20
"""So much of the logs may be on its way without the launcher having said that it has it."""
ORPHAN_S = 5.0
"""How long an agent whose connection was closed waits for another one; a cut one is given up later."""
CLOSE_S = 2.0
PAUSE_S = 3600.0
"""How long a launcher may be silent that has said that it is stopped."""


class LauncherLink(OwnThread):
    """Serves one agent. `close` it when the agent is done. A fault of its own is told to the launcher as `fault`."""

    def __init__(
        self,
        stream: Stream,
        clock: Callable[[], float] = time.monotonic,
        *,
        silence_s: float = 60.0,
        explain_loss: Callable[[str], str] | None = None,
    ) -> None:
        """
        Args:
            silence_s: how long the launcher may give no sign of life; `resume_at` may say it anew.
            explain_loss: what the job is told when it has gone, from what it has done; None = a launcher that has
                started this agent.
        """
        super().__init__("msrun-launcher-link", self._serve, self._tell_fault, goes_on=True)
        self._clock = clock
        self._stream: Stream | None = stream
        self._is_attached = True
        """Whether the other side has said what it has seen; until then only old messages are to be sent again."""
        self._outbox = Inbox()
        self._inbox = Inbox()
        self._wishes: deque[Message] = deque()
        """Taken from the inbox, and not yet returned by `wait`."""
        self.said = Inbox()
        """What the user's terminal says, for the rank that it belongs to: with `show` and `taken` a `UserEnd`."""
        self.orders = Inbox()
        """What the coordinator says, for the job; `lost` when no launcher has come in time."""
        self._ledger = Ledger()
        self._listener: socket.socket | None = None
        self._next_log: Callable[[], Message | None] = lambda: None
        self._acknowledge_logs: Callable[[int], None] = lambda _: None
        self._log_bytes: dict[int, int] = {}
        """Sequence number -> size, of what the launcher may not have yet."""
        self._silence_s = silence_s
        self._explain_loss = explain_loss
        self._heard_at = self._parted_at = self._clock()
        self._has_logs = True
        self.is_orphan = False
        """No launcher has come in time."""
        self._is_closing = False
        self.goes_on = threading.Event()
        """Set but while the launcher has said that it is stopped."""
        self.goes_on.set()
        self._ends_at = 0.0
        """When the thread ends though something is unsent (s of `time.monotonic`); 0 = it is not to end yet."""
        self._signals: SignalPipe | None = None
        self._early_signals: list[int] = []
        """Those that came before the job could hear them."""
        self._signal_lock = threading.Lock()

    # -- for the agent's main thread ----------------------------------------------------------------------------------

    def send(self, kind: str, **fields: object) -> None:
        """Tell the launcher."""
        self.pass_on({"type": kind, **fields})

    def pass_on(self, message: Message) -> None:
        """Tell the launcher what the job says."""
        self._outbox.post(message)

    def show(self, data: bytes) -> None:
        """Have the user see what a rank has written to its terminal."""
        self.send("shown", data=base64.b64encode(data).decode("ascii"))

    def taken(self, count: int) -> None:
        """So many bytes of input have reached the rank."""
        self.send("taken", count=count)

    def wait(self, timeout_s: float | None = None) -> Message | None:
        """Return the launcher's next wish; None after the time, or when there is no launcher any more."""
        if not self._wishes:
            await_input(self._inbox, timeout_s)
        message = self.take()
        return message if message is not None and message["type"] != "gone" else None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something."""
        return self._inbox.fileno()

    def take(self) -> Message | None:
        """Return the launcher's next wish, `gone {reason}` where there is no launcher any more; None: there is none."""
        self._wishes += self._inbox.take()
        return self._wishes.popleft() if self._wishes else None

    def resume_at(self, listener: socket.socket, silence_s: float) -> None:
        """Accept another connection at a socket from now on, when this one breaks.

        Args:
            silence_s: how long the launcher may give no sign of life.
        """
        self._outbox.post({"type": "_resume", "listener": listener, "silence_s": silence_s})

    def obey(self, signals: SignalPipe) -> None:
        """Have the job, which reads these signals, told of the launcher's from now on."""
        with self._signal_lock:
            self._signals = signals
            for signum in self._early_signals:
                signals.tell(signum)

    def send_logs(
        self, next_log: Callable[[], Message | None], acknowledge: Callable[[int], None] = lambda _: None
    ) -> None:
        """Send logs from now on. Both functions are called by the thread.

        Args:
            next_log: returns the next message, None when there is nothing new.
            acknowledge: told that so many more of the messages have come, in their order.
        """
        self._outbox.post({"type": "_logs", "next": next_log, "acknowledge": acknowledge})

    def finish_logs(self) -> None:
        """Send `logs_end` once everything that is written now has been sent."""
        self._outbox.post({"type": "_logs_end"})

    def close(self) -> None:
        """Send what is waiting, if somebody reads it, and end the thread."""
        self._outbox.post({"type": "_close"})
        self.join(CLOSE_S + 1.0)
        if not self.is_alive():
            self.orders.close()
            self.said.close()
            self._inbox.close()
            self._outbox.close()

    @property
    def unsent_logs(self) -> set[str]:
        """Names of the logs of which the launcher lacks something; to be asked when the link is closed."""
        kept = self._ledger.unseen()
        with contextlib.suppress(OSError):
            if (more := self._next_log()) is not None:
                kept.append(more)
        return {str(message["name"]) for message in kept if message["type"] == "log"}

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve until `close`."""
        while not self._ends_at or (
            time.monotonic() < self._ends_at and self._stream is not None and self._stream.unsent_bytes
        ):
            self._look(0.05 if self._ends_at else LOG_TICK_S)
            if self._is_closing and not self._ends_at:
                self._ends_at = time.monotonic() + CLOSE_S
        if self._stream is not None:
            self._stream.close()
        if self._listener is not None:
            self._listener.close()

    def _look(self, wait_s: float) -> None:
        stream = self._stream
        with selectors.DefaultSelector() as selector:
            selector.register(self._outbox, selectors.EVENT_READ)
            if self._listener is not None:
                selector.register(self._listener, selectors.EVENT_READ)
            if stream is not None:
                writes = selectors.EVENT_WRITE if stream.unsent_bytes else 0
                if stream.reader == stream.writer:
                    selector.register(stream.reader, selectors.EVENT_READ | writes)
                else:
                    selector.register(stream.reader, selectors.EVENT_READ)
                    if writes:
                        selector.register(stream.writer, selectors.EVENT_WRITE)
            for key, _ in selector.select(wait_s):
                if key.fileobj is self._listener:
                    self._accept()
        self._take_wishes()
        if self._stream is not None:
            self._stream.flush()
            try:
                self._receive(self._stream)
            except (ValueError, TypeError, LookupError, OverflowError, OSError) as error:  # no launcher says that
                sys.stderr.write(f"msrun agent: left the launcher, which says {type(error).__name__}: {error}\n")
                self._part()
            self._send_logs()
        self._look_at_clock()

    def _take_wishes(self) -> None:
        for wish in self._outbox.take():
            kind = wish["type"]
            if kind == "_close":
                self._is_closing = True
            elif kind == "_resume":
                self._listener, self._silence_s = wish["listener"], wish["silence_s"]
            elif kind == "_logs":
                self._next_log, self._acknowledge_logs = wish["next"], wish["acknowledge"]
            elif kind == "_logs_end":
                self._has_logs = False
            else:
                self._say(wish)

    def _say(self, message: Message) -> int:
        stamped = self._ledger.stamp(message)
        try:
            data = encode_message(stamped)
        except BaseException:
            self._ledger.retract(stamped)
            raise
        if self._stream is not None and self._is_attached:
            self._stream.send_bytes(data)
        return int(stamped["seq"])

    def _tell_fault(self, error: BaseException) -> None:
        """Have the launcher end the job, which the thread still serves."""
        print_fault(error)  # where no launcher comes any more
        self._say({"type": "fault", "text": describe_fault(error), "traceback": traceback_of(error)})

    def _send_logs(self) -> None:
        while self._is_attached and sum(self._log_bytes.values()) < WINDOW_BYTES:
            message = self._next_log()
            if message is None:
                if not self._has_logs and self._next_log is not _nothing:
                    self._next_log = _nothing
                    self._say({"type": "logs_end"})
                return
            self._log_bytes[self._say(message)] = len(message.get("data", ""))

    def _receive(self, stream: Stream) -> None:
        for message in stream.receive():
            if stream.is_closed:
                break
            self._heard_at = self._clock()
            kind = message.get("type")
            if kind in ("beat", "attach"):
                self._acknowledge(message.get("seen"))
            if kind == "beat":
                stream.send({"type": "beat", "seen": self._ledger.seen})
            elif kind == "attach":
                stream.send({"type": "attached", "seen": self._ledger.seen})
                self._is_attached = True
                for kept in self._ledger.unseen():
                    stream.send(kept)
            else:
                self._take(stream, message)
        if stream.is_closed:
            self._part()

    def _acknowledge(self, seen: object) -> None:
        self._ledger.acknowledge(seen)
        if isinstance(seen, int):
            come = [number for number in self._log_bytes if number <= seen]
            for number in come:
                del self._log_bytes[number]
            if come:
                self._acknowledge_logs(len(come))

    def _take(self, stream: Stream, message: Message) -> None:
        try:
            if self._ledger.take(message):
                self._heed(message)
        except MessageMissing:  # the launcher sends it again on another connection
            stream.close()

    def _heed(self, message: Message) -> None:
        if message["type"] == "signal":
            self._signal(int(message["signum"]))
        elif message["type"] in ORDERS:
            self.orders.post(message)
        elif message["type"] in TERMINAL_SAYS:
            self.said.post(message)
        elif message["type"] in ("pause", "resume"):
            is_pause = message["type"] == "pause"
            (self.goes_on.clear if is_pause else self.goes_on.set)()
            self._signal(signal.SIGTSTP if is_pause else signal.SIGCONT)
        else:
            self._inbox.post(message)

    def _signal(self, signum: int) -> None:
        with self._signal_lock:
            if self._signals is None and signum == signal.SIGCONT and signal.SIGTSTP in self._early_signals:
                self._early_signals.remove(signal.SIGTSTP)  # there was nothing to stop
            elif self._signals is None:
                self._early_signals.append(signum)
            else:
                self._signals.tell(signum)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._hang_up()
        descriptor = connection.detach()
        self._stream = Stream(descriptor, descriptor)
        self._is_attached = False
        self._heard_at = self._clock()

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            if self._is_attached:  # one that comes late for a launcher that has gone says nothing: no sign of life
                self._parted_at = self._clock()

    def _part(self, why: str = CLOSED) -> None:
        self._hang_up()
        if self._listener is None:  # there is nothing to come back for
            self._abandon(why)

    def _look_at_clock(self) -> None:
        now = self._clock()
        silence_s = self._silence_s if self.goes_on.is_set() else PAUSE_S
        if self._stream is not None and now - self._heard_at > silence_s:
            if self._explain_loss is None:
                self._say_silence(silence_s)
            self._part(f"has given no sign of life for {now - self._heard_at:.0f} s: its host or the network is down")
            self._abandon(CLOSED)
        elif self._stream is None and now - self._parted_at > min(ORPHAN_S, self._silence_s):
            self._abandon(CLOSED)

    def _say_silence(self, silence_s: float) -> None:
        print(  # noqa: T201 - the launcher, if it is there again, finds it on this process's stderr
            f"msrun agent: the launcher gave no sign of life for {silence_s:g} s (was it stopped?), so the agent "
            "ended its part of the job; see --heartbeat_time_out",
            file=sys.stderr,
            flush=True,
        )

    def _abandon(self, why: str) -> None:
        if not self.is_orphan and not self._is_closing:
            self.is_orphan = True
            self.goes_on.set()
            reason = self._explain_loss(why) if self._explain_loss else "the launcher has gone"
            self._inbox.post({"type": "gone", "reason": reason})
            self.orders.post({"type": "lost", "reason": reason})


def _nothing() -> None:
    """Return None: there are no more logs."""
