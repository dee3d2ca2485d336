"""Rules for sums, means and extremes over dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from msrun.runtime.sharding.operators.ordering import REDUCED, targets
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
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
        given = call.argument("dim")
        dims = [given] if isinstance(given, int) else given
        reduced = {dim % max(1, len(shape)) for dim in dims} if dims else set(range(len(shape)))
        keep = bool(call.argument("keepdim", default=False))
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


RULES = [
    (Reduction(), [aten.sum.default, aten.sum.dim_IntList]),
    (Mean(), [aten.mean.default, aten.mean.dim]),
    (Extreme(), targets(REDUCED)),
]
