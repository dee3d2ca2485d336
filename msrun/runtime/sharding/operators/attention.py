"""Rule for scaled_dot_product_attention: samples and heads are cut freely; so is the sequence of self attention.

A cut sequence is attended to in one of two ways. All-to-all (Ulysses: Jacobs et al., 2023): the ranks exchange rows for
heads, attend to the whole sequence with some of the heads, and exchange back; it moves least, and needs as many heads
as the sequence has parts. Ring: see `ring_attention`; for any number of heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from msrun.errors import StrategyError
from msrun.runtime.nn.random_calls import attend
from msrun.runtime.nn.random_stream import keep_mask
from msrun.runtime.sharding.collective import Collective, Ring
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators import rows as row_exchange
from msrun.runtime.sharding.operators.dropout import CALL, CutShape, PlainCutShape, batch_dim_of, key_of_part
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
        if count and call.argument("enable_gqa") and key[-3] not in (1, query[-3]):
            sizes[batch[-1]] = key[-3]

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
        is_causal = bool(call.argument("is_causal"))
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
        p = call.argument("dropout_p")
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
        heads = query[-3] == key[-3] or call.argument("enable_gqa")
        return bool(is_alike and heads and query[-2] == key[-2] and call.argument("dropout_p") == 0)

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
        is_causal = bool(call.argument("is_causal"))
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


RING, ULYSSES = "ring", "ulysses"
"""The ways to attend to a sequence that is cut."""


def ring_attention(
    keys_values: Tensor,
    query: Tensor,
    mask: Tensor | None,
    place: Tensor,
    *,
    width: int,
    is_causal: bool,
    is_balanced: bool,
    scale: float | None,
    mesh_shape: tuple[int, ...],
    first_rank: int,
    axes: Axes,
) -> Tensor:
    """Return this rank's rows of attention, as an operator of a local graph.

    Args:
        keys_values: (.., key heads, s, width + value width), this rank's rows.
        query: (.., heads, s, width).
        mask: (.., s or 1, whole length or 1): bool, or added to the scores.
        width: of a key.
        is_balanced: rows are exchanged first, so that causal work is the same on all ranks; for even parts.
        axes: those that cut the sequence.
    """
    mesh = Mesh(tuple(mesh_shape), first_rank)
    own = _Place(mesh, tuple(axes), first_rank + numbers_given(place)[0])
    scale = 1 / math.sqrt(width) if scale is None else scale
    result: Tensor = _Attend.apply(keys_values, query, mask, own, width, is_causal, is_balanced, scale)
    return result


@dataclass(frozen=True)
class _Place:
    """Where this rank stands in the ring."""

    mesh: Mesh
    axes: Axes
    rank: int

    @property
    def count(self) -> int:
        return self.mesh.extent(self.axes)

    @property
    def index(self) -> int:
        return self.mesh.index(self.rank, self.axes)

    def pass_on(self, value: Tensor) -> row_exchange.Arriving:
        """Send a value to the next rank, and get that of the one before."""
        sent, received = [0] * self.count, [0] * self.count
        sent[(self.index + 1) % self.count] = received[(self.index - 1) % self.count] = value.numel()
        return _Shaped(
            row_exchange.carrier.start(value.reshape(-1), sent, received, self.mesh, self.axes, RING), value.shape
        )

    def balance(self, value: Tensor, *, back: bool = False) -> Tensor:
        """Exchange rows (dimension -2): of pieces 2r and 2r + 1 for pieces r and 2n - 1 - r, or the way back."""
        count, own = self.count, self.index
        first, second = value.movedim(-2, 0).chunk(2)
        piece = first.shape[0]
        neighbours, mirrored = (2 * own, 2 * own + 1), (own, 2 * count - 1 - own)
        holder = [min(p, 2 * count - 1 - p) for p in neighbours]
        sent, received = [0] * count, [0] * count
        for rank in holder if not back else [p // 2 for p in mirrored]:
            sent[rank] += piece
        for rank in [p // 2 for p in mirrored] if not back else holder:
            received[rank] += piece
        is_swapped = holder[0] > holder[1]  # pieces travel in the order of ranks
        rows = torch.cat([second, first] if is_swapped and not back else [first, second])
        got = row_exchange.carrier.start(rows, sent, received, self.mesh, self.axes, RING).wait()
        if is_swapped and back:
            got = torch.cat([*reversed(got.chunk(2))])
        return got.movedim(0, -2).contiguous()


@dataclass
class _Shaped:
    arriving: row_exchange.Arriving
    shape: torch.Size

    def wait(self) -> Tensor:
        """Return it."""
        return self.arriving.wait().view(self.shape)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        keys_values: Tensor,
        query: Tensor,
        mask: Tensor | None,
        place: _Place,
        width: int,
        is_causal: bool,
        is_balanced: bool,
        scale: float,
    ) -> Tensor:
        keys_values = keys_values.contiguous()
        value_width = keys_values.shape[-1] - width
        shape = (*query.shape[:-1], value_width)
        if isinstance(query, FakeTensor):
            result, lse = query.new_empty(shape), query.new_empty(query.shape[:-1], dtype=_wide(query.dtype))
        else:
            _count(place, keys_values, query, width, is_balanced=is_balanced, is_gradient=False)
            if is_balanced:
                keys_values, query = place.balance(keys_values), place.balance(query)
            result, lse = _forward(_Blocks(keys_values, query, mask, place, width, is_causal, is_balanced, scale))
            result = result.reshape(shape)
            if is_balanced:
                result = place.balance(result, back=True)
        ctx.save_for_backward(keys_values, query, mask, result, lse)
        ctx.settings = place, width, is_causal, is_balanced, scale
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        keys_values, query, mask, result, lse = ctx.saved_tensors
        place, width, is_causal, is_balanced, scale = ctx.settings
        others = (None,) * 5
        if isinstance(query, FakeTensor):
            of_mask = torch.empty_like(mask) if ctx.needs_input_grad[2] else None
            return torch.empty_like(keys_values), torch.empty_like(query), of_mask, *others
        _count(place, keys_values, query, width, is_balanced=is_balanced, is_gradient=True)
        delta = (gradient.to(lse.dtype) * result).sum(-1, keepdim=True)
        if is_balanced:
            gradient, delta = place.balance(gradient), place.balance(delta)
        blocks = _Blocks(keys_values, query, mask, place, width, is_causal, is_balanced, scale)
        of_keys, of_query, of_mask = _backward(blocks, gradient, delta, lse, mask if ctx.needs_input_grad[2] else None)
        of_keys, of_query = of_keys.to(keys_values.dtype), of_query.reshape(query.shape).to(query.dtype)
        if is_balanced:
            of_keys, of_query = place.balance(of_keys, back=True), place.balance(of_query, back=True)
        return of_keys, of_query, of_mask, *others


def _count(
    place: _Place, keys_values: Tensor, query: Tensor, width: int, *, is_balanced: bool, is_gradient: bool
) -> None:
    key_heads, value_width = keys_values.shape[-3], keys_values.shape[-1] - width
    ring = Ring(query.shape[-3], width, key_heads, value_width, is_balanced)
    wide = max(1, 4 // keys_values.element_size())
    sent = ring.elements(keys_values.numel(), place.count, is_gradient=is_gradient, gradient_bytes=wide)
    row_exchange.carrier.count(RING, sent * keys_values.element_size())


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums are made."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass
class _Blocks:
    """This rank's queries, and the keys and values that come by."""

    keys_values: Tensor
    query: Tensor
    mask: Tensor | None
    place: _Place
    width: int
    is_causal: bool
    is_balanced: bool
    scale: float

    def grouped(self, value: Tensor) -> Tensor:
        """Return values of query heads as (.., key heads, queries of each, rows, width)."""
        return value.unflatten(-3, (self.keys_values.shape[-3], -1))

    def mask_of(self, source: int, mask: Tensor | None) -> Tensor | None:
        """Return the part of a mask, or of its gradient, that belongs to the keys of a rank; it is a view."""
        if mask is None:
            return None
        mask = mask[(None,) * (self.query.dim() - mask.dim())]
        mask = self.grouped(mask) if mask.shape[-3] > 1 else mask.unsqueeze(-3)
        rows = self.keys_values.shape[-2]
        return mask if mask.shape[-1] == 1 else mask[..., source * rows : (source + 1) * rows]

    def of(self, source: int) -> tuple[slice, slice, bool] | None:
        """Return which of its rows attend to which keys of a rank, and whether that is causal; None: none do."""
        rows, own = self.query.shape[-2], self.place.index
        every, half = slice(0, rows), rows // 2
        if not self.is_causal or source == own:
            return every, every, self.is_causal
        if not self.is_balanced:
            return None if source > own else (every, every, False)
        return (slice(half, rows), every, False) if source > own else (every, slice(0, half), False)

    def pieces(self, rows: slice) -> Iterator[slice]:
        """Yield rows so few that their scores take about half of the memory of the keys and values."""
        groups = self.query.shape[-3] // self.keys_values.shape[-3]
        step = max(1, self.keys_values.shape[-1] // (2 * groups))
        for begin in range(rows.start, rows.stop, step):
            yield slice(begin, min(begin + step, rows.stop))

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None, rows: slice, diagonal: bool) -> Tensor:
        """Return (.., key heads, queries of each, rows, keys), of these rows."""
        found = (query.flatten(-3, -2) @ keys.mT).to(_wide(query.dtype)).mul_(self.scale)
        found = found.unflatten(-2, query.shape[-3:-1])
        if mask is not None:
            own = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            found = found.masked_fill(~own, -math.inf) if own.dtype == torch.bool else found + own
        if diagonal:
            numbers = torch.arange(rows.stop, device=query.device)
            found = found.masked_fill(numbers > numbers[rows, None], -math.inf)
        return found


