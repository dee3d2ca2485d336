"""The memory that the ranks of one group share: words, notes, a slot per rank and step, and mailboxes."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import secrets
import select
import struct
import sys
import time
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun import contract

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


SLOTS = 4
"""Steps that a rank may be ahead of the slowest."""
SLOT_BYTES = 1 << 20
NOTE = struct.Struct("<4q")
"""What a rank says of an operation."""
_MOST_VIEWS = 2048
"""Kept, of tensors that lie in the slots."""
_PAGE = HEAD_BYTES
_MEMORY, _REFUSED = "memory", "refused"
"""In the store: how the memory is found, and which rank cannot share it, and why."""
_MOST_MAIL_BYTES, _LEAST_MAIL_BYTES, _ALL_MAIL_BYTES = 16 << 20, 1 << 12, 1 << 30


class NotSharedError(RuntimeError):
    """The ranks of a group cannot share memory. Every one of them gets this error, whichever it is that cannot."""


class Segment:
    """One group's shared memory, as one of its ranks sees it. Made by all of them together.

    Args:
        store: where the first rank says how the memory is found; of this group alone.
        most_s: how long the others may take to come.
    """

    def __init__(self, store: Any, rank: int, size: int, most_s: float) -> None:
        self.rank, self.size = rank, size
        self.mail_bytes = max(_LEAST_MAIL_BYTES, min(_MOST_MAIL_BYTES, _ALL_MAIL_BYTES // size**2 & -_PAGE))
        self._place(size)
        descriptor = self._find_memory(store)
        self._map = mmap.mmap(descriptor, self._bytes)
        if rank:
            os.close(descriptor)
        memory = memoryview(self._map)
        self.words = Words(memory[_PAGE : _PAGE + 4 * self._words])
        self.notes = memory[self._notes_at : self._notes_at + NOTE.size * SLOTS * size]
        self.mail_counts = memory[self._mail_counts_at : self._mail_counts_at + 16 * size**2].cast("Q")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = torch.frombuffer(self._map, dtype=torch.uint8)
        self._slots = data[self._slots_at : self._mail_at].view(SLOTS, size, SLOT_BYTES)
        self.mail = data[self._mail_at :].view(size, size, self.mail_bytes)
        # Remembered: training sends the same sizes again and again, and to make a view takes as long as a short copy.
        remember = lru_cache(max(16, _MOST_VIEWS // size))
        self.stack, self.rows = remember(self._stack), remember(self._rows)
        self.own_rows = remember(self._own_rows)
        self.words[self._pid + rank] = os.getpid()
        self.words[self._world + rank] = dist.get_rank() if dist.is_initialized() else rank
        self._watched: dict[int, int] = {}
        """rank -> descriptor of its process: readable when it has ended"""
        try:
            self._meet(store, most_s)
        finally:
            if rank == 0:
                os.close(descriptor)  # everybody has opened it
        self.is_crowded = bool(self.words[self._crowded])
        """Whether ranks share cores: a rank then sleeps at once, and long sums are made one rank after the other."""

    def _place(self, size: int) -> None:
        """Say where everything lies."""
        self.arrived = 0
        """Per slot: how many ranks have written there, over all rounds."""
        self.posted, self.finished, self.left, self.bell, self.blocked, self._pid, self._world, self._joined = (
            SLOTS + size * number for number in range(8)
        )
        """Per rank: steps written, steps done with; whether it has left; the bell of its mailboxes; whether it waits
        for others to be done; its process; its rank in the world. In all: how many are here"""
        self._crowded = self._joined + 1
        self._words = self._crowded + 1
        self._notes_at = _page(_PAGE + 4 * self._words)
        self._mail_counts_at = _page(self._notes_at + NOTE.size * SLOTS * size)
        self._slots_at = _page(self._mail_counts_at + 16 * size**2)
        self._mail_at = self._slots_at + size * SLOTS * SLOT_BYTES
        self._bytes = self._mail_at + size**2 * self.mail_bytes

    def _find_memory(self, store: Any) -> int:
        """Return a descriptor of the memory, which the first rank makes; a rank that cannot tells all."""
        where = json.loads(store.get(_MEMORY)) if self.rank else None
        descriptor = -1
        try:
            if reason := why_not():
                raise RuntimeError(reason)
            if self.rank == 0:
                descriptor, where = make_memory(self._bytes)
            elif where is not None:
                descriptor = open_memory(*where)
        except (OSError, RuntimeError) as error:
            where = None
            store.set(_REFUSED, f"rank {dist.get_rank() if dist.is_initialized() else self.rank}: {error}")
        if self.rank == 0:
            store.set(_MEMORY, json.dumps(where))
        if where is None:
            raise NotSharedError(bytes(store.get(_REFUSED)).decode())
        return descriptor

    def _meet(self, store: Any, most_s: float) -> None:
        """Wait for all ranks, and watch their processes from then on; rank 0 comes last and decides for all."""
        end = time.monotonic() + most_s
        if self.rank == 0:
            self._wait_for_joined(store, self.size - 1, most_s, end)
            self.words[self._crowded] = self._share_cores()
        self.words.add(self._joined)
        self.words.wake(self._joined)
        self._wait_for_joined(store, self.size, most_s, end)
        for other in range(self.size):
            if other != self.rank:
                self._watched[other] = _watch(self.words[self._pid + other])

    def _wait_for_joined(self, store: Any, count: int, most_s: float, end: float) -> None:
        while (seen := self.words[self._joined]) < count:
            self.words.sleep(self._joined, seen, 0.05)
            if self.words[self._joined] == seen and store.check([_REFUSED]):
                raise NotSharedError(bytes(store.get(_REFUSED)).decode())
            if time.monotonic() > end:
                raise RuntimeError(f"{seen} of {self.size} ranks came to share memory within {most_s:g} s")

    def _share_cores(self) -> bool:
        """Return whether there are more ranks on this host than cores for them, unless each is bound to its own."""
        allowed = [_cores_of(self.words[self._pid + rank]) for rank in range(self.size)]
        cores = set().union(*allowed)
        ranks_here = int(os.environ.get(contract.LOCAL_WORLD_SIZE, 0)) or self.size
        return ranks_here > len(cores) != sum(map(len, allowed))

    @torch.inference_mode(mode=False)  # it is remembered, and written to outside that mode
    def _stack(self, slot: int, dtype: torch.dtype, begin: int, count: int) -> Tensor:
        """Return the same numbers of every rank's slot: [rank, count]."""
        return self._slots[slot].view(dtype)[:, begin : begin + count]

    @torch.inference_mode(mode=False)
    def _rows(self, slot: int, dtype: torch.dtype, begin: int, count: int) -> tuple[Tensor, ...]:
        """Return the same, each rank's by itself."""
        return self._stack(slot, dtype, begin, count).unbind(0)

    @torch.inference_mode(mode=False)
    def _own_rows(self, slot: int, dtype: torch.dtype, width: int, count: int) -> Tensor:
        """Return this rank's slot as what is for each rank, `width` apart: [rank, count]."""
        return self._slots[slot, self.rank].view(dtype)[: self.size * width].view(self.size, width)[:, :count]

    def sleep(self, word: int, seen: int, most_s: float) -> None:
        """Sleep until a word has another value; look for a moment before that, if no other rank needs this core."""
        if self.is_crowded or not self.words.spin(word, seen):
            self.words.sleep(word, seen, most_s)

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended."""
        if rank not in self._watched:
            return False
        poll = select.poll()
        poll.register(self._watched[rank], select.POLLIN)
        return bool(poll.poll(0))

    def name(self, rank: int | None = None) -> str:
        """Return what to call a rank, by default this one: by its number in the world."""
        return f"rank {self.words[self._world + (self.rank if rank is None else rank)]}"

    def gone_how(self, rank: int) -> str:
        """Return how a rank is gone, or nothing if it is not."""
        if self.words[self.left + rank]:
            return "has left the group"
        return "has ended" if self.has_ended(rank) else ""

    def close(self) -> None:
        """Let go of the memory; it is gone when all have."""
        for watched in self._watched.values():
            os.close(watched)
        self._watched.clear()
        for views in (self.stack, self.rows, self.own_rows):
            views.cache_clear()


def _cores_of(pid: int) -> set[int]:
    """Return the cores that a process may use; none if it has ended."""
    try:
        return os.sched_getaffinity(pid)
    except ProcessLookupError:
        return set()


def _watch(pid: int) -> int:
    """Return a descriptor that is readable when a process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        reader, writer = os.pipe()  # it has ended already: a pipe that nobody writes to is readable
        os.close(writer)
        return reader


def _page(offset: int) -> int:
    return offset + _PAGE - 1 & -_PAGE
