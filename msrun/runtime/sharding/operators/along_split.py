"""Rules for softmax, log_softmax and logsumexp along a dimension that may be cut (MindSpore keeps it whole).

The largest values of all parts are gathered (one value per row and part), sums of exponentials are all-reduced: two
numbers per row travel instead of the row. The maximum is only there to keep exponentials small and has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.reduction import Reduction
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    sizes_of,
)

aten = torch.ops.aten


def largest(value: Tensor, dims: list[int]) -> Tensor:
    """Return the largest values along `dims`, which become 1; 0 where all are -inf, so that it can be taken off."""
    found = value.detach().amax(dims, keepdim=True)
    return found.masked_fill(found == -torch.inf, 0)


def take_off(value: Tensor, largest_of_parts: Tensor, dim: int) -> Tensor:
    """Return the value less the largest of all parts, which stand side by side in `dim`."""
    return value - largest_of_parts.detach().amax(dim, keepdim=True)


def shifted(value: fx.Node, dims: list[int], axes: Axes, build: LocalBuilder) -> tuple[fx.Node, fx.Node]:
    """Return a value less the largest along `dims` of all parts, and these largest: no exponential overflows then.

    Args:
        dims: counted from 0; the parts of one or more of them lie along `axes`.
    """
    local = build.call(largest, value, dims)
    everywhere = build.collective(Collective("gather", axes, dims[0]), local)
    return build.call(take_off, value, everywhere, dims[0]), everywhere


def sum_of_exponentials(value: fx.Node, dims: list[int], axes: Axes, build: LocalBuilder) -> fx.Node:
    """Return the sum of exp(value) along `dims` over all parts; `dims` become 1."""
    exponentials = build.call(aten.exp.default, value)
    return build.sum_over(build.call(aten.sum.dim_IntList, exponentials, dims, keepdim=True), axes)


class Softmax(Rule):
    """softmax and log_softmax: every dimension may be cut."""

    follows = True

    def __init__(self, is_log: bool) -> None:
        self._is_log = is_log

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels."""
        labels = dimension_labels("d", len(call.shapes[0]))
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Normalise by the sum over all parts."""
        dim = call.argument("dim", -1) % max(1, len(form.output))
        axes = split.get(f"d{dim}", ())
        if not axes:
            return self.local_call(call, build, inputs)
        (value,) = inputs
        if (dtype := call.argument("dtype")) is not None:
            value = build.call(aten.to.dtype, value, dtype)
        value, _ = shifted(value, [dim], axes, build)
        # every part is divided by the sum: its gradient is a sum over the parts
        total = build.collective(Collective("enter", axes), sum_of_exponentials(value, [dim], axes, build))
        if self._is_log:
            return build.call(aten.sub.Tensor, value, build.call(aten.log.default, total))
        return build.call(aten.div.Tensor, build.call(aten.exp.default, value), total)


def add_largest(log_of_sum: Tensor, largest_of_parts: Tensor, dim: int, dims: list[int], keepdim: bool) -> Tensor:
    """Return the logarithm with the largest value put back, without `dims` unless they are kept."""
    whole = log_of_sum + largest_of_parts.detach().amax(dim, keepdim=True)
    return whole if keepdim else whole.squeeze(dims)


class LogSumExp(Reduction):
    """logsumexp: the reduced dimensions may be cut."""

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Add up exponentials over all parts."""
        labels = form.inputs[0]
        dims = [i for i, label in enumerate(labels) if label not in form.output]
        axes = tuple(sorted(axis for i in dims for axis in split.get(labels[i] or "", ())))
        if not axes:
            return self.local_call(call, build, inputs)
        value, everywhere = shifted(inputs[0], dims, axes, build)
        logarithm = build.call(aten.log.default, sum_of_exponentials(value, dims, axes, build))
        keepdim = bool(call.argument("keepdim", default=False))
        return build.call(add_largest, logarithm, everywhere, dims[0], dims, keepdim)


RULES = [
    (LogSumExp(), [aten.logsumexp.default]),
    (Softmax(is_log=False), [aten.softmax.int, aten._softmax.default]),
    (Softmax(is_log=True), [aten.log_softmax.int, aten._log_softmax.default]),
]
