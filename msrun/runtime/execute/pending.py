"""Pending: a tensor on its way, whoever sends it; and the counter of what this process has put on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.progress import begin_collective, waiting_in


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
LOOK_EVERY = timedelta(seconds=2)
on_message: list[Callable[[Pending], None]] = []
"""Called when a message has been started."""
on_wait: list[Callable[[Pending], None]] = []
"""Called when this process is about to use what a message brings."""
on_long_wait: list[Callable[[], None]] = []
"""Called every `LOOK_EVERY` while this process waits in a collective; may raise."""


class Pending:
    """A tensor that may still be on its way."""

    def __init__(
        self,
        value: Tensor,
        work: dist.Work | Sequence[dist.Work] | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
        name: str = "a collective",
        shape: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            finish: makes the tensor of what has come.
            shape: of the tensor, where that is not what has come.
        """
        self._value = value
        self._shape = value.shape if shape is None else shape
        self._works = [*work] if isinstance(work, Sequence) else [] if work is None else [work]
        self._finish = finish
        self._name = name
        for look in on_message:
            look(self)

    @property
    def is_message(self) -> bool:
        """Whether other ranks send it."""
        return bool(self._works) or self._finish is not None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensor."""
        return self._value.dtype

    @property
    def is_number_on_host(self) -> bool:
        """Whether it is one floating-point number, for which a wait would hold this process up."""
        value = self._value
        return not value.dim() and value.dtype.is_floating_point and value.device.type == "cpu"

    def wait(self) -> Tensor:
        """Return the tensor, waiting for it the first time."""
        for look in on_wait if self._works else ():
            look(self)
        while self._works:
            work = self._works.pop(0)
            if not work.is_completed():
                with waiting_in(self._describe):
                    self._wait_for_work(work)
            else:
                work.wait()
        if self._finish is not None:
            self._value = self._finish(self._value)
            self._finish = None
        return self._value

    def _wait_for_work(self, work: dist.Work) -> None:
        _wait(work, self._value.device)

    def _describe(self) -> str:
        return f"{self._name}, result {'x'.join(map(str, self._shape)) or 'scalar'}"


def _wait(work: dist.Work, device: torch.device) -> None:
    """Wait, and look around now and then when it takes long."""
    if device.type != "cpu":  # only gloo's waits can be left and taken up again
        work.wait()
        return
    while True:
        try:
            work.wait(LOOK_EVERY)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it has failed
                return
            for look in on_long_wait:
                look()
        else:
            return


def name_of(operation: str, group: dist.ProcessGroup) -> str:
    """Return what to call an operation of a group, for whoever asks what this rank waits for."""
    return f"{operation} of {dist.get_world_size(group)} ranks"
