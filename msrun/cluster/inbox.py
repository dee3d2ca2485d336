"""Messages from other threads to a thread that waits in a selector."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from msrun.cluster.messages import Message


class Inbox:
    """Any thread posts, one thread reads. Posting never waits, so that a reader who is held up holds up nobody."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False
        self.turns = 0
        """How often the messages were taken: who posts for a stranger posts so many a turn."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are messages."""
        return self._reader

    def post(self, message: Message) -> None:
        """Leave a message; nobody gets it when the inbox is closed."""
        with self._lock:
            if self._is_closed:
                return
            self._messages.append(message)
            if len(self._messages) == 1:
                os.write(self._writer, b"!")

    def take(self) -> list[Message]:
        """Return the messages that are there."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 1 << 16)
        with self._lock:
            found = list(self._messages)
            self._messages.clear()
            self.turns += 1
        return found

    def close(self) -> None:
        """Close the pipe."""
        with self._lock:
            self._is_closed = True
            os.close(self._reader)
            os.close(self._writer)
