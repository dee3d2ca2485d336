"""Traffic: the counter of what this process has put on the wire, and copied between host and device."""

from __future__ import annotations

from collections import Counter
from threading import Lock

from torch import Tensor

from msrun.runtime.progress import begin_collective


class Traffic:
    """Counts what this rank has put on the wire, and copied between host and device: number and bytes, by operation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._copying = Lock()

    def add(self, name: str, value: Tensor) -> None:
        """Count one collective."""
        begin_collective()
        self.calls[name] += 1
        self.bytes[name] += value.numel() * value.element_size()

    def add_copy(self, name: str, value: Tensor) -> None:
        """Count one copy between the memories of the host and the device; in any thread."""
        with self._copying:
            self.calls[name] += 1
            self.bytes[name] += value.numel() * value.element_size()

    def reset(self) -> None:
        """Start again at zero."""
        self.calls.clear()
        self.bytes.clear()


traffic = Traffic()
"""The counter of this process."""
