"""Incoming: the bytes of one agent, as messages."""

from __future__ import annotations

from msrun.cluster.messages import Message, MessageBuffer
from msrun.launch.transport.pipe import MARKER, MAX_NOISE_BYTES


class Incoming:
    """What comes over one pipe: the noise of a login shell, the marker, then messages."""

    def __init__(self) -> None:
        self._held = b""
        self._messages = MessageBuffer()
        self.has_begun = False
        """The marker has come: it is an agent that speaks."""
        self.unacknowledged = 0
        """Bytes since the agent was last told what has come; reset by whoever tells it."""

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes and return every message that is now complete.

        Raises:
            ValueError: what comes after the marker are no messages.
        """
        if not self.has_begun:
            held, marker, data = (self._held + data).partition(MARKER)
            self._held = held if marker else held[-MAX_NOISE_BYTES - 1 :]
            if not marker:
                return []
            self.has_begun = True
        self.unacknowledged += len(data)
        return self._messages.feed(data)

    @property
    def is_noise(self) -> bool:
        """Whether so much has come without a marker that it is no agent."""
        return not self.has_begun and len(self._held) > MAX_NOISE_BYTES

    @property
    def noise(self) -> str:
        """What came in the place of an agent; empty when there is one."""
        return "" if self.has_begun else self._held[-MAX_NOISE_BYTES:].decode("utf-8", "backslashreplace")
