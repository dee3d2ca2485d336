"""The memory that the ranks of one group share: words, notes, a slot per rank and step, and mailboxes."""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import time
import warnings
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun import contract
from msrun.shm.memory import HEAD_BYTES, Words, make_memory, open_memory, why_not

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
