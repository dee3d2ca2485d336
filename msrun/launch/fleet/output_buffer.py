"""OutputBuffer: bytes that wait until the other side takes them."""

from __future__ import annotations

from collections import deque

from msrun.cluster.connection import MAX_UNSENT_BYTES

PIECE_BYTES = 1 << 18


class OutputBuffer:
    """Bytes in their order, each kept as it was given. Guarded by its owner."""

    def __init__(self, limit_bytes: int = MAX_UNSENT_BYTES) -> None:
        """`limit_bytes`: so much may wait."""
        self._limit_bytes = limit_bytes
        self._pieces: deque[memoryview] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, data: bytes) -> bool:
        """Add bytes; False, and nothing is added, when more would wait than may."""
        if self._size + len(data) > self._limit_bytes:
            return False
        if data:
            self._pieces.append(memoryview(data))
            self._size += len(data)
        return True

    def head(self) -> memoryview:
        """Return the next bytes, at most PIECE_BYTES; empty when there are none."""
        return self._pieces[0][:PIECE_BYTES] if self._pieces else memoryview(b"")

    def drop(self, count: int) -> None:
        """Forget so many bytes of `head`: they are on their way."""
        first = self._pieces.popleft()
        if count < len(first):
            self._pieces.appendleft(first[count:])
        self._size -= count

    def clear(self) -> None:
        """Forget all."""
        self._pieces.clear()
        self._size = 0
