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
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    Rules,
    dimension_labels,
    free_labels,
    sizes_of,
    summed_axes,
)

aten = torch.ops.aten


class Reduction(Rule):
    """sum: split reduced dimensions leave partial sums."""

    follows = True
    scatters = True
    can_split_reduced = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels; reduced ones are missing in the output, or size 1 without a label when kept."""
        shape = call.shapes[0]
        labels = dimension_labels("d", len(shape))
        reduced = call.dimensions()
        keep = bool(call.argument("keepdim"))
        output = tuple(None if i in reduced else label for i, label in enumerate(labels) if keep or i not in reduced)
        whole = frozenset[str]() if self.can_split_reduced else frozenset(labels[i] for i in reduced)
        return Form((labels,), output, sizes_of((labels, shape)), whole)


class Mean(Reduction):
    """mean: the mean of equal parts' means, added up after dividing by the number of parts."""

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Scale the local mean, then all-reduce."""
        axes = summed_axes(form, split)
        local = self.local_call(call, build, inputs)
        if axes:
            local = build.call(aten.div.Scalar, local, build.mesh.extent(axes))
        return build.sum_over(local, axes)


class Extreme(Reduction):
    """amax, amin, prod, var, std, norm, all, any: the reduced dimensions stay whole."""

    can_split_reduced = False


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
        self, call: OperatorCall, _form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Normalise by the sum over all parts."""
        dim = call.dimension()
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
        keepdim = bool(call.argument("keepdim"))
        return build.call(add_largest, logarithm, everywhere, dims[0], dims, keepdim)


RULES: Rules = [
    (LogSumExp(), [aten.logsumexp.default]),
    (Softmax(is_log=False), [aten.softmax.int, aten._softmax.default]),
    (Softmax(is_log=True), [aten.log_softmax.int, aten._log_softmax.default]),
]


REDUCED = """
amax.default amin.default max.default min.default prod.default prod.dim_int any.default any.dim any.dims all.default
all.dim all.dims var.default var.dim var.correction std.default std.dim std.correction linalg_vector_norm.default
norm.Scalar norm.ScalarOpt_dim
""".split()  # noqa: SIM905 - quotes would hide the names
"""The reduced dimensions stay whole."""
REMOVED = """
max.dim min.dim median.dim nanmedian.dim mode.default kthvalue.default argmax.default argmin.default select.int
unbind.int
""".split()  # noqa: SIM905
"""The dimension is gone afterwards, unless keepdim."""
KEPT = """
topk.default sort.default sort.stable argsort.default argsort.stable cummax.default cummin.default glu.default
chunk.default unsafe_chunk.default split.Tensor split.sizes split_with_sizes.default unsafe_split.Tensor
tensor_split.sections tensor_split.indices
""".split()  # noqa: SIM905
MOMENTS = "var_mean.default var_mean.dim var_mean.correction std_mean.default std_mean.dim std_mean.correction".split()  # noqa: SIM905


class AlongSome(Rule):
    """Results that lose some dimensions or have others there: these stay whole (as MindSpore's TopK and Sort), the
    rest is free."""

    follows = True

    def __init__(self, keeps: bool) -> None:
        """`keeps`: the results have as many dimensions, whatever `keepdim` says."""
        self._keeps = keeps

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels for all inputs and all results, without those dimensions'."""
        shape, changed = call.shapes[0], self.changed(call)
        labels = free_labels(len(shape), changed)
        keeps = self._keeps or bool(call.argument("keepdim"))
        output = labels if keeps else tuple(label for i, label in enumerate(labels) if i not in changed)
        others = (output,) * (len(call.output_shapes) - 1)
        return Form((labels,) * len(call.shapes), output, sizes_of((labels, shape)), others=others)

    def changed(self, call: OperatorCall) -> set[int]:
        """Return these dimensions."""
        return call.dimensions("dim" if call.argument("dims") is None else "dims")


def targets(names: list[str]) -> list[torch._ops.OpOverload]:
    """Return the overloads with these names that this torch has."""
    found = []
    for name in names:
        packet, overload = name.split(".")
        if overload in getattr(aten, packet).overloads():
            found.append(getattr(getattr(aten, packet), overload))
    return found


RULES += [
    (AlongSome(keeps=True), targets(KEPT)),
    (AlongSome(keeps=False), targets(REMOVED + MOMENTS)),
]
RULES += [
    (Reduction(), [aten.sum.default, aten.sum.dim_IntList]),
    (Mean(), [aten.mean.default, aten.mean.dim]),
    (Extreme(), targets(REDUCED)),
]