def _forward(blocks: _Blocks) -> tuple[Tensor, Tensor]:
    """Return (.., key heads, queries of each, rows, value width) and lse (.., heads, rows)."""
    query, place, width = blocks.grouped(blocks.query), blocks.place, blocks.width
    wide = _wide(query.dtype)
    result = query.new_zeros(*query.shape[:-1], blocks.keys_values.shape[-1] - width, dtype=wide)
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
    held = blocks.keys_values
    for step in range(place.count):
        source = (place.index - step) % place.count
        coming = place.pass_on(held) if step + 1 < place.count else None
        for rows, seen, mask, diagonal in _parts_of(blocks, source):
            keys, values = held[..., seen, :width], held[..., seen, width:]
            scores = blocks.scores(query[..., rows, :], keys, mask, rows, diagonal)
            before = lse[..., rows]
            after = torch.logaddexp(before, scores.logsumexp(-1))
            at = after.masked_fill(after == -math.inf, 0.0)
            weights = scores.sub_(at[..., None]).exp_().to(query.dtype)
            added = (weights.flatten(-3, -2) @ values).unflatten(-2, weights.shape[-3:-1])
            result[..., rows, :] = result[..., rows, :] * (before - at).exp()[..., None] + added
            lse[..., rows] = after
        held = coming.wait() if coming is not None else held
    return result.to(query.dtype), lse.flatten(-3, -2)


