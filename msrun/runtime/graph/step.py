"""Step: what one forward pass holds until its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from msrun.runtime.graph.collectives import Pending
from msrun.runtime.graph.gradients import StepParameters
from msrun.runtime.graph.replay import SavedResults
from msrun.runtime.graph.segments import Name


@dataclass
class Copy:
    """What one copy of the batch holds during a step."""

    values: dict[Name, Tensor] = field(default_factory=dict)
    """What segments read: detached, so that every segment has an autograd graph of its own."""
    arriving: dict[Name, Pending] = field(default_factory=dict)
    """Results of collectives, not yet waited for."""
    written: dict[int, list[Tensor]] = field(default_factory=dict)
    """segment -> what it wrote, with its autograd graph."""
    gradients: dict[Name, list[Tensor | Pending]] = field(default_factory=dict)
    """Parts of a value's gradient that do not come through its leaf."""
    saved: dict[int, SavedResults] = field(default_factory=dict)
    """segment of a recomputed region -> results that are kept of it"""


class ValueOnItsWay(Pending):
    """A value on its way that becomes a leaf on arrival."""

    def __init__(self, pending: Pending, requires_grad: bool) -> None:
        self._pending = pending
        self._requires_grad = requires_grad

    def wait(self) -> Tensor:
        """Return the arrived value as a leaf."""
        return self._pending.wait().detach().requires_grad_(self._requires_grad)


@dataclass
class Step:
    """One forward pass, waiting for its backward pass."""

    copies: list[Copy]
    parameters: StepParameters
    buffers: dict[Name, Tensor] = field(default_factory=dict)
    """Present values of the buffers that the forward pass changes."""
