"""RotatedLog: a worker's log file that is exchanged for a new one, between two lines, when it has grown enough.

The newest file keeps the name, `worker_3.log`; older ones are `worker_3.log.1` (the next newest) to `worker_3.log.N`.
What is written is what was given, byte for byte: older files first, then the newest, are the worker's output.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from msrun.agent.logs.own_file import open_own_file

LINE_BOUND_BYTES = 16 * 1024 * 1024
"""How far past its size a file may grow to keep the line whole that crosses it; a longer line is cut there."""
RETRY_S = 1.0  # how long a log that could not be written is left alone; an attempt on a full disk can take its time

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


@dataclass(frozen=True)
class LogRotation:
    """How logs are rotated."""

    max_bytes: int  # size at which a file is exchanged for a new one
    keep: int  # how many older files stay; 1 or more


NO_ROTATION = LogRotation(1 << 62, 1)


def rotated_path(path: str, number: int) -> str:
    """Return the name of an older file of a log, 1 for the newest of them; 0 is the log itself."""
    return f"{path}.{number}" if number else path


def rename_log(path: str, new_path: str) -> None:
    """Rename a log that nobody writes any more, with its older files: `new_path`, `new_path.1` and so on. Raises
    OSError: a file cannot be renamed. A log that is not there is none."""
    number = 0
    while os.path.lexists(rotated_path(path, number)):
        os.replace(rotated_path(path, number), rotated_path(new_path, number))  # noqa: PTH105
        number += 1


class RotatedLog:
    """One log and its older files. Failures to write never leave this class: they are counted and told."""

    def __init__(self, path: str, rotation: LogRotation) -> None:
        """Open the file, or create it, and go on at its end. Raises OSError: it cannot be opened, or is no plain file
        of ours."""
        self._path = path
        self._rotation = rotation
        self._fd = open_own_file(path, _APPEND)
        self._size_bytes = os.fstat(self._fd).st_size
        self._is_in_line = False  # the newest file ends within a line
        self._gap_bytes = 0  # bytes lost since the newest file was last written; 0 when all is well
        self._was_gap_in_line = False  # the last lost byte was within a line
        self._retry_at = 0.0
        self.lost_bytes = 0  # bytes that could not be written, in all
        self.fault = ""  # why something was first lost; empty when nothing was

    def write(self, data: bytearray, count: int) -> None:
        """Write the first `count` bytes of `data`, rotating as needed; bytes that cannot be written are lost."""
        with memoryview(data) as view:
            begin = 0
            while begin < count:
                end = self._end_of_file(data, begin, count)
                if end > begin:
                    self._append(view[begin:end])
                if end < count:
                    self._rotate()
                begin = end

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end_of_file(self, data: bytearray, begin: int, count: int) -> int:
        """Return how far the bytes from `begin` belong into the newest file; `begin` itself when none do."""
        room = self._rotation.max_bytes - self._size_bytes
        if count - begin <= room:
            return count
        if room > 0:
            line_end = data.rfind(b"\n", begin, begin + room)
            if line_end >= 0:
                return line_end + 1
        if self._size_bytes > 0 and not self._is_in_line:
            return begin  # not even one line fits
        bound = min(count, max(begin, begin + room + LINE_BOUND_BYTES))  # the line that crosses: to its end
        line_end = data.find(b"\n", begin, bound)
        return line_end + 1 if line_end >= 0 else bound

    def _rotate(self) -> None:
        try:
            keep = self._rotation.keep  # the oldest that has to move gets the first number that is free, else the last
            free = (number for number in range(1, keep) if not os.path.lexists(rotated_path(self._path, number)))
            for number in range(next(free, keep), 0, -1):
                with contextlib.suppress(FileNotFoundError):  # somebody has moved it away
                    os.replace(rotated_path(self._path, number - 1), rotated_path(self._path, number))  # noqa: PTH105
            self.close()
        except OSError:  # a folder that may not be written any more: the file grows on, which loses nothing
            pass
        self._size_bytes = 0

    def _append(self, data: memoryview) -> None:
        if self._gap_bytes:
            data = self._resume(data)
        written, reason = self._write_all(data)
        if reason:
            self._lose(data[written:], reason)
        if written:
            self._is_in_line = data[written - 1] != 0x0A

    def _write_all(self, data: memoryview) -> tuple[int, str]:
        """Write what can be written; returns how much that is, and why it is not everything."""
        written = 0
        try:
            if self._fd < 0 and len(data):
                self._fd = open_own_file(self._path, _APPEND | os.O_EXCL)
                self._is_in_line = False
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            return written, error.strerror or type(error).__name__
        finally:
            self._size_bytes += written
        return written, ""

    def _lose(self, data: memoryview, reason: str) -> None:
        self.fault = self.fault or reason
        self._retry_at = time.monotonic() + RETRY_S
        self._skip(data)

    def _skip(self, data: memoryview) -> None:
        if len(data):
            self.lost_bytes += len(data)
            self._gap_bytes += len(data)
            self._was_gap_in_line = data[-1] != 0x0A

    def _resume(self, data: memoryview) -> memoryview:
        """Try to write again, from the next line on and with a word about the gap; returns what is still to write."""
        begin = bytes(data).find(b"\n") + 1 if self._was_gap_in_line else 0
        if time.monotonic() < self._retry_at or (self._was_gap_in_line and not begin):
            self._skip(data)
            return data[:0]
        self._skip(data[:begin])
        line_end = "\n" if self._is_in_line else ""
        words = f"{line_end}[msrun: {self._gap_bytes} bytes of this log were lost: {self.fault}]\n"
        written, reason = self._write_all(memoryview(words.encode()))
        if reason:
            self._is_in_line = self._is_in_line or written > 0
            self._lose(data[begin:], reason)
            return data[:0]
        self._gap_bytes = 0
        self._is_in_line = False
        return data[begin:]
