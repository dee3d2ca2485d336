"""Rule for operators that work value by value, with broadcasting."""

from __future__ import annotations

from typing import Any

import torch

from msrun.runtime.sharding.operators.rule import Form, OperatorCall, Rule, aligned, dimension_labels, sizes_of

aten = torch.ops.aten

UNTAGGED = """
hardswish rsub true_divide floor_divide where masked_fill __and__ __or__ __xor__
to _to_copy contiguous detach alias zeros_like ones_like full_like empty_like type_as
""".split()  # noqa: SIM905 - quotes would hide the names
"""Operators of aten that torch does not tag as pointwise, or not in every overload."""


class Elementwise(Rule):
    """Output dimension i comes from dimension i of every input, aligned at the right; a size of 1 is broadcast."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return aligned labels; broadcast dimensions have none."""
        shape = call.output_shape
        output = dimension_labels("d", len(shape))
        inputs = tuple(aligned(output, shape, given) for given in call.shapes)
        return Form(inputs, output, sizes_of((output, shape)))


def is_elementwise(target: Any) -> bool:
    """Return whether an operator works value by value and returns one new tensor."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns, (namespace, name) = target._schema.returns, target._schema.name.split("::")
    is_named = torch.Tag.pointwise in target.tags or (namespace == "aten" and name in UNTAGGED)
    return is_named and not target._schema.is_mutable and len(returns) == 1 and str(returns[0].type) == "Tensor"


VALUE_BY_VALUE = Elementwise()
RULES = [
    (
        VALUE_BY_VALUE,
        [
            aten.expand_as.default,
            aten.lift_fresh_copy.default,
            aten.copy.default,
            aten.fill.Scalar,
            aten.fill.Tensor,
            aten.zero.default,
        ],
    )
]
