"""The connection between a launcher and an agent, of which each has one end, whatever carries it.

Both ends number what they say and keep it until the other one has it. A connection that breaks may be replaced: who
makes the new one says `attach`, the other one `attached`, both with the number of the last message that they have, and
what the other side lacks is said again. Nothing is lost or doubled. Signs of life, `beat`, carry that number, too, and
have none of their own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from msrun.cluster.messages import FrameBuffer, Ledger, Message, MessageMissing, encode_message
from msrun.launch.transport.event_loop import ByteChannel, EventLoop
from msrun.launch.transport.pipe import MARKER, MAX_NOISE_BYTES, AgentPipe

CLOSED = "has closed its connection: msrun was killed there, or the host went down"


class Incoming:
    """What comes over one pipe: from an agent the noise of a login shell, then the marker; then messages."""

    def __init__(self, *, has_begun: bool = False) -> None:
        self._held = b""
        self._frames = FrameBuffer()
        self.has_begun = has_begun  # no noise comes any more
        self.unacknowledged = 0  # bytes since the other side was last told what has come; reset by whoever tells it

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes and return every message that is now complete. Raises ValueError: what comes after the marker are
        no messages."""
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


class Link(ABC):
    """One end, of the thread of its loop. The launcher's is `AgentLink`, the agent's `LauncherLink`."""

    _is_agent = False  # whether this is the agent's end, which says the marker first and answers each sign of life
    _not_said: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError, ArithmeticError, OSError)
    """What the words of somebody raise who is no msrun, or another one."""

    def __init__(self, loop: EventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.loop, self._clock = loop, clock
        self._ledger = Ledger()
        self._incoming = Incoming()
        self._channel: ByteChannel | None = None  # the connection; None while there is none
        self._is_attached = True
        """Whether the other end has said what it has seen; until then numbered messages wait in the ledger."""

    def _talk(self, pipe: AgentPipe, first: bytes, on_end: Callable[[ByteChannel], None]) -> None:
        self._incoming = Incoming(has_begun=self._is_agent)
        self._channel = channel = ByteChannel(self.loop, pipe, self._on_bytes, on_end)
        channel.send(first)
        channel.start()

    def _put(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.send(data)

    def _put_seen(self, kind: str) -> None:
        self._put(encode_message({"type": kind, "seen": self._ledger.seen}))

    def _say(self, message: Message) -> int:
        stamped = self._ledger.stamp(message)
        try:
            data = encode_message(stamped)
        except BaseException:
            self._ledger.retract(stamped)
            raise
        if self._is_attached:
            self._put(data)
        return int(stamped["seq"])

    def _send_unseen(self) -> None:
        for kept in self._ledger.unseen():
            self._put(encode_message(kept))

    def _on_bytes(self, channel: ByteChannel, data: bytes) -> None:
        if channel is not self._channel:
            return
        try:
            for message in self._incoming.feed(data):
                self._take(message)
        except MessageMissing:  # it comes again on another connection
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
        elif self._ledger.take(message):
            self._on_message(message)

    def _acknowledge(self, seen: object) -> None:
        self._ledger.acknowledge(seen)

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
