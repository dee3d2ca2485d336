"""Rules for operators that compare along one dimension: topk, sort, argmax, max with its place, cumulative ones."""

from __future__ import annotations

import torch

from msrun.runtime.sharding.operators.rule import Form, Labels, OperatorCall, Rule, dimension_labels, sizes_of

aten = torch.ops.aten

REDUCED = """
amax.default amin.default max.default min.default prod.default prod.dim_int any.default any.dim any.dims all.default
all.dim all.dims var.default var.dim var.correction std.default std.dim std.correction linalg_vector_norm.default
norm.Scalar norm.ScalarOpt_dim
""".split()  # noqa: SIM905 - quotes would hide the names
"""The reduced dimensions stay whole."""
REMOVED = "max.dim min.dim median.dim nanmedian.dim mode.default kthvalue.default argmax.default argmin.default".split()  # noqa: SIM905
"""The dimension is gone afterwards, unless keepdim."""
KEPT = "topk.default sort.default sort.stable argsort.default argsort.stable cummax.default cummin.default".split()  # noqa: SIM905
MOMENTS = "var_mean.default var_mean.dim var_mean.correction std_mean.default std_mean.dim std_mean.correction".split()  # noqa: SIM905


class AlongOne(Rule):
    """One or two results; the dimension stays whole (as MindSpore's TopK and Sort), the others are free."""

    follows = True

    def __init__(self, keeps: bool, default_dim: int | None = None) -> None:
        self._keeps = keeps
        self._default_dim = default_dim

    def form(self, call: OperatorCall) -> Form:
        """Return labels without that dimension's."""
        shape = call.shapes[0]
        given = call.argument("dim", self._default_dim)
        given = self._default_dim if given is None else given
        dims = set(range(len(shape))) if given is None else {given} if isinstance(given, int) else set(given)
        changed = {dim % max(1, len(shape)) for dim in dims} or set(range(len(shape)))
        labels: Labels = tuple(
            None if i in changed else label for i, label in enumerate(dimension_labels("d", len(shape)))
        )
        keeps = self._keeps or bool(call.argument("keepdim", default=False))
        output = labels if keeps else tuple(label for i, label in enumerate(labels) if i not in changed)
        return Form((labels,), output, sizes_of((labels, shape)), others=(output,) * (len(call.output_shapes) - 1))


def targets(names: list[str]) -> list[torch._ops.OpOverload]:
    """Return the overloads with these names that this torch has."""
    found = []
    for name in names:
        packet, overload = name.split(".")
        if overload in getattr(aten, packet).overloads():
            found.append(getattr(getattr(aten, packet), overload))
    return found


RULES = [
    (AlongOne(keeps=True, default_dim=-1), targets(KEPT)),
    (AlongOne(keeps=False), targets(REMOVED)),
    (AlongOne(keeps=False), targets(MOMENTS)),
]
