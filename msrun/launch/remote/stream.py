"""One connection of an agent to its launcher: a pair of descriptors, on which nobody ever waits for the other side."""

from __future__ import annotations

import contextlib
import os
import sys

from msrun.cluster.messages import Message, MessageBuffer, encode_message
from msrun.launch.transport.pipe import MARKER

READ_BYTES = 1 << 16
WRITE_BYTES = 1 << 18


class Stream:
    """Owned by one thread. What cannot be sent at once is kept and sent by `flush`."""

    def __init__(self, reader: int, writer: int) -> None:
        """Both descriptors are this object's from now on; they may be the same."""
        self.reader, self.writer = reader, writer
        for descriptor in {reader, writer}:
            os.set_blocking(descriptor, False)
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
                count = os.write(self.writer, self._unsent[:WRITE_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.is_closed = True
                return
            del self._unsent[:count]

    def receive(self) -> list[Message]:
        """Return whole messages that have come; sets `is_closed` at the end, and when what comes is no message."""
        try:
            data = os.read(self.reader, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        try:
            if data:
                return self._buffer.feed(data)
        except ValueError:
            pass
        self.is_closed = True
        return []

    def close(self) -> None:
        """Close the descriptors."""
        self.is_closed = True
        for descriptor in {self.reader, self.writer}:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def take_stdio() -> Stream:
    """Return stdin and stdout as a stream; what is printed from now on goes to stderr, what is read is empty."""
    sys.stdout.flush()
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return Stream(reader, writer)
