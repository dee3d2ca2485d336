"""What msrun prints while it supervises a job. Each place has one thread and one bounded queue, so that a paused
terminal, `| less` or a full pipe holds up nothing else; stdout and stderr to the same place share them. What does not
fit is dropped, and said when there is room. Text of others, which may send a terminal what moves its cursor or worse,
goes through `printable`."""

from __future__ import annotations

import os
import re
import select
import sys
import threading
import time
from collections import Counter, deque
from typing import TextIO

STDOUT, STDERR = 1, 2
MAX_WAITING_BYTES = 1 << 20
ROOM_BYTES = 1 << 18  # with less than this in the queue there is room for more of what can wait elsewhere
STALL_S = 2.0  # how long a reader that takes nothing is waited for at the end of a job
FLUSH_S = 30.0  # how long one that takes something is waited for
ERASE_LINE = b"\r\x1b[K"
_PIECE_BYTES = 1 << 16


class Place:
    """A terminal, a pipe or a file, the thread that writes there, and what waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._moved_at = time.monotonic()
        self._dropped: Counter[int] = Counter()
        self._gone: set[int] = set()
        self._thread: threading.Thread | None = None
        self._is_ended = False
        self.is_at_line_start = True  # what was written last has ended its line

    def write(self, descriptor: int, data: bytes, *, is_kept: bool) -> None:
        """As the function `write`."""
        with self._changed:
            if descriptor in self._gone or not data:
                return
            if not is_kept and self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self._dropped[descriptor] += len(data)
                return
            if not self._waiting_bytes:
                self._moved_at = time.monotonic()
            self._put(descriptor, data)
            self.is_at_line_start = data.endswith((b"\n", ERASE_LINE))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="msrun-output", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_open(self, descriptor: int) -> bool:
        return descriptor not in self._gone

    def has_room(self, deadline: float = 0.0, below_bytes: int = ROOM_BYTES) -> bool:
        """Return whether less than `below_bytes` waits; waits until `deadline` (monotonic) while the reader reads."""
        with self._changed:
            while self._waiting_bytes >= below_bytes:
                now = time.monotonic()
                end = min(deadline, self._moved_at + STALL_S)
                if now >= end:
                    return False
                self._changed.wait(end - now)
        return True

    def is_idle(self, deadline: float = 0.0) -> bool:
        return self.has_room(deadline, 1)

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        if self._thread is not None and not self._waiting_bytes:
            self._thread.join()

    def _put(self, descriptor: int, data: bytes) -> None:
        self._queue.append((descriptor, data))
        self._waiting_bytes += len(data)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._is_ended:
                        return
                    self._changed.wait()
                descriptor, data = self._queue.popleft()
            left = memoryview(data)
            try:
                while left:
                    count = self._write_some(descriptor, left[:_PIECE_BYTES]) or len(left)
                    left = left[count:]
                    self._note_progress(count)
            except Exception as error:  # noqa: BLE001 - this thread has no successor: it tells, and goes on
                own = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, own)))
                with self._changed:
                    self._waiting_bytes = sum(len(waiting) for _, waiting in self._queue)
                    self._changed.notify_all()

    def _note_progress(self, count: int) -> None:
        with self._changed:
            self._waiting_bytes -= count
            self._moved_at = time.monotonic()
            for descriptor, dropped in list(self._dropped.items()):
                if not self._queue:
                    del self._dropped[descriptor]
                    self._put(descriptor, f"msrun: {dropped} bytes were left out here: nobody read them\n".encode())
            self._changed.notify_all()

    def _write_some(self, descriptor: int, data: memoryview) -> int:
        """Return how many bytes were written; 0 when nobody reads any more, or the disk is full: the job goes on."""
        try:
            while True:
                try:
                    return os.write(descriptor, data)
                except BlockingIOError:  # another program has made this pipe or terminal a non-blocking one
                    room = select.poll()  # whatever the number of the descriptor
                    room.register(descriptor, select.POLLOUT)
                    room.poll(1000 * STALL_S)
        except OSError:
            with self._changed:
                self._gone.add(descriptor)
                others = [entry for entry in self._queue if entry[0] != descriptor]
                self._waiting_bytes -= sum(len(dropped) for _, dropped in self._queue)
                self._queue.clear()
                for entry in others:
                    self._put(*entry)
            return 0


_places: dict[tuple[int, int], Place] = {}


def place(descriptor: int) -> Place:
    found = os.fstat(descriptor)
    return _places.setdefault((found.st_dev, found.st_ino), Place())


def write(descriptor: int, data: bytes, *, is_kept: bool = False) -> None:
    """Have bytes written; never waits, never fails. `is_kept`: drop nothing, for somebody who asks for room first."""
    place(descriptor).write(descriptor, data, is_kept=is_kept)


_line_end = "\n"


def set_line_end(line_end: str) -> None:
    """End lines of msrun's own so: a terminal in raw mode begins a new line at its left only with \\r."""
    global _line_end
    _line_end = line_end


