"""Rule for scaled_dot_product_attention: samples and heads are cut freely, keys and their length stay whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from msrun.runtime.nn.dropout import attend
from msrun.runtime.nn.random_bits import keep_mask
from msrun.runtime.sharding.operators.dropout import CALL, CutShape, PlainCutShape, batch_dim_of, key_of_part
from msrun.runtime.sharding.operators.rule import (
    Form,
    Labels,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    numbers_given,
    sizes_of,
)

aten = torch.ops.aten


class Attention(Rule):
    """y[b.., h, l, v] = sum_s softmax_s(q[b.., h, l, e] k[b.., h, s, e]) v[b.., h, s, v].

    Queries (l) may be cut when the attention is not causal, values (v) always. With grouped queries (enable_gqa) the
    number of key heads is what heads can be cut into, so that every query head lies with its key head.
    """

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels: batch dimensions, h, l, s, e, v."""
        query, key, value, *mask = call.shapes
        count = len(call.output_shape) - 2
        batch = dimension_labels("b", count)
        sizes = sizes_of((batch, call.output_shape[:-2]), (("l", "e"), query[-2:]), (("s", "v"), value[-2:]))
        heads = (query[-3], key[-3]) if call.argument("enable_gqa", default=False) and count else (1, 1)
        if heads[1] not in (1, heads[0]):
            sizes[batch[-1]] = heads[1]

        def labels(shape: tuple[int, ...], tail: tuple[str, str]) -> Labels:
            offset = count - (len(shape) - 2)
            head = (
                batch[offset + i] if size > 1 or sizes[batch[offset + i]] == 1 else None
                for i, size in enumerate(shape[:-2])
            )
            return (*head, *tail)

        inputs = [labels(query, ("l", "e")), labels(key, ("s", "e")), labels(value, ("s", "v"))]
        if mask:
            full = (*batch, "l", "s")
            offset = len(full) - len(mask[0])
            inputs.append(tuple(full[offset + i] if size > 1 else None for i, size in enumerate(mask[0])))
        is_causal = bool(call.argument("is_causal", default=False))
        whole = frozenset({"s", "e", "l"} if is_causal else {"s", "e"})
        return Form(tuple(inputs), (*batch, "l", "v"), sizes, whole)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Run torch's own attention on the local part; with dropout the composed one, with masks of its own."""
        p = call.argument("dropout_p", 0.0)
        if p == 0:
            return self.local_call(call, build, inputs)
        shape = (*call.output_shape[:-1], call.shapes[1][-2])
        part = CutShape.of(form.layout((*form.output[:-1], None), split), build.mesh, shape)
        words = {name: call.argument(name) for name in ("is_causal", "scale", "enable_gqa")}
        return build.call(
            attend_part,
            *inputs[:3],
            inputs[3] if len(inputs) > 3 else None,
            build.draw(),
            build.place(),
            call=call.node.meta[CALL],
            p=p,
            part=tuple(part),
            batch_dim=batch_dim_of(call.tensors[0]),
            **words,
        )


def attend_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    draw: Tensor,
    place: Tensor,
    *,
    call: int,
    p: float,
    part: PlainCutShape,
    batch_dim: int | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return this rank's part of attention with dropout; `part` says which part of all weights it has."""
    cut = CutShape(*part)
    numbers, box = key_of_part(draw, call, cut, batch_dim, "dropout"), cut.box(numbers_given(place)[0])

    def keep(rows: slice) -> Tensor:
        return keep_mask(numbers, call, p, box.narrow(-2, rows), batch_dim, query.device)

    return attend(query, key, value, attn_mask, p, is_causal, scale, enable_gqa, keep)


RULES = [(Attention(), [aten.scaled_dot_product_attention.default])]
