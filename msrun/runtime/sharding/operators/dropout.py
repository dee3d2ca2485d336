"""Rule for dropout, whose masks do not depend on how the work is divided; the numbers of all draws, and refusals.

The mask of an element follows from (seed, step, number of the call in the network, place in the whole tensor), see
`nn.random_bits`: ranks that hold copies have equal masks, parts have disjoint parts of one process' mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from msrun.errors import CaptureError, StrategyError
from msrun.runtime.nn.random_calls import Kind, drop, mask_shape
from msrun.runtime.nn.random_draws import (
    DRAWS,
    WITHOUT_VALUES,
    arguments_of,
    draw,
    drawn_result,
    is_drawn,
    shape_of,
)
from msrun.runtime.nn.random_stream import Box, DrawKey, Source, keep_mask
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.operators.elementwise import Elementwise
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rules,
    numbers_given,
    operator_call,
    user_line,
)

aten = torch.ops.aten
CALL = "dropout_call"
"""node.meta: number of the call in the order of the network."""
BATCH_DIM = "batch_dim"
"""node.meta: the dimension whose outermost index is the row of the batch; None: there is none; LOST: nobody knows."""
LOST = -1

KINDS: dict[torch._ops.OpOverload, Kind] = {
    aten.dropout.default: "dropout",
    aten.feature_dropout.default: "feature_dropout",
    aten.alpha_dropout.default: "alpha_dropout",
    aten.feature_alpha_dropout.default: "feature_alpha_dropout",
}


def number_dropouts(graph: fx.Graph) -> None:
    """Give every operator that draws random numbers its number, before the graph is divided in any way."""
    count = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _drops(node) or _draws(node):
            node.meta[CALL] = count
            count += 1
        elif node.target not in KINDS and node.target is not aten.scaled_dot_product_attention.default:
            refuse_random(node)


def _drops(node: fx.Node) -> bool:
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(operator_call(node).argument("dropout_p"))
    if node.target not in KINDS:
        return False
    call = operator_call(node)
    return bool(call.argument("train") and call.argument("p") > 0)


def _draws(node: fx.Node) -> bool:
    return node.target in DRAWS and is_drawn(node.target, arguments_of(node.target, node.args, node.kwargs))


def batch_dim_of(node: fx.Node) -> int | None:
    """Return the dimension of a captured value that holds the batch's rows, if known."""
    found: int | None = node.meta.get(BATCH_DIM, LOST)
    return found


PlainCutShape = tuple[tuple[int, ...], tuple[int, ...], tuple[Axes, ...]]
"""A `CutShape` as the arguments of a graph's operator hold it."""


class CutShape(NamedTuple):
    """The shape of a tensor and how the mesh cuts it, as plain tuples that a graph can hold."""

    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    split: tuple[Axes, ...]

    @classmethod
    def of(cls, layout: TensorLayout, mesh: Mesh, shape: Sequence[int]) -> CutShape:
        """Return the part that a layout gives."""
        return cls(mesh.shape, tuple(shape), layout.split)

    def box(self, global_rank: int) -> Box:
        """Return a rank's part."""
        slices = TensorLayout(self.split).slices(Mesh(self.mesh_shape), self.shape, global_rank)
        return Box(self.shape, tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))


def key_of_part(draw: Tensor, call: int, part: CutShape, batch_dim: int | None, operator: str) -> DrawKey:
    """Return the key of the random numbers of one draw."""
    key = DrawKey(*numbers_given(draw))
    if batch_dim == LOST and key.count > 1:
        raise StrategyError(
            f"{operator} (random draw {call} of the network) works on a tensor of shape {part.shape} whose rows of the "
            f"batch are not known, so {key.count} copies of the batch cannot have the numbers of one: draw before the "
            "batch is mixed, with the rows of the batch in dimension 0, or use one copy"
        )
    return key


def part_mask(
    draw: Tensor, place: Tensor, call: int, p: float, part: CutShape, batch_dim: int | None, device: torch.device
) -> Tensor:
    """Return this rank's part of a mask."""
    key = key_of_part(draw, call, part, batch_dim, "dropout")
    return keep_mask(key, call, p, part.box(numbers_given(place)[0]), batch_dim, device)


def drop_part(
    value: Tensor,
    draw: Tensor,
    place: Tensor,
    *,
    call: int,
    p: float,
    kind: Kind,
    part: PlainCutShape,
    batch_dim: int | None,
) -> Tensor:
    """Return this rank's part of a dropout; `part` says which part of the whole mask it has."""
    return drop(value, part_mask(draw, place, call, p, CutShape(*part), batch_dim, value.device), p, kind)


class Dropout(Elementwise):
    """dropout, feature dropout (dropout1d to 3d), alpha dropout: every dimension may be cut."""

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Drop by this rank's part of the mask."""
        if CALL not in call.node.meta:
            return self.local_call(call, build, inputs)
        kind = KINDS[call.node.target]  # type: ignore[index]
        shape = mask_shape(kind, call.output_shape)
        kept = tuple(label if size > 1 else None for label, size in zip(form.output, shape, strict=True))
        return build.call(
            drop_part,
            inputs[0],
            build.draw(),
            build.place(),
            call=call.node.meta[CALL],
            p=call.argument("p"),
            kind=kind,
            part=tuple(CutShape.of(form.layout(kept, split), build.mesh, shape)),
            batch_dim=batch_dim_of(call.tensors[0]),
        )


def refuse_random(node: fx.Node) -> None:
    """Refuse an operator that draws random numbers which are not ours to give: they would differ from rank to rank."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return
    call = operator_call(node)
    where = f"{node.target} in module {call.module_path or '(top)'}"
    is_training = call.argument("train", call.argument("training", default=True))
    if is_training and call.argument("dropout") != 0:  # of recurrent layers
        raise CaptureError(
            f"{where} draws random numbers, which would not be those of one process: pass them in as an input, make "
            "them of torch.rand, randn or bernoulli, "
            'or use parallel_mode="data_parallel", which needs no capture, where the loss is a mean over rows',
            where=user_line(node),
        )


RULES: Rules = [(Dropout(), list(KINDS))]


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
    """Return this rank's part of what an operator draws; `part` says which part of the whole it has."""
    target = _BY_NAME[operator]
    given = arguments_of(target, args, kwargs)
    key, box = (
        key_of_part(given_draw, call, CutShape(*part), batch_dim, operator),
        CutShape(*part).box(numbers_given(place)[0]),
    )
    _, device = shape_of(target, given)
    values = draw(target, given, Source(key, call, box, batch_dim, device))
    result = drawn_result(target, given, values)
    if target in WITHOUT_VALUES or not isinstance(result, Tensor) or result.requires_grad:
        return result
    return _Drawn.apply(result, *(value for value in given.values() if isinstance(value, Tensor)))


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


RULES += [(RandomDraw(), list(CAPTURED))]
