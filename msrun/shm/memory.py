"""Memory that processes of one machine share, and its words that they count in and sleep on: memfd and futex."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import secrets
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

_MAGIC = b"msrun shm 1\n"
_SECRET_BYTES = 16
HEAD_BYTES = 4096
"""At its beginning, by which it is recognised."""


def make_memory(size: int) -> tuple[int, list[Any]]:
    """Return the descriptor of new memory, and what `open_memory` needs to know; it is plain JSON."""
    secret = secrets.token_hex(_SECRET_BYTES)
    descriptor = os.memfd_create("msrun-shm", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, _MAGIC + secret.encode(), 0)
    return descriptor, [this_machine(), os.getpid(), descriptor, secret]


def open_memory(host: list[str], pid: int, descriptor: int, secret: str) -> int:
    """Return a descriptor of another process's memory."""
    if host != this_machine():
        raise RuntimeError("it is on another machine")
    try:
        found = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"process {pid}: {error.strerror}") from error
    if os.pread(found, len(_MAGIC) + len(secret), 0) != _MAGIC + secret.encode():
        os.close(found)
        raise RuntimeError(f"process {pid} shares other memory than was said")
    return found


def this_machine() -> list[str]:
    """Return what tells this machine, and this view of its processes, from others."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(Path("/proc/self/ns/pid").readlink())]


_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""futex's number among the system calls"""
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_EVERYONE = 0x7FFFFFFF
_NEVER_LESS_THAN_0 = 2 << 24
"""FUTEX_OP_CMP_LT against 0: nobody who sleeps on the counted word is woken by the count"""
_WRAP = 1 << 32
_LOOKS = 30
"""About 20 µs where no other process wants the core. More gains nothing; where the scheduler has put two ranks on one
core and each is a session of its own (autogroup), a yield does not reach the other one, and they are lost."""
_LOOK_S = 0.001
"""Most where others want the core."""
_libc = ctypes.CDLL(None, use_errno=True)
_futex = _libc.syscall
_futex.restype = ctypes.c_long
_futex.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
)  # fmt: skip
_number = _NUMBERS.get(platform.machine(), 0)
_is_strong = platform.machine() == "x86_64"
"""Whether loads, and stores, come in the order of the program."""


@cache
def why_not() -> str:
    """Return why words of shared memory cannot be had here; empty if they can. A container may forbid system calls."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "it needs Linux"
    if sys.byteorder != "little" or not _number:
        return f"no futex is known for {platform.machine()}"
    word = ctypes.c_uint32()
    if _futex(_number, ctypes.addressof(word), _WAKE, 1, 0, 0, 0) < 0:
        return f"futex: {os.strerror(ctypes.get_errno())}"
    for name, words in (("memfd_create", ("msrun-shm",)), ("pidfd_open", (os.getpid(),))):
        try:
            os.close(getattr(os, name)(*words))
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def is_reached(seen: int, value: int) -> bool:
    """Return whether a counter that may have wrapped is at a value or beyond it."""
    return distance(seen, value) < _WRAP >> 1


def distance(seen: int, value: int) -> int:
    """Return how far a counter that may have wrapped is beyond a value that it has reached."""
    return (seen - value) % _WRAP


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Words:
    """Counters at the beginning of a shared memory; numbered from 0.

    Args:
        memory: 4 bytes a word, of a mapping that outlives this object.
    """

    def __init__(self, memory: memoryview) -> None:
        self._values = memory.cast("I")
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._unused = ctypes.c_uint32()
        self._unused_at = ctypes.addressof(self._unused)

    def __getitem__(self, index: int) -> int:
        return self._values[index]

    def __setitem__(self, index: int, value: int) -> None:
        """Write a word that only this process writes; with `fence` before it, after all that was written before."""
        self._values[index] = value % _WRAP

    def any(self, index: int, count: int) -> bool:
        """Return whether one of some words is not 0."""
        return any(self._values[index : index + count])

    def add(self, index: int, count: int = 1) -> None:
        """Add atomically, after everything that was written before."""
        operation = 1 << 28 | _NEVER_LESS_THAN_0 | count << 12
        _futex(_number, self._unused_at, _WAKE_OP, 1, 0, self._begin + 4 * index, operation)

    def wake(self, index: int) -> None:
        """Wake every process that sleeps on a word."""
        _futex(_number, self._begin + 4 * index, _WAKE, _EVERYONE, 0, 0, 0)

    def spin(self, index: int, seen: int) -> bool:
        """Look for a moment whether a word changes; the process that will change it may need this core meanwhile."""
        end = time.monotonic() + _LOOK_S
        for _ in range(_LOOKS):
            if self._values[index] != seen:
                return True
            os.sched_yield()
            if time.monotonic() > end:
                break
        return False

    def sleep(self, index: int, seen: int, most_s: float) -> None:
        """Sleep while a word has the value that was seen, until it is woken, at most so long."""
        nanoseconds = int(most_s * 1e9)
        limit = _Time(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        failed = _futex(_number, self._begin + 4 * index, _WAIT, seen, ctypes.addressof(limit), 0, 0)
        if failed and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")

    def fence(self) -> None:
        """Let no later read, or write, come before this."""
        if not _is_strong:
            _futex(_number, self._unused_at, _WAKE_OP, 1, 0, self._unused_at, 1 << 28 | _NEVER_LESS_THAN_0)