def say_lines(text: str) -> None:
    """Print lines of msrun's own on stderr, or what takes its place: they begin a line, whatever a worker has begun."""
    line = f"{printable(text)}\n".replace("\n", _line_end)
    if sys.stderr is sys.__stderr__:
        begin = b"" if place(STDERR).is_at_line_start else _line_end.encode()
        write(STDERR, begin + line.encode("utf-8", "backslashreplace"))
    else:
        sys.stderr.write(line)


def is_one_place() -> bool:
    return place(STDOUT) is place(STDERR)


def flush() -> None:
    deadline = time.monotonic() + FLUSH_S
    for one in list(_places.values()):
        one.is_idle(deadline)


def close() -> None:
    """Flush, and end the threads that have nothing more to write: a process that forks should have none."""
    flush()
    for one in _places.values():
        one.end()
    _places.clear()


def open_standard_streams() -> None:
    """Put /dev/null in the place of closed standard streams (`msrun ... >&-`), before a file takes their numbers."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - the interface of os
        if getattr(sys, name) is None:
            stream = open(descriptor, "r" if descriptor == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def discard_output(stream: TextIO) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


_CSI = r"\x1b\[[0-?]*[ -/]*[@-~]"
_SUSPECT = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
_PLAIN = bytes([0x09, 0x0A, *range(0x20, 0x7F)])
_COLOUR = r"\x1b\[[0-9;:]*m\Z"
_UNSAFE = rf"{_CSI}|{_SUSPECT}"
_RESET = "\x1b[0m"
_COLOURS = r"(\x1b\[[0-9;:]*m)"


def printable(text: str, *, keep_colours: bool = False) -> str:
    """Return text that a terminal only shows: CSI sequences are left out, other control characters (C0, C1, DEL),
    separators and changes of direction are escaped as \\x1b; line ends and tabs stay, with `keep_colours` also colours
    (SGR), which end with the line."""
    if text.isprintable() or not re.search(_SUSPECT, text):
        return text
    if not keep_colours:
        return re.sub(_UNSAFE, _escape, text)
    return "\n".join(map(_with_colours, text.split("\n")))


def printable_bytes(data: bytes, *, keep_colours: bool = False) -> bytes:
    """Return the same of bytes, as UTF-8; those that are no UTF-8 are shown escaped."""
    if not data.translate(None, _PLAIN):
        return data
    return printable(data.decode("utf-8", "backslashreplace"), keep_colours=keep_colours).encode()


def one_line(text: str) -> str:
    """Return text that stays in its line, for names and reasons; all that is not printable is shown escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in printable(text))


def describe_span(seconds: float) -> str:
    """Return a span of time in words: 0.4 s, 12 s, 3 min 5 s, 2 h 0 min, 3 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, whole_s = divmod(int(max(seconds, 10)), 60)
    hours, days = minutes // 60, minutes // 1440
    if not minutes:
        return f"{whole_s} s"
    if not hours:
        return f"{minutes} min {whole_s} s"
    return f"{days} d {hours % 24} h" if days else f"{hours} h {minutes % 60} min"


def fit(text: str, columns: int) -> str:
    """Return as much of a printable line as a terminal shows in so many columns; colours take none, and stay."""
    import unicodedata  # for live lines and tables only

    shown: list[str] = []
    for part in re.split(_COLOURS, text):
        if part.startswith("\x1b"):
            shown.append(part)
            continue
        for char in part:
            columns -= 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
            if columns >= 0:
                shown.append(char)
    return "".join(shown)


def _escape(match: re.Match[str]) -> str:
    return "" if len(match[0]) > 1 else ascii(match[0])[1:-1]


def _with_colours(line: str) -> str:
    has_colour = False

    def escape(match: re.Match[str]) -> str:
        nonlocal has_colour
        if re.match(_COLOUR, match[0]):
            has_colour = True
            return match[0]
        return _escape(match)

    shown = re.sub(_UNSAFE, escape, line)
    return shown + _RESET if has_colour else shown
