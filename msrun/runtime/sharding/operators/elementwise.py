"""Rule for operators that work value by value, with broadcasting."""

from __future__ import annotations

import torch

from msrun.runtime.sharding.operators.rule import Form, Labels, OperatorCall, Rule, dimension_labels, sizes_of

aten = torch.ops.aten

NAMES = """
relu gelu silu sigmoid tanh leaky_relu elu softplus hardtanh hardswish hardsigmoid relu6 selu celu mish logsigmoid
abs neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sin cos tan erf erfc floor ceil round trunc
sign sgn logical_not bitwise_not isnan isinf isfinite clamp clamp_min clamp_max nan_to_num threshold
add sub rsub mul div true_divide pow maximum minimum fmod remainder atan2 lerp addcmul addcdiv where
eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor masked_fill
to _to_copy clone contiguous detach alias zeros_like ones_like full_like empty_like type_as positive
""".split()  # noqa: SIM905 - a hundred quotes would hide the names


class Elementwise(Rule):
    """Output dimension i comes from dimension i of every input, aligned at the right; a size of 1 is broadcast."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return aligned labels; broadcast dimensions have none."""
        shape = call.output_shape
        output = dimension_labels("d", len(shape))
        inputs = tuple(self._aligned(output, shape, given) for given in call.shapes)
        return Form(inputs, output, sizes_of((output, shape)))

    @staticmethod
    def _aligned(output: Labels, shape: tuple[int, ...], given: tuple[int, ...]) -> Labels:
        offset = len(shape) - len(given)
        return tuple(output[offset + i] if size == shape[offset + i] else None for i, size in enumerate(given))


def targets() -> list[torch._ops.OpOverload]:
    """Return every overload of the elementwise operators that returns one new tensor."""
    found = []
    for name in NAMES:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            operator = getattr(packet, overload)
            returns = operator._schema.returns
            if not operator._schema.is_mutable and len(returns) == 1 and str(returns[0].type) == "Tensor":
                found.append(operator)
    return found


RULES = [
    (
        Elementwise(),
        [
            *targets(),
            aten.expand_as.default,
            aten.lift_fresh_copy.default,
            aten.copy.default,
            aten.fill.Scalar,
            aten.fill.Tensor,
            aten.zero.default,
        ],
    )
]
