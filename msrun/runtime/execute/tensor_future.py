"""TensorFuture: a tensor that is still on its way, whoever sends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.execute.device_waits import note_wait
from msrun.runtime.progress import waiting_in

LOOK_EVERY = timedelta(seconds=2)
on_message: list[Callable[[TensorFuture], None]] = []
"""Called when a message has been started."""
on_wait: list[Callable[[TensorFuture], None]] = []
"""Called when this process is about to use what a message brings."""
on_long_wait: list[Callable[[], None]] = []
"""Called every `LOOK_EVERY` while this process waits in a collective; may raise."""


class TensorFuture:
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
        device = self._value.device
        if device.type == "cpu":
            _wait(work)
        else:  # only gloo's waits on the host can be left and taken up again
            work.wait()
            note_wait(self._describe(), device)

    def _describe(self) -> str:
        return f"{self._name}, result {'x'.join(map(str, self._shape)) or 'scalar'}"


def _wait(work: dist.Work) -> None:
    """Wait, and look around now and then when it takes long."""
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
