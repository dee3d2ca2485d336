"""Bodies of messages in memory that a worker and a parameter server of one machine share.

Through a socket every body is copied into the kernel and out again, and into memory that is new each time. Requests and
replies of a connection take turns, so that one place for replies will do: a worker has read or copied what is there
before its next request. Requests have two in turns: a server may still be at work on one when the next is written.
Headers still travel through the socket, and wake the other side.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Any

import torch

from msrun.runtime.shm.memory import HEAD_BYTES, make_memory, open_memory

SHARE = "share"
"""The kind of request that offers memory to a server."""
LEAST_BYTES = 1 << 15
"""Smaller bodies go through the socket."""
MOST_BYTES = 1 << 27
"""So do larger ones: the memory stays for as long as the connection."""


class SharedBody:
    """The places for bodies in both directions, as one of both sides sees them.

    Args:
        descriptor: of the memory; closed here.
        size: bytes of a place.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        try:
            memory = mmap.mmap(descriptor, HEAD_BYTES + 3 * size)  # refuses a size that the memory does not have
        finally:
            os.close(descriptor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = torch.frombuffer(memory, dtype=torch.uint8)
        self.requests, self.reply = data[HEAD_BYTES:].split([2 * size, size])
        self._turn = 0

    def next_request(self) -> int:
        """Return where in `requests` the next one's body is put."""
        self._turn = self.size - self._turn
        return self._turn


def offer(wanted: int) -> tuple[int, int, dict[str, Any]]:
    """Return a descriptor of new memory, the bytes of a place in it, at least those wanted, and how a server opens it.

    Close the descriptor, by making a SharedBody of it, when the server has opened it.
    """
    size = 1 << max(20, (wanted + wanted // 4 - 1).bit_length())
    descriptor, where = make_memory(HEAD_BYTES + 3 * size)
    return descriptor, size, {"size": size, "where": where}


def accept(fields: dict[str, Any]) -> SharedBody:
    """Return the memory that a worker offers.

    Raises:
        RuntimeError: it is on another machine, or may not be opened.
        ValueError: it does not have the size that was said.
    """
    size = int(fields["size"])
    if not 0 < size <= 4 * MOST_BYTES:
        raise ValueError(f"{size} bytes")
    return SharedBody(open_memory(*fields["where"]), size)
