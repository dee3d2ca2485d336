"""An agent's end of its connection to the launcher, which is the coordinator of its job.

A thread: passes signals, orders and wishes on, and sends what the job says and writes, however slowly the launcher
reads. A connection that breaks may be replaced within a limit (`remote.spool`). When no launcher comes any more, the
agent's part of the job is told so, and ends. A launcher that is stopped (Ctrl-Z) says so first, and may be silent for
longer.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from msrun.agent.signals import SignalPipe
from msrun.cluster.coordinator import ORDERS
from msrun.cluster.messages import Message, await_input
from msrun.cluster.own_thread import Inbox, describe_fault, print_fault, traceback_of
from msrun.launch.transport.event_loop import ByteChannel, EventLoop
from msrun.launch.transport.link import CLOSED, Link
from msrun.launch.transport.pipe import MARKER, READ_BYTES, AgentPipe, SocketPipe


class StdioPipe(AgentPipe):
    """What was stdin and stdout of this process; see `AgentPipe`."""

    address = ""

    def __init__(self) -> None:
        """Take them: what is printed from now on goes to stderr, what is read is empty."""
        sys.stdout.flush()
        self._reader, self.writer = os.dup(0), os.dup(1)
        with open(os.devnull, "rb") as null:  # noqa: PTH123
            os.dup2(null.fileno(), 0)
        os.dup2(2, 1)
        for descriptor in (self._reader, self.writer):
            os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._reader

    def read(self) -> bytes | None:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._reader, READ_BYTES)
        return None

    def write(self, data: bytes | memoryview) -> int:
        with contextlib.suppress(BlockingIOError):
            return os.write(self.writer, data)
        return 0

    def close(self) -> None:
        os.close(self._reader)
        os.close(self.writer)


LOG_TICK_S = 0.2
WINDOW_BYTES = 4 << 20  # so much of the logs may be on its way without the launcher having said that it has it
ORPHAN_S = 5.0  # how long an agent whose connection was closed waits for another one; a cut one is given up later
CLOSE_S = 2.0
POLL_S = 0.01
PAUSE_S = 3600.0  # how long a launcher may be silent that has said that it is stopped


class LauncherLink(Link):
    """Serves one agent. `close` it when the agent is done. A fault of its own is told to the launcher as `fault`."""

    _is_agent = True

    def __init__(
        self,
        pipe: AgentPipe,
        clock: Callable[[], float] = time.monotonic,
        *,
        silence_s: float = 60.0,
        explain_loss: Callable[[str], str] | None = None,
    ) -> None:
        """`silence_s`: how long the launcher may give no sign of life; `resume_at` may say it anew. `explain_loss`:
        what the job is told when it has gone, from what it has done; None = a launcher that has started this agent."""
        super().__init__(EventLoop(1, self._tell_fault, name="msrun-launcher-link", clock=clock), clock)
        self._inbox = Inbox()
        self.orders = Inbox()  # what the coordinator says, for the job; `lost` when no launcher has come in time
        self._listener: socket.socket | None = None
        self._next_log: Callable[[], Message | None] | None = None
        self._acknowledge_logs: Callable[[int], None] = lambda _: None
        self._log_bytes: dict[int, int] = {}  # sequence number -> size, of what the launcher may not have yet
        self._logs_end = False  # `logs_end` is to be said when nothing more is to be sent
        self._silence_s, self._explain_loss = silence_s, explain_loss
        self._heard_at = self._parted_at = self._clock()
        self.is_orphan = False  # no launcher has come in time
        self._is_closing = False
        self.goes_on = threading.Event()  # set but while the launcher has said that it is stopped
        self.goes_on.set()
        self._signals: SignalPipe | None = None
        self._early_signals: list[int] = []  # which came before the job could hear them
        self._signal_lock = threading.Lock()
        self.loop.call(partial(self._begin, pipe))
        self.loop.call(self._tick)

    def start(self) -> None:
        self.loop.start()

    # -- for the agent's main thread ----------------------------------------------------------------------------------

    def send(self, kind: str, **fields: object) -> None:
        self.pass_on({"type": kind, **fields})

    def pass_on(self, message: Message) -> None:
        self.loop.call(partial(self._say, message))

    def wait(self, timeout_s: float | None = None) -> Message | None:
        """Return the launcher's next wish; None after the time, or when there is no launcher any more."""
        await_input(self._inbox, timeout_s)
        message = self.take()
        return message if message is not None and message["type"] != "gone" else None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something."""
        return self._inbox.fileno()

    def take(self) -> Message | None:
        """Return the launcher's next wish, `gone {reason}` where there is no launcher any more; None: there is none."""
        return next(iter(self._inbox.take(1)), None)

    def resume_at(self, listener: socket.socket, silence_s: float) -> None:
        """Accept another connection at a socket from now on, when this one breaks; `silence_s` as for the link."""

        def accept() -> None:
            self._listener, self._silence_s = listener, silence_s
            self.loop.selector.register(listener, selectors.EVENT_READ, self)

        self.loop.call(accept)

    def obey(self, signals: SignalPipe) -> None:
        """Have the job, which reads these signals, told of the launcher's from now on."""
        with self._signal_lock:
            self._signals = signals
            for signum in self._early_signals:
                signals.tell(signum)
            self._early_signals.clear()

    def send_logs(
        self, next_log: Callable[[], Message | None], acknowledge: Callable[[int], None] = lambda _: None
    ) -> None:
        """Send logs from now on: what `next_log` gives, None when there is nothing new; `acknowledge` is told that so
        many more of that have come, in their order. Both are called by the thread."""

        def begin() -> None:
            self._next_log, self._acknowledge_logs, self._logs_end = next_log, acknowledge, False
            self._log_bytes.clear()  # of an earlier part of the job, all of whose logs have come
            self._send_logs()

        self.loop.call(begin)

    def finish_logs(self) -> None:
        """Send `logs_end` once everything that is written now has been sent."""

        def finish() -> None:
            self._logs_end = True
            self._send_logs()

        self.loop.call(finish)

    def close(self) -> None:
        """Send what is waiting, if somebody reads it, and end the thread."""
        end, has_begun = time.monotonic() + CLOSE_S, threading.Event()

        def begin() -> None:
            self._is_closing = True
            has_begun.set()

        self.loop.call(begin)
        if not self.loop.has_ended:
            has_begun.wait(CLOSE_S)
        while (channel := self._channel) and channel.has_unsent and not self.loop.has_ended and time.monotonic() < end:
            time.sleep(POLL_S)
        self.loop.call(self._hang_up)
        self.loop.close(time.monotonic() + 1.0)
        if self.loop.has_ended:
            for inbox in (self.orders, self._inbox):
                inbox.close()
            if self._listener is not None:
                self._listener.close()

    @property
    def unsent_logs(self) -> set[str]:
        """Names of the logs of which the launcher lacks something; to be asked when the link is closed."""
        kept = self._ledger.unseen()
        with contextlib.suppress(OSError):
            if self._next_log and (more := self._next_log()) is not None:
                kept.append(more)
        return {str(message["name"]) for message in kept if message["type"] == "log"}

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _begin(self, pipe: AgentPipe) -> None:
        self._heard_at = self._clock()
        self._talk(pipe, MARKER, self._on_end)

    def _tick(self) -> None:
        self.loop.call_later(LOG_TICK_S, self._tick)
        self._look_at_clock()
        self._send_logs()

    def _tell_fault(self, error: BaseException) -> None:
        """Have the launcher end the job, which the thread still serves."""
        print_fault(error)  # where no launcher comes any more
        self._say({"type": "fault", "text": describe_fault(error), "traceback": traceback_of(error)})

    def _send_logs(self) -> None:
        while self._channel is not None and self._is_attached and sum(self._log_bytes.values()) < WINDOW_BYTES:
            message = self._next_log() if self._next_log else None
            if message is not None:
                self._log_bytes[self._say(message)] = len(message.get("data", ""))
                continue
            if self._logs_end:
                self._logs_end, self._next_log = False, None
                self._say({"type": "logs_end"})
            return

    def _on_heard(self, _: ByteChannel) -> None:
        self.loop.call(self._send_logs)

    def _on_garbled(self, error: Exception) -> None:
        sys.stderr.write(f"msrun agent: left the launcher, which says {type(error).__name__}: {error}\n")
        self._part()

    def _on_end(self, channel: ByteChannel) -> None:
        channel.pipe.close()
        if channel is self._channel:
            self._part()

    def _take(self, message: Message) -> None:
        self._heard_at = self._clock()
        super()._take(message)

    def _acknowledge(self, seen: object) -> None:
        super()._acknowledge(seen)
        if isinstance(seen, int):
            come = [number for number in self._log_bytes if number <= seen]
            for number in come:
                del self._log_bytes[number]
            if come:
                self._acknowledge_logs(len(come))

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "signal":
            self._signal(int(message["signum"]))
        elif kind in ORDERS:
            self.orders.post(message)
        elif kind in ("pause", "resume"):
            (self.goes_on.clear if kind == "pause" else self.goes_on.set)()
            self._signal(signal.SIGTSTP if kind == "pause" else signal.SIGCONT)
        else:
            self._inbox.post(message)

    def _signal(self, signum: int) -> None:
        with self._signal_lock:
            if self._signals is not None:
                self._signals.tell(signum)
            elif signum == signal.SIGCONT and signal.SIGTSTP in self._early_signals:
                self._early_signals.remove(signal.SIGTSTP)  # there was nothing to stop
            else:
                self._early_signals.append(signum)

    def handle(self, _mask: int) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._hang_up()
        self._is_attached = False
        self._begin(SocketPipe(ours=connection))

    def _hang_up(self) -> None:
        if (channel := self._channel) is not None:
            channel.stop(channel.pipe.close)
            self._channel = None
            if self._is_attached:  # one that comes late for a launcher that has gone says nothing: no sign of life
                self._parted_at = self._clock()

    def _part(self, why: str = CLOSED) -> None:
        self._hang_up()
        if self._listener is None:  # there is nothing to come back for
            self._abandon(why)

    def _break(self, _: ByteChannel) -> None:
        self._part()

    def _look_at_clock(self) -> None:
        now = self._clock()
        silence_s = self._silence_s if self.goes_on.is_set() else PAUSE_S
        if self._channel is not None and now - self._heard_at > silence_s:
            if self._explain_loss is None:  # the launcher, if it is there again, finds it on this process's stderr
                sys.stderr.write(
                    f"msrun agent: the launcher gave no sign of life for {silence_s:g} s (was it stopped?), so the "
                    "agent ended its part of the job; see --heartbeat_time_out\n"
                )
                sys.stderr.flush()
            self._part(f"has given no sign of life for {now - self._heard_at:.0f} s: its host or the network is down")
            self._abandon(CLOSED)
        elif self._channel is None and now - self._parted_at > min(ORPHAN_S, self._silence_s):
            self._abandon(CLOSED)

    def _abandon(self, why: str) -> None:
        if not self.is_orphan and not self._is_closing:
            self.is_orphan = True
            self.goes_on.set()
            reason = self._explain_loss(why) if self._explain_loss else "the launcher has gone"
            self._inbox.post({"type": "gone", "reason": reason})
            self.orders.post({"type": "lost", "reason": reason})
