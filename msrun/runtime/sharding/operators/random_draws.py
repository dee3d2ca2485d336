"""Rule for torch's random operators, whose numbers do not depend on how the work is divided: see `nn.random_draws`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from msrun.runtime.nn.random_bits import Source
from msrun.runtime.nn.random_draws import (
    DRAWS,
    WITHOUT_VALUES,
    arguments_of,
    draw,
    drawn_result,
    shape_of,
)
from msrun.runtime.sharding.operators.dropout import CALL, CutShape, PlainCutShape, batch_dim_of, key_of_part
from msrun.runtime.sharding.operators.elementwise import Elementwise
from msrun.runtime.sharding.operators.rule import Form, LabelSplit, LocalBuilder, OperatorCall, numbers_given

CAPTURED = tuple(operator for operator in DRAWS if not operator._schema.is_mutable)
"""Those that a captured graph holds: what writes has become what returns."""
_BY_NAME = {str(operator): operator for operator in CAPTURED}


class _Drawn(torch.autograd.Function):
    """Random numbers in the place of tensors that they do not depend on: gradients of 0, as torch's operators give."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, *replaced: Tensor) -> Tensor:
        ctx.shapes = [(tensor.shape, tensor.requires_grad) for tensor in replaced]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient.new_zeros(shape) if needs_grad else None for shape, needs_grad in ctx.shapes)


def draw_part(
    given_draw: Tensor,
    place: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    operator: str,
    call: int,
    part: PlainCutShape,
    batch_dim: int | None,
) -> Any:
    """Return this rank's part of what an operator draws; `part` says which part of the whole it has.

    Raises:
        StrategyError: the batch is cut into copies, and nobody knows which rows of it this tensor holds.
    """
    target = _BY_NAME[operator]
    given = arguments_of(target, args, kwargs)
    key, box = (
        key_of_part(given_draw, call, CutShape(*part), batch_dim, operator),
        CutShape(*part).box(numbers_given(place)[0]),
    )
    _, device = shape_of(target, given)
    values = draw(target, given, Source(key, call, box, batch_dim, device))
    result = drawn_result(target, given, values)
    replaced = [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]
    is_replacing = replaced and target not in WITHOUT_VALUES and isinstance(result, Tensor)
    return _Drawn.apply(result, *replaced) if is_replacing and not result.requires_grad else result


class RandomDraw(Elementwise):
    """rand, randn, bernoulli, uniform, exponential, ...: every dimension may be cut; like their inputs', if any."""

    def form(self, call: OperatorCall) -> Form:
        """Return aligned labels; all results of an operator with several have the same."""
        form = super().form(call)
        count = len(call.output_shapes) - 1
        return Form(form.inputs, form.output, form.sizes, others=(form.output,) * count)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Draw this rank's part."""
        if CALL not in call.node.meta:
            return self.local_call(call, build, inputs)
        local = iter(inputs)
        args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), lambda _: next(local))
        return build.call(
            draw_part,
            build.draw(),
            build.place(),
            args,
            kwargs,
            operator=str(call.node.target),
            call=call.node.meta[CALL],
            part=tuple(CutShape.of(form.layout(form.output, split), build.mesh, call.output_shape)),
            batch_dim=batch_dim_of(call.node),
        )


RULES = [(RandomDraw(), list(CAPTURED))]
