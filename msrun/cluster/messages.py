"""Messages: between processes JSON with a length in front, over stream sockets, no pickle and no message without a
limit; between threads a queue that wakes its reader. And OwnThread: a thread of msrun, which cannot end unnoticed."""

from __future__ import annotations

import base64
import json
import math
import os
import select
import socket
import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msrun.planning.hosts import HostAssignment

if TYPE_CHECKING:
    from _typeshed import HasFileno

HEADER = struct.Struct("!I")
_COMPACT = (",", ":")  # JSON without blanks
MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # a plan for thousands of workers fits; anything above is a mistake
MAX_DEPTH = 32  # of lists and objects in each other

Message = dict[str, Any]


class NotUnderstood(ValueError):
    """What has come is no speech of ours, or not for its sender to say; the message says why."""


SAME_EVERYWHERE = "give --tls_config on all hosts, or on none"
NO_TLS = f"it does not speak TLS; {SAME_EVERYWHERE}"


def encode_body(message: Message) -> bytes:
    """Return a message as JSON text. Raises ValueError: it is larger than MAX_MESSAGE_BYTES."""
    body = json.dumps(message, separators=_COMPACT).encode("utf-8", "surrogateescape")
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(body)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    return body


def decode_body(body: bytes) -> Message:
    """Return the message in JSON text. Raises ValueError: it is no JSON object, or is nested deeper than MAX_DEPTH."""
    try:
        message = json.loads(body.decode("utf-8", "surrogateescape"))
    except RecursionError:
        raise ValueError("message is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"message is a JSON {type(message).__name__}: an object is expected")
    level: list[Any] = [message]
    for _ in range(MAX_DEPTH):
        values = chain.from_iterable(item.values() if isinstance(item, dict) else item for item in level)
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return message
    raise ValueError("message is nested too deeply")


def frame(body: bytes) -> bytes:
    """Return a body with its length in front, as it goes over the wire."""
    return HEADER.pack(len(body)) + body


def encode_message(message: Message) -> bytes:
    """Return the bytes of one message: four of length, then JSON (ValueError: more than MAX_MESSAGE_BYTES)."""
    return frame(encode_body(message))


def await_input(source: int | HasFileno, limit_s: float | None = None) -> bool:
    """Wait until something can be read, of any descriptor; False when nothing has come in time. None = no limit."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else math.ceil(1000 * max(0.0, limit_s))))


class FrameBuffer:
    """Collects received bytes and gives back whole bodies, at which it does not look. Owned by one reader."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """`max_bytes`: of one body; may be raised once the other side is known."""
        self.max_bytes = max_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes, most: int = sys.maxsize) -> list[bytes]:
        """Add bytes and return every body that is complete, at most so many (ValueError: a length above the limit)."""
        self._bytes += data
        bodies: list[bytes] = []
        while len(bodies) < most and len(self._bytes) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes)
            if length > self.max_bytes:
                raise ValueError(f"message of {length} bytes announced: at most {self.max_bytes} are allowed")
            end = HEADER.size + length
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[HEADER.size : end]))
            del self._bytes[:end]
        return bodies

    def messages(self, data: bytes) -> list[Message]:
        """Add bytes and return every message that is now complete. Raises ValueError: as `feed`, or a body is none."""
        return [decode_body(body) for body in self.feed(data)]


class Channel:
    """One end of a message stream. Sending blocks; receiving never does once the socket is readable."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = FrameBuffer()
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; False when the other end is gone."""
        try:
            self._socket.sendall(encode_message(message))
        except (BrokenPipeError, ConnectionError):
            self.is_closed = True
            return False
        return True

    def receive(self) -> list[Message]:
        """Read what is there and return whole messages; sets `is_closed` at the end of the stream."""
        try:
            data = self._socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionError:
            data = b""
        if not data:
            self.is_closed = True
            return []
        return self._buffer.messages(data)

    def close(self) -> None:
        """Close the descriptor; the other end sees the end of the stream."""
        self.is_closed = True
        self._socket.close()


def pack_text(text: str) -> str:
    """Return text as it goes to the hosts; empty text stays empty."""
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogateescape"))).decode("ascii") if text else ""


def unpack_text(packed: str) -> str:
    """Inverse of `pack_text`."""
    return zlib.decompress(base64.b64decode(packed)).decode("utf-8", "surrogateescape") if packed else ""


def pack_hosts(hosts: Sequence[HostAssignment]) -> str:
    """Return the hosts of a job as they go to each of them."""
    return pack_text(json.dumps([host.to_json() for host in hosts], separators=_COMPACT) if hosts else "")


def unpack_hosts(packed: str) -> tuple[HostAssignment, ...]:
    """Inverse of `pack_hosts`."""
    text = unpack_text(packed)
    return tuple(HostAssignment.from_json(value) for value in json.loads(text)) if text else ()


PAUSE_S = 0.05  # between a fault and the next try, so that a thread with a fault that stays does not use up a processor


class OwnThread(threading.Thread):
    """Does its work in the background, as a daemon; its owner is told what that raises."""

    def __init__(
        self, name: str, work: Callable[[], None], on_fault: Callable[[BaseException], None], *, goes_on: bool = False
    ) -> None:
        """`on_fault`: gets the first that `work` raises. `goes_on`: `work` is begun again until it returns."""
        super().__init__(name=name, daemon=True)
        self._work, self._on_fault, self._goes_on = work, on_fault, goes_on
        self.fault: BaseException | None = None  # the first that was raised

    def run(self) -> None:
        while True:
            try:
                self._work()
                return
            except BaseException as error:  # noqa: BLE001 - whatever it was, somebody has to learn of it
                if self.fault is None:
                    self.fault = error
                    self._on_fault(error)
            if not self._goes_on:
                return
            time.sleep(PAUSE_S)


def print_fault(error: BaseException) -> None:
    """Print what was raised with its traceback, where there is nobody else to tell."""
    sys.stderr.write(traceback_of(error))


def describe_fault(error: BaseException, where: str = "its traceback is in scheduler.log") -> str:
    """Return a fault of msrun itself as one line that ends with `where`: "msrun itself failed: OSError: ..."."""
    return f"msrun itself failed: {name_fault(error)}; {where}"


def name_fault(error: BaseException) -> str:
    said = " ".join(str(error).split())
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}{f': {said}' if said else ''}{notes}"


def traceback_of(error: BaseException) -> str:
    import traceback  # not where all is well

    return "".join(traceback.format_exception(error))


Item = TypeVar("Item")


class WakingQueue(Generic[Item]):
    """Any thread posts, one thread reads. Posting never waits, so that a reader who is held up holds up nobody."""

    def __init__(self) -> None:
        """Open nothing: the descriptor is made by `fileno`."""
        self._messages: deque[Item] = deque()
        self._descriptor = -1
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are messages; -1 once it is closed."""
        with self._lock:
            if self._descriptor < 0 and not self._is_closed:
                self._descriptor = os.eventfd(len(self._messages), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._descriptor

    def post(self, message: Item) -> None:
        """Leave a message; nobody gets it when the inbox is closed."""
        with self._lock:
            if self._is_closed:
                return
            self._messages.append(message)
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def take(self, most: int = sys.maxsize) -> list[Item]:
        """Return the messages that are there, at most so many."""
        with self._lock:
            found = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
            if self._descriptor >= 0 and found:
                left = os.eventfd_read(self._descriptor) - len(found)
                if left > 0:
                    os.eventfd_write(self._descriptor, left)
        return found

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


Inbox = WakingQueue[Message]  # of messages
