"""Messages from other threads to a thread that waits in a selector."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from msrun.cluster.messages import Message

MAX_WAITING = 256
"""After so many messages one who speaks for a stranger waits."""
ROOM_S = 1.0
"""How long at most: what is waited for is the reader's turn, not his end."""


class Inbox:
    """Any thread posts, one thread reads. Posting never waits, so that a reader who is held up holds up nobody."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._has_room = threading.Event()
        self._has_room.set()
        self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are messages."""
        return self._reader

    def post(self, message: Message) -> None:
        """Leave a message; nobody gets it when the inbox is closed."""
        with self._lock:
            if self._is_closed:
                return
            self._messages.append(message)
            if len(self._messages) >= MAX_WAITING:
                self._has_room.clear()
            with contextlib.suppress(BlockingIOError):  # full: the reader will wake up anyway
                os.write(self._writer, b"!")

    def take(self) -> list[Message]:
        """Return the messages that are there."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 1 << 16)
        with self._lock:
            found = list(self._messages)
            self._messages.clear()
            self._has_room.set()
        return found

    def await_room(self) -> None:
        """Wait a moment when many messages have not been read yet, so that nobody can fill the memory with them."""
        self._has_room.wait(ROOM_S)

    def close(self) -> None:
        """Close the pipe."""
        with self._lock:
            self._is_closed = True
            self._has_room.set()
            os.close(self._reader)
            os.close(self._writer)
