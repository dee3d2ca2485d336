"""Rule for scaled_dot_product_attention: samples and heads are cut freely; so is the sequence of self attention.

A cut sequence is attended to in one of two ways. All-to-all (Ulysses: Jacobs et al., 2023): the ranks exchange rows for
heads, attend to the whole sequence with some of the heads, and exchange back; it moves least, and needs as many heads
as the sequence has parts. Ring: see `ring_attention`; for any number of heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from msrun.errors import StrategyError
from msrun.runtime.nn.dropout import attend
from msrun.runtime.nn.random_bits import keep_mask
from msrun.runtime.sharding.collective import Collective, Ring
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.dropout import CALL, CutShape, PlainCutShape, batch_dim_of, key_of_part
from msrun.runtime.sharding.operators.ring_attention import RING, ULYSSES, ring_attention
from msrun.runtime.sharding.operators.rule import (
    INSIDE,
    Form,
    Labels,
    LabelSplit,
    Limit,
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

    Values (v) may always be cut. With grouped queries (enable_gqa) the number of key heads is what heads can be cut
    into, so that every query head lies with its key head. Queries as many as keys, without dropout, are one sequence:
    l stands for s too. Others (l) may be cut when the attention is not causal.
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

        is_one = self._is_one_sequence(call)
        length = "l" if is_one else "s"
        inputs = [labels(query, ("l", "e")), labels(key, (length, "e")), labels(value, (length, "v"))]
        if mask:
            full = (*batch, "l", None if is_one else "s")
            offset = len(full) - len(mask[0])
            inputs.append(tuple(full[offset + i] if size > 1 else None for i, size in enumerate(mask[0])))
        is_causal = bool(call.argument("is_causal", default=False))
        if is_one:
            del sizes["s"]
            ways = (RING,) if self._is_mask_of_heads_alone(inputs) else (RING, ULYSSES)
            sizes |= dict.fromkeys(ways, sizes["l"])
            of_heads = Limit(lambda parts: sizes[batch[-1]] % parts == 0, f"and {sizes[batch[-1]]} heads to exchange")
            whole, limits = frozenset({"e"}), {ULYSSES: of_heads}
            return Form(tuple(inputs), (*batch, "l", "v"), sizes, whole, limits=limits, ways=dict.fromkeys(ways, "l"))
        whole = frozenset({"s", "e", "l"} if is_causal else {"s", "e"})
        return Form(tuple(inputs), (*batch, "l", "v"), sizes, whole)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Run torch's own attention on the local part; with dropout the composed one, with masks of its own."""
        p = call.argument("dropout_p", 0.0)
        way = next((way for way in (*form.ways, "l") if split.get(way)), "") if form.ways else ""
        if way:
            axes = split[way]
            can_exchange = self._can_exchange(form, split, build.mesh, axes)
            if way == ULYSSES and not can_exchange:
                raise StrategyError(
                    f"{call.operator} in module {call.module_path or '(top)'}: {build.mesh.extent(axes)} ranks cannot "
                    "share out the heads that each has; cut the heads into fewer parts, or use ring"
                )
            if can_exchange and way != RING:
                return self._by_heads(call, form, build, inputs, axes)
            return self._in_ring(call, form, build, inputs, split, axes)
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

    @staticmethod
    def _is_one_sequence(call: OperatorCall) -> bool:
        query, key, value = call.shapes[:3]
        is_alike = len(query) > 2 and query[:-3] == key[:-3] == value[:-3] and key[-3] == value[-3]
        heads = query[-3] == key[-3] or call.argument("enable_gqa", default=False)
        return bool(is_alike and heads and query[-2] == key[-2] and call.argument("dropout_p", 0.0) == 0)

    @staticmethod
    def _is_mask_of_heads_alone(inputs: Sequence[Labels]) -> bool:
        """Return whether a mask has rows for heads, but none for queries: nothing to exchange these for."""
        mask = inputs[3][-3:] if len(inputs) > 3 else ()
        return len(mask) == 3 and mask[0] is not None and mask[1] is None

    @staticmethod
    def _can_exchange(form: Form, split: LabelSplit, mesh: Mesh, axes: Axes) -> bool:
        """Return whether every rank gets some heads whole."""
        head = form.output[-3]
        assert head is not None
        own = form.sizes[head] // mesh.extent(split.get(head, ()))
        return ULYSSES in form.ways and own % mesh.extent(axes) == 0

    def _by_heads(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], axes: Axes
    ) -> fx.Node:
        """Exchange rows for heads, attend, and exchange back."""
        whole = []
        for value, labels in zip(inputs, form.inputs, strict=True):
            dims = len(labels)
            if labels[-2] is None:
                whole.append(value)
            elif dims > 2 and labels[-3] is not None:
                whole.append(build.collective(Collective("exchange", axes, dims - 3, dims - 2), value))
            else:  # what all heads read
                whole.append(build.collective(Collective("gather_enter", axes, dims - 2), value))
        dims = len(form.output)
        result = self.local_call(call, build, whole)
        return build.collective(Collective("exchange", axes, dims - 2, dims - 3), result)

    def _in_ring(
        self,
        call: OperatorCall,
        form: Form,
        build: LocalBuilder,
        inputs: Sequence[fx.Node],
        split: LabelSplit,
        axes: Axes,
    ) -> fx.Node:
        query, key, value, *mask = inputs
        (heads, rows, width), (key_heads, _, value_width) = (
            form.layout_of_input(index, split, build.mesh).local_shape(build.mesh, call.shapes[index])[-3:]
            for index in (0, 2)
        )
        is_causal = bool(call.argument("is_causal", default=False))
        is_balanced = is_causal and rows % 2 == 0
        result = build.call(
            ring_attention,
            build.call(aten.cat.default, [key, value], -1),
            query,
            mask[0] if mask else None,
            build.place(),
            width=width,
            is_causal=is_causal,
            is_balanced=is_balanced,
            scale=call.argument("scale"),
            mesh_shape=build.mesh.shape,
            first_rank=build.mesh.first_rank,
            axes=axes,
        )
        ring = Ring(heads, width, key_heads, value_width, is_balanced)
        result.meta[INSIDE] = Collective("ring", axes, len(form.output) - 2, ring=ring)
        return result


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
