"""Step: what one forward pass holds until its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from msrun.runtime.execute.gradients import StepParameters
from msrun.runtime.execute.pending import Pending
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
    gradients: dict[Name, list[Tensor | Pending]] = field(default_factory=dict)
    """Parts of a value's gradient that do not come through its leaf."""
    saved: dict[int, SavedResults] = field(default_factory=dict)
    """segment of a recomputed region -> results that are kept of it"""
    copied: dict[Name, Tensor] = field(default_factory=dict)
    """Results that lie in the memory of a gathered parameter, copied out of it before it is given back."""


class ValueOnItsWay(Pending):
    """A value on its way that becomes a leaf on arrival."""

    def __init__(self, pending: Pending, requires_grad: bool) -> None:
        self._pending = pending
        self._requires_grad = requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """The type of the value."""
        return self._pending.dtype

    @property
    def is_number_on_host(self) -> bool:
        """Whether it is a scalar with a gradient, and waiting for it would hold this process up."""
        return self._requires_grad and self._pending.is_number_on_host

    def wait(self) -> Tensor:
        """Return the arrived value as a leaf."""
        return self._pending.wait().detach().requires_grad_(self._requires_grad)


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