def _parts_of(blocks: _Blocks, source: int) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
    """Yield rows of queries with those of a rank's keys that they attend to, their mask and whether it is causal."""
    found = blocks.of(source)
    if found is None:
        return
    rows, columns, diagonal = found
    mask = blocks.mask_of(source, blocks.mask)
    for piece in blocks.pieces(rows):
        yield piece, slice(0, piece.stop) if diagonal else columns, mask, diagonal


def _backward(
    blocks: _Blocks, gradient: Tensor, delta: Tensor, lse: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of keys and values, of queries (grouped by key heads), and of a mask if one is given."""
    query, gradient, delta = (blocks.grouped(value) for value in (blocks.query, gradient, delta))
    place, width, wide = blocks.place, blocks.width, lse.dtype
    lse = blocks.grouped(lse[..., None])
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    of_query = torch.zeros_like(query, dtype=wide)
    of_mask = None if mask is None else torch.zeros_like(mask)
    held, of_held = blocks.keys_values, torch.zeros_like(blocks.keys_values, dtype=wide)
    home: row_exchange.Arriving | None = None
    for step in range(place.count):
        source = (place.index - step) % place.count
        coming = place.pass_on(held) if step + 1 < place.count else None
        own = torch.zeros_like(of_held)
        for rows, seen, bias, diagonal in _parts_of(blocks, source):
            keys, values = held[..., seen, :width], held[..., seen, width:]
            q, g = query[..., rows, :], gradient[..., rows, :].flatten(-3, -2)
            weights = blocks.scores(q, keys, bias, rows, diagonal).sub_(lse[..., rows, :]).exp_()
            own[..., seen, width:] += weights.flatten(-3, -2).to(g.dtype).mT @ g
            of_scores = (g @ values.mT).to(wide).unflatten(-2, weights.shape[-3:-1]).sub_(delta[..., rows, :])
            of_scores.mul_(weights)
            if of_mask is not None:
                _add_to_mask(blocks.mask_of(source, of_mask), of_scores, rows)
            flat = of_scores.mul_(blocks.scale).flatten(-3, -2).to(q.dtype)
            of_query[..., rows, :] += (flat @ keys).unflatten(-2, weights.shape[-3:-1])
            own[..., seen, :width] += flat.mT @ q.flatten(-3, -2)
        of_held = own if home is None else home.wait().add_(own)
        home = place.pass_on(of_held)
        held = coming.wait() if coming is not None else held
    assert home is not None
    return home.wait(), of_query, of_mask


def _add_to_mask(of_mask: Tensor | None, of_scores: Tensor, rows: slice) -> None:
    assert of_mask is not None
    own = of_mask if of_mask.shape[-2] == 1 else of_mask[..., rows, :]
    own += of_scores.sum_to_size(own.shape)
