"""Messages that survive a broken connection: numbered, kept until the other side has them, sent again after a cut.

Each side has a ledger. Its own messages carry `seq` from 1 on; how far it has read the other's goes back as `seen` in
signs of life. On a new connection each side says what it has seen, and gets the rest: nothing is lost, nothing doubled.
"""

from __future__ import annotations

from collections import deque

from msrun.cluster.messages import Message


class MessageMissing(ValueError):
    """A message of the other side has not come, and a later one has: the connection is to be made again."""


class Ledger:
    """One side's account of a conversation. Owned by one thread, or guarded by its owner."""

    def __init__(self) -> None:
        self._kept: deque[Message] = deque()
        self._last = 0
        self.seen = 0
        """Number of the newest message of the other side that was taken."""

    def stamp(self, message: Message) -> Message:
        """Return a message with its number; it is kept until it is acknowledged."""
        self._last += 1
        stamped = {**message, "seq": self._last}
        self._kept.append(stamped)
        return stamped

    def retract(self, stamped: Message) -> None:
        """Take back the newest message, which cannot be sent."""
        assert self._kept[-1] is stamped, "another one was stamped meanwhile"
        self._kept.pop()
        self._last -= 1

    def acknowledge(self, seen: object) -> None:
        """Forget what the other side has."""
        if isinstance(seen, int):
            while self._kept and self._kept[0]["seq"] <= seen:
                self._kept.popleft()

    def unseen(self) -> list[Message]:
        """Return what the other side has not acknowledged, in order: to be sent again on a new connection."""
        return list(self._kept)

    def take(self, message: Message) -> bool:
        """Return whether a message of the other side is to be heeded: False for one that came before.

        Raises:
            MessageMissing: one before it has not come. On a new connection both come again.
        """
        number = message.get("seq")
        if not isinstance(number, int):
            return True
        if number <= self.seen:
            return False
        if number != self.seen + 1:
            raise MessageMissing(f"message {number} came after message {self.seen}")
        self.seen = number
        return True
