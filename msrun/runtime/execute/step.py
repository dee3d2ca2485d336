"""Step: what one forward pass holds until its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from msrun.runtime.execute.gradients import StepParameters
from msrun.runtime.execute.host_thread import HostTask
from msrun.runtime.execute.phase import is_verifying
from msrun.runtime.execute.row_gradients import added
from msrun.runtime.execute.tensor_future import TensorFuture
from msrun.runtime.schedule.replay import SavedResults
from msrun.runtime.schedule.segments import Name


@dataclass
class Copy:
    """What one copy of the batch holds during a step."""

    values: dict[Name, Tensor] = field(default_factory=dict)
    """What segments read: detached, so that every segment has an autograd graph of its own."""
    arriving: dict[Name, ValueOnItsWay] = field(default_factory=dict)
    """Results of collectives, not yet waited for."""
    written: dict[int, list[Tensor]] = field(default_factory=dict)
    """segment -> what it wrote, with its autograd graph."""
    gradients: dict[Name, list[Tensor | TensorFuture]] = field(default_factory=dict)
    """Parts of a value's gradient that do not come through its leaf."""
    saved: dict[int, SavedResults] = field(default_factory=dict)
    """segment of a recomputed region -> results that are kept of it"""
    copied: dict[Name, Tensor] = field(default_factory=dict)
    """Results that lie in the memory of a gathered parameter, copied out of it before it is given back."""
    computing: dict[Name, HostTask] = field(default_factory=dict)
    """Values that the host may still be computing."""
    reading: dict[Name, list[HostTask]] = field(default_factory=dict)
    """Values whose readers on the host may not have added to their gradient yet."""

    def take_gradient(self, name: Name) -> Tensor | None:
        """Return the whole gradient of a value: from its leaf, from results, from collectives."""
        for task in self.reading.pop(name, ()):
            task.wait()
        parts = [p.wait() if isinstance(p, TensorFuture) else p for p in self.gradients.pop(name, [])]
        leaf = self.values.pop(name, None)
        if leaf is not None and leaf.grad is not None:
            parts.append(leaf.grad)
        total = add_up(parts)
        return total.to_dense() if total is not None and total.is_sparse else total

    def settle_gradients(self, names: Sequence[Name]) -> None:
        """Wait for what is on its way from other ranks to the gradients of these values."""
        for name in names:
            parts = self.gradients.get(name, [])
            parts[:] = [p.wait() if isinstance(p, TensorFuture) and p.is_message else p for p in parts]


def add_up(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the parts of a gradient, of those that there are."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else added(total, part)
    return total


class ValueOnItsWay(TensorFuture):
    """A value on its way that becomes a leaf on arrival."""

    def __init__(self, future: TensorFuture, requires_grad: bool) -> None:
        self._future = future
        self.requires_grad = requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """The type of the value."""
        return self._future.dtype

    @property
    def is_number_on_host(self) -> bool:
        """Whether it is a scalar with a gradient, and waiting for it would hold this process up."""
        return self.requires_grad and self._future.is_number_on_host

    def wait(self) -> Tensor:
        """Return the arrived value as a leaf."""
        return self._future.wait().detach().requires_grad_(self.requires_grad)


def arrived(value: Any) -> Any:
    """Return a result that may have been left on its way (`Executor.results`), waiting for it."""
    return value.wait() if isinstance(value, ValueOnItsWay) else value


def full_like(value: Tensor | ValueOnItsWay, number: float) -> Tensor:
    """Return a tensor of one number, like a result that may still be on its way; that is not waited for."""
    if isinstance(value, ValueOnItsWay):
        return torch.full((), number, dtype=value.dtype)
    return torch.full_like(value, number)


@dataclass
class Step:
    """One forward pass, waiting for its backward pass."""

    copies: list[Copy]
    parameters: StepParameters
    buffers: dict[Name, Tensor] = field(default_factory=dict)
    """Present values of the buffers that the forward pass changes."""
    first_buffers: dict[Name, Tensor] = field(default_factory=dict)
    """What they were before it."""
    readers: dict[int, list[HostTask]] = field(default_factory=dict)
    """group of parameters -> what reads them on the host and may not be done yet"""
    tasks: list[HostTask] = field(default_factory=list)
    """Of the backward pass, on the host."""
    is_verified: bool = field(default_factory=is_verifying.get)
    """Run for verification: it counts as none. Autograd may run the backward pass in a thread without this context."""

    def wait_for_readers(self, group: int) -> None:
        """Wait until the host has done what reads a group of parameters."""
        for task in self.readers.pop(group, ()):
            task.wait()
