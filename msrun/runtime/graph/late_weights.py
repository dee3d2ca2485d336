"""Late weights: gradients of linear layers' weights, computed while the gradients of a segment's inputs travel.

A linear layer's backward pass is two matrix products: the gradient of its input, which other ranks wait for, and that
of its weight, which only this rank's sum needs. Autograd does both at once; here the first alone happens in autograd,
the executor starts the collectives that it feeds, and `compute_late_weights` does the second meanwhile, adding in place
to what copies and micro batches before have left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from msrun.runtime.graph.regions import Region
from msrun.runtime.graph.segments import Name, Segment

aten = torch.ops.aten


@dataclass(frozen=True)
class _Left:
    """What the gradients of one call's weight and bias are computed from; rows by features, both."""

    weight: Tensor
    bias: Tensor | None
    rows: Tensor
    gradient: Tensor

    def compute(self) -> None:
        columns, rows = self.gradient.t(), self.rows.to(self.gradient.dtype)
        if self.weight.requires_grad:
            if self.weight.grad is None:
                self.weight.grad = columns.mm(rows).to(self.weight.dtype)
            elif rows.dtype == self.weight.dtype:
                self.weight.grad.addmm_(columns, rows)
            else:  # the user's own autocast is around the call
                self.weight.grad.add_(columns.mm(rows))
        if self.bias is not None and self.bias.requires_grad:
            total = self.gradient.sum(0).to(self.bias.dtype)
            self.bias.grad = total if self.bias.grad is None else self.bias.grad.add_(total)


_left: list[_Left] = []
"""Of the segment whose backward pass ran last; autograd may run it in a thread of its own."""


class _LateLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias  # the leaves themselves: they hold the sums of gradients
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        rows, flat = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        _left.append(_Left(ctx.weight, ctx.bias, rows, flat))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return flat.mm(ctx.weight.to(flat.dtype)).view(x.shape).to(x.dtype), None, None


def late_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `aten.linear`, (.., in) -> (.., out), of leaves whose gradients `compute_late_weights` adds."""
    result: Tensor = _LateLinear.apply(x, weight, bias)
    return result


def compute_late_weights() -> None:
    """Add what the backward pass of the last segment has left undone to its weights' gradients."""
    if _left:
        with torch.no_grad():
            for left in _left:
                left.compute()
        _left.clear()


def forget_late_weights() -> None:
    """Drop what a backward pass that failed has left."""
    _left.clear()


def delay_weights(segments: Sequence[Segment], leaves: Collection[Name], regions: Sequence[Region]) -> None:
    """Let linear layers whose inputs' gradients feed a collective leave their weights for later.

    Args:
        leaves: placeholders of parameters.
        regions: recomputed ones; where the user chose operators to keep, the layers stay as they are.
    """
    for before, segment in pairwise(segments):
        if segment.region is not None and regions[segment.region].spec.save is not None:
            continue
        if any(crossing.collective.moves_backward for crossing in before.crossings):
            _delay(segment, leaves)


def count_delayed(segments: Sequence[Segment]) -> int:
    """Return how many linear layers `delay_weights` has found."""
    return sum(node.target is late_linear for segment in segments for node in segment.module.graph.nodes)


def _delay(segment: Segment, leaves: Collection[Name]) -> None:
    found = [node for node in segment.module.graph.nodes if node.target is aten.linear.default]
    found = [node for node in found if all(_is_leaf(value, leaves) for value in node.args[1:])]
    for node in found:
        node.target = late_linear
    if found:
        segment.module.recompile()


def _is_leaf(value: Any, leaves: Collection[Name]) -> bool:
    return value is None or (isinstance(value, fx.Node) and value.op == "placeholder" and value.name in leaves)
