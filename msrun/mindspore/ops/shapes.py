"""Operators that move, choose, join, make and reduce elements: the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msrun.mindspore.ops.table import define_all, taking

Axis = int | Sequence[int] | None


def dims(axis: Any) -> tuple[int, ...]:
    """Return dimensions as a tuple; () for all."""
    if axis is None:
        return ()
    if isinstance(axis, Tensor):
        axis = axis.tolist()
    return (axis,) if isinstance(axis, int) else tuple(int(one) for one in axis)


def fill_type(value: Any) -> torch.dtype:
    """Return the type of elements that MindSpore gives to a number."""
    return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32


def one_hot(indices: Tensor, depth: int, on_value: Any = 1, off_value: Any = 0, axis: int = -1) -> Tensor:
    """Return rows of `depth` elements: `on_value` at the index, `off_value` elsewhere.

    Args:
        indices: (...) of any integer type.
        axis: the new dimension; -1 is the last one.
    """
    hit = indices.unsqueeze(axis).long()
    sizes = [1] * hit.dim()
    sizes[axis] = depth
    is_on = hit == torch.arange(depth, device=indices.device).reshape(sizes)
    dtype = on_value.dtype if isinstance(on_value, Tensor) else fill_type(on_value)
    return is_on.to(dtype) * (on_value - off_value) + off_value


def _gather(input_params: Tensor, input_indices: Any, axis: Any, batch_dims: int = 0) -> Tensor:
    """Return the rows of a dimension that indices of any shape name."""
    indices = torch.as_tensor(input_indices, device=input_params.device).long()
    where = int(axis) % input_params.dim()
    if batch_dims:
        rows = zip(input_params, indices, strict=True)
        return torch.stack([_gather(row, index, where - 1, batch_dims - 1) for row, index in rows])
    if where == 0 and input_params.dim() == 2 and indices.dim():
        return F.embedding(indices, input_params)
    shape = (*input_params.shape[:where], *indices.shape, *input_params.shape[where + 1 :])
    return input_params.index_select(where, indices.reshape(-1)).reshape(shape)


def look_up(input_params: Tensor, input_indices: Tensor, offset: int = 0) -> Tensor:
    """Return the rows `index - offset` of a table, zeros for those that lie outside."""
    indices = input_indices.long() - offset
    inside = (indices >= 0) & (indices < len(input_params))
    rows = F.embedding(torch.where(inside, indices, torch.zeros_like(indices)), input_params)
    return rows * inside.unsqueeze(-1).to(rows.dtype)


def _scatter_nd(indices: Tensor, updates: Tensor, shape: Sequence[int]) -> Tensor:
    result = torch.zeros(tuple(shape), dtype=updates.dtype, device=updates.device)
    return result.index_put(tuple(indices.long().unbind(-1)), updates, accumulate=True)


def _segment(reduce: str) -> Any:
    def run(x: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
        """Reduce the rows of each segment; of one without rows the sum is 0, the largest the least number there is."""
        ids, rest = segment_ids.long().reshape(-1), x.shape[segment_ids.dim() :]
        values, inside = x.reshape(len(ids), *rest), ids >= 0
        limits = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        begin = {"sum": 0, "prod": 1, "max": limits.min, "min": limits.max}[reduce]
        result = torch.full((int(num_segments), *rest), begin, dtype=x.dtype, device=x.device)
        if reduce == "sum":
            return result.index_add(0, ids[inside], values[inside])
        places = ids[inside].reshape(-1, *[1] * len(rest)).expand(-1, *rest)
        return result.scatter_reduce(0, places, values[inside], {"max": "amax", "min": "amin"}.get(reduce, reduce))

    return run


def _arange(start: Any = 0, end: Any = None, step: Any = 1, *, dtype: torch.dtype | None = None) -> Tensor:
    first, last = (0, start) if end is None else (start, end)
    numbers = [one.item() if isinstance(one, Tensor) else one for one in (first, last, step)]
    return torch.arange(*numbers, dtype=dtype)


def _strided_slice(input_x: Tensor, begin: Any, end: Any, strides: Any, **masks: int) -> Tensor:
    """Return a part, with a bit of each mask per dimension as in TensorFlow."""
    chosen: list[Any] = []
    for place, (b, e, step) in enumerate(zip(begin, end, strides, strict=True)):
        has = {name.removesuffix("_mask"): mask >> place & 1 for name, mask in masks.items()}
        if has["ellipsis"]:
            chosen.append(...)
        elif has["new_axis"]:
            chosen.append(None)
        elif has["shrink_axis"]:
            chosen.append(b)
        else:
            chosen.append(slice(None if has["begin"] else b, None if has["end"] else e, step))
    backwards = [place for place, one in enumerate(chosen) if isinstance(one, slice) and one.step < 0]
    for place in backwards:  # torch knows no negative step
        kept = range(input_x.shape[place])[chosen[place]]
        input_x = input_x.index_select(place, torch.tensor(list(kept), dtype=torch.int64, device=input_x.device))
        chosen[place] = slice(None)
    return input_x[tuple(chosen)]


def _spread(measure: Any) -> Any:
    return lambda input, axis, ddof, keepdims: measure(
        input, dims(axis) or None, correction=int(ddof), keepdim=keepdims
    )


def _arg_with_value(find: Any) -> Any:
    return taking("input axis>dim=0 keep_dims>keepdim=False", lambda **words: tuple(find(**words))[::-1])


def _extreme(find: Any, over_all: Any) -> Any:
    def run(
        input: Tensor, axis: int | None = None, keepdims: bool = False, *, initial: Any = None, where: Any = None
    ) -> tuple[Tensor, Tensor]:
        if where is not None:
            input = torch.where(where, input, torch.as_tensor(initial, dtype=input.dtype))
        if axis is None:
            return over_all(input), torch.tensor(0, dtype=torch.int64)
        values, indices = find(input, axis, keepdims)
        return values, indices

    return run


def _sum(input: Tensor, dim: Axis = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    total = input.sum(dims(dim) or None, keepdim, dtype=dtype)
    return total if dtype or input.dtype == torch.bool else total.to(input.dtype)


def _over_dims(reduce: Any) -> Any:
    """Return a reduction over several dimensions of one that knows one."""

    def run(x: Tensor, axis: Axis = (), keep_dims: bool = False) -> Tensor:
        for dim in sorted({one % x.dim() for one in dims(axis) or range(x.dim())}, reverse=True):
            x = reduce(x, dim, keep_dims)
        return x

    return run


def _prod(input: Tensor, axis: Axis = None, keep_dims: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    result = _over_dims(torch.prod)(input, axis, keep_dims).to(input.dtype)
    return result.to(dtype) if dtype else result


def _with_places(found: Any) -> tuple[Tensor, Tensor]:
    values, indices = found
    return values, indices.int()


def _cumulate(cumulate: Any, start: float) -> Any:
    def run(x: Tensor, axis: Any, exclusive: bool, reverse: bool) -> Tensor:
        axis = int(axis)
        x = x.flip(axis) if reverse else x
        if exclusive:
            first = torch.full_like(x.narrow(axis, 0, 1), start)
            x = torch.cat((first, x.narrow(axis, 0, x.shape[axis] - 1)), axis)
        result = cumulate(x, axis).to(x.dtype)
        return result.flip(axis) if reverse else result

    return run


def _pad_pairs(input_x: Tensor, paddings: Any, mode: str = "constant") -> Tensor:
    """Pad with one (before, after) per dimension."""
    pairs = paddings.tolist() if isinstance(paddings, Tensor) else [tuple(pair) for pair in paddings]
    if mode.lower() in ("constant", ""):
        return F.pad(input_x, [edge for pair in reversed(pairs) for edge in pair])
    for dim, (before, after) in enumerate(pairs):  # torch mirrors the last dimensions alone
        size, inner = input_x.shape[dim], mode.lower() == "reflect"
        head = list(range(before, 0, -1)) if inner else list(range(before - 1, -1, -1))
        tail = [size - 2 - i if inner else size - 1 - i for i in range(after)]
        order = torch.tensor([*head, *range(size), *tail], dtype=torch.int64, device=input_x.device)
        input_x = input_x.index_select(dim, order)
    return input_x


def _unique(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different elements in the order in which they come, and of each element its place among them."""
    values, places, counts = torch.unique(input, return_inverse=True, return_counts=True)
    flat = places.reshape(-1)
    first = torch.full((len(counts),), flat.numel(), dtype=torch.int64).scatter_reduce(
        0, flat, torch.arange(flat.numel()), "amin"
    )
    order = first.argsort()
    return values[order], order.argsort()[places].int()


def _band(x: Tensor, lower: int, upper: int) -> Tensor:
    rows = torch.arange(x.shape[-2], device=x.device)[:, None]
    columns = torch.arange(x.shape[-1], device=x.device)[None]
    inside = (rows - columns <= lower) | (lower < 0)
    return x * (inside & ((columns - rows <= upper) | (upper < 0))).to(x.dtype)


CHANGES: dict[str, Any] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip
"""What becomes of an element and its update."""


def scatter_into(change: str) -> Any:
    """Return a function that changes a tensor in place, where the last dimension of indices names an element."""

    def run(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        where = tuple(indices.long().unbind(-1))
        if change in ("add", "sub"):
            return x.index_put_(where, updates if change == "add" else -updates, accumulate=True)
        return x.index_put_(where, updates if change == "update" else CHANGES[change](x[where], updates))

    return run


def _tensor_scatter(change: str) -> Any:
    return lambda input_x, indices, updates: scatter_into(change)(input_x.clone(), indices, updates)


def _scatter_elements(
    input_x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none"
) -> Tensor:
    places = indices.long()
    return input_x.scatter(axis, places, updates) if reduction == "none" else input_x.scatter_add(axis, places, updates)


def _reverse_sequence(x: Tensor, seq_lengths: Tensor, seq_dim: int = 1, batch_dim: int = 0) -> Tensor:
    """Return x, whose sequences are turned round in their first `seq_lengths` places."""
    places = torch.arange(x.shape[seq_dim], device=x.device)
    lengths = seq_lengths.long()[:, None]
    order = torch.where(places < lengths, lengths - 1 - places, places)
    rows = x.movedim((batch_dim, seq_dim), (0, 1))
    turned = rows[torch.arange(len(order), device=x.device)[:, None], order]
    return turned.movedim((0, 1), (batch_dim, seq_dim))


_dims = dims  # rows have arguments that are called dims

OPERATORS = define_all((
    ("Reshape reshape", lambda input, shape: input.reshape(dims(shape))),
    ("Shape shape TensorShape", lambda input_x: tuple(input_x.shape)),
    ("DynamicShape tensor_shape", lambda input_x: torch.tensor(input_x.shape)),
    ("Size size", lambda input_x: input_x.numel()),
    ("Rank rank", lambda input_x: input_x.dim()),
    ("DType dtype typeof", lambda x: x.dtype),
    ("Transpose transpose", lambda input, dims: input.permute(_dims(dims))),
    ("permute", lambda input, axis: input.permute(_dims(axis))),
    ("Flatten", lambda input_x: input_x.flatten(1)),
    ("flatten", lambda input, order="C", *, start_dim=1, end_dim=-1: input.flatten(start_dim, end_dim)),
    ("ravel", lambda input: input.reshape(-1)),
    ("ExpandDims expand_dims", lambda input_x, axis: input_x.unsqueeze(axis)),
    ("Squeeze squeeze", lambda input, axis=(): input.squeeze(_dims(axis)) if _dims(axis) else input.squeeze(), "axis"),
    ("Concat Cat concat cat", lambda tensors, axis=0: torch.cat(tuple(tensors), axis), "axis"),
    ("Stack Pack stack pack", lambda tensors, axis=0: torch.stack(tuple(tensors), axis), "axis"),
    ("Unstack Unpack", lambda input_x, axis=0, num=None: input_x.unbind(axis), "axis num"),
    ("unstack unpack", lambda input_x, axis=0: input_x.unbind(axis)),
    ("Split", lambda input_x, axis=0, output_num=1: input_x.split(input_x.shape[axis] // output_num, axis),
     "axis output_num"),
    ("split", lambda tensor, split_size_or_sections, axis=0: tensor.split(
        split_size_or_sections if isinstance(split_size_or_sections, int) else list(split_size_or_sections), axis)),
    ("SplitV", lambda input_x, size_splits, split_dim, num_split=None: input_x.split(list(size_splits), split_dim),
     "size_splits split_dim num_split"),
    ("tensor_split", lambda input, indices_or_sections, axis=0: input.tensor_split(indices_or_sections, axis)),
    ("Tile tile", lambda input, dims: input.tile(_dims(dims))),
    ("repeat_elements", lambda x, rep, axis=0: x.repeat_interleave(rep, axis)),
    ("BroadcastTo broadcast_to", lambda input, shape: input.expand(tuple(shape)), "shape"),
    ("expand", lambda input_x, size: input_x.expand(_dims(size))),
    ("expand_as", lambda input, other: input.expand_as(other)),
    ("Gather GatherV2 SparseGatherV2 gather", _gather, "batch_dims"),
    ("EmbeddingLookup embedding_lookup", look_up),
    ("GatherNd gather_nd", lambda input_x, indices: input_x[tuple(indices.long().unbind(-1))]),
    ("GatherD gather_d", lambda x, dim, index: torch.gather(x, dim, index.long())),
    ("gather_elements", lambda input, dim, index: torch.gather(input, dim, index.long())),
    ("index_select", lambda input, axis, index: input.index_select(axis, index.long())),
    ("ScatterNd scatter_nd", _scatter_nd),
    *((f"TensorScatter{change.title()} tensor_scatter_{change}", _tensor_scatter(change))
      for change in ("update", *CHANGES)),
    ("TensorScatterElements tensor_scatter_elements", _scatter_elements, "axis reduction"),
    ("scatter", lambda input, axis, index, src: input.scatter(axis, index.long(), src)),
    ("index_add", lambda x, indices, y, axis, use_lock=True, check_index_bound=True: x.index_add(
        axis, indices.long(), y)),
    ("index_fill", lambda x, axis, index, value: x.index_fill(axis, torch.as_tensor(index).long(), value)),
    *((f"UnsortedSegment{reduce.title()} unsorted_segment_{reduce}", _segment(reduce))
      for reduce in ("sum", "prod", "max", "min")),
    ("MaskedFill masked_fill", lambda input_x, mask, value: input_x.masked_fill(mask.bool(), value)),
    ("Slice slice", lambda input_x, begin, size: input_x[tuple(
        slice(b, None if s == -1 else b + s) for b, s in zip(begin, size, strict=True))]),
    ("StridedSlice strided_slice", taking(
        "input_x begin end strides begin_mask=0 end_mask=0 ellipsis_mask=0 new_axis_mask=0 shrink_axis_mask=0",
        _strided_slice), "begin_mask end_mask ellipsis_mask new_axis_mask shrink_axis_mask"),
    ("ReverseV2", lambda input, axis: input.flip(_dims(axis)), "axis"),
    ("reverse", lambda x, axis: x.flip(_dims(axis))),
    ("flip", lambda input, dims: input.flip(_dims(dims))),
    ("Roll roll", lambda input, shifts, dims=None: torch.roll(input, shifts, dims), "shifts dims"),
    ("Triu triu", lambda input, diagonal=0: torch.triu(input, diagonal), "diagonal"),
    ("Tril tril", lambda input, diagonal=0: torch.tril(input, diagonal), "diagonal"),
    ("MatrixBandPart matrix_band_part", _band),
    ("Pad", _pad_pairs, "paddings"),
    ("MirrorPad", lambda input_x, paddings, mode="REFLECT": _pad_pairs(input_x, paddings, mode), "mode"),
    ("mirror_pad", _pad_pairs),
    ("pad", lambda input_x, padding, mode="constant", value=None: F.pad(input_x, _dims(padding), mode, value)),
    ("DepthToSpace", lambda x, block_size: F.pixel_shuffle(x, block_size), "block_size"),
    ("SpaceToDepth", lambda x, block_size: F.pixel_unshuffle(x, block_size), "block_size"),
    ("Meshgrid", lambda inputs, indexing="xy": torch.meshgrid(*inputs, indexing=indexing), "indexing"),
    ("meshgrid", lambda *inputs, indexing="xy": torch.meshgrid(*inputs, indexing=indexing)),
    ("OneHot one_hot", one_hot, "axis"),
    ("sequence_mask", lambda lengths, maxlen=None: torch.arange(
        int(lengths.max()) if maxlen is None else maxlen, device=lengths.device) < lengths.unsqueeze(-1)),
    ("Unique unique", _unique),
    ("ReverseSequence reverse_sequence", _reverse_sequence, "seq_dim batch_dim"),
    ("make_range", lambda *limits: tuple(range(*limits))),
    ("tuple_len list_len", len),
    # -- made of nothing ------------------------------------------------------------------------------------------
    ("Fill fill", lambda type, shape, value: torch.full(
        _dims(shape), value.item() if isinstance(value, Tensor) else value, dtype=type)),
    ("FillV2", lambda shape, value: torch.full(_dims(shape), value.item(), dtype=value.dtype)),
    ("full", lambda size, fill_value, *, dtype=None: torch.full(
        _dims(size), fill_value, dtype=dtype or fill_type(fill_value))),
    ("Fills fills", lambda x, value: torch.full_like(x, float(value))),
    ("Ones ones", lambda shape, dtype=None: torch.ones(_dims(shape), dtype=dtype or torch.float32)),
    ("Zeros zeros", lambda size, dtype=None: torch.zeros(_dims(size), dtype=dtype or torch.float32)),
    ("Eye eye", lambda n, m=None, dtype=None: torch.eye(n, n if m is None else m, dtype=dtype or torch.float32)),
    ("LinSpace linspace", lambda start, end, steps: torch.linspace(float(start), float(end), steps)),
    ("arange", _arange),
    ("Range range", lambda start, end, step, maxlen=1000000: _arange(start, end, step), "maxlen"),
    ("ScalarToArray ScalarToTensor scalar_to_array scalar_to_tensor",
     lambda input_x, dtype=torch.float32: torch.tensor(input_x, dtype=dtype)),
    ("scalar_cast ScalarCast", lambda input_x, input_y: torch.tensor(input_x).to(input_y).item()),
    ("tuple_to_array TupleToArray", lambda input_x: torch.tensor(input_x)),
    # -- reduced ---------------------------------------------------------------------------------------------------
    ("ReduceSum", lambda x, axis=(), keep_dims=False, skip_mode=False: x if skip_mode and not _dims(axis) else _sum(
        x, axis, keep_dims), "keep_dims skip_mode"),
    ("reduce_sum", taking("x>input axis>dim=() keep_dims>keepdim=False", _sum)),
    ("sum", _sum),
    ("ReduceMean reduce_mean", lambda x, axis=(), keep_dims=False: x.mean(_dims(axis) or None, keep_dims), "keep_dims"),
    ("mean", lambda x, axis=None, keep_dims=False: x.mean(_dims(axis) or None, keep_dims)),
    ("ReduceMax reduce_max", lambda x, axis=(), keep_dims=False: x.amax(_dims(axis), keep_dims), "keep_dims"),
    ("ReduceMin reduce_min", lambda x, axis=(), keep_dims=False: x.amin(_dims(axis), keep_dims), "keep_dims"),
    ("amax", lambda input, axis=None, keepdims=False, *, initial=None, where=None: input.amax(_dims(axis), keepdims)),
    ("amin", lambda input, axis=None, keepdims=False, *, initial=None, where=None: input.amin(_dims(axis), keepdims)),
    ("ReduceProd", _prod, "keep_dims"),
    ("reduce_prod", taking("x>input axis=() keep_dims=False", _prod)),
    ("prod", _prod),
    ("ReduceAll reduce_all", _over_dims(torch.all), "keep_dims"),
    ("ReduceAny reduce_any", _over_dims(torch.any), "keep_dims"),
    ("all", taking("input>x axis=None keep_dims=False", _over_dims(torch.all))),
    ("any", taking("input>x axis=None keep_dims=False", _over_dims(torch.any))),
    *((measure.__name__, taking("input axis=None ddof=0 keepdims=False", _spread(measure)))
      for measure in (torch.std, torch.var, torch.var_mean)),
    ("median", lambda input, axis=-1, keepdims=False: tuple(torch.median(input, axis, keepdims))),
    ("max", _extreme(torch.max, torch.amax)),
    ("min", _extreme(torch.min, torch.amin)),
    ("ArgMaxWithValue", _arg_with_value(torch.max), "axis keep_dims"),
    ("ArgMinWithValue", _arg_with_value(torch.min), "axis keep_dims"),
    ("Argmax", lambda input_x, axis=-1, output_type=torch.int32: input_x.argmax(axis).to(output_type),
     "axis output_type"),
    ("Argmin", lambda input_x, axis=-1, output_type=torch.int32: input_x.argmin(axis).to(output_type),
     "axis output_type"),
    ("argmax", lambda input, dim=None, keepdim=False: torch.argmax(input, dim, keepdim)),
    ("argmin", lambda input, axis=None, keepdims=False: torch.argmin(input, axis, keepdims).int()),
    ("TopK top_k", lambda input_x, k, sorted=True: _with_places(torch.topk(input_x, k, sorted=sorted)), "sorted"),
    ("topk", lambda input, k, dim=None, largest=True, sorted=True: _with_places(torch.topk(
        input, k, -1 if dim is None else dim, largest, sorted))),
    ("Sort sort", lambda input_x, axis=-1, descending=False: _with_places(torch.sort(
        input_x, dim=axis, descending=descending, stable=True)), "axis descending"),
    ("argsort", lambda input, axis=-1, descending=False: torch.argsort(
        input, dim=axis, descending=descending, stable=True).int()),
    ("CumSum", taking("input>x axis exclusive=False reverse=False", _cumulate(torch.cumsum, 0)), "exclusive reverse"),
    ("CumProd", taking("x axis exclusive=False reverse=False", _cumulate(torch.cumprod, 1)), "exclusive reverse"),
    ("cumsum", lambda x, axis, dtype=None: torch.cumsum(x, axis, dtype=dtype or x.dtype)),
    ("cumprod", lambda input, dim, dtype=None: torch.cumprod(input, dim, dtype=dtype or input.dtype)),
    ("cummax", lambda input, axis: tuple(torch.cummax(input, axis))),
    ("cummin", lambda input, axis: tuple(torch.cummin(input, axis))),
    ("count_nonzero", lambda x, axis=(), keep_dims=False, dtype=torch.int32: _sum(
        (x != 0).int(), axis, keep_dims, dtype=dtype)),
    ("norm", taking("A>input ord=None dim=None keepdim=False * dtype=None", torch.linalg.norm)),
    ("L2Loss", lambda input_x: (input_x * input_x).sum() / 2),
    ("L2Normalize", lambda x, axis=0, epsilon=1e-4: x * torch.rsqrt(
        (x * x).sum(_dims(axis), True).clamp(min=epsilon)), "axis epsilon"),
    ("LpNorm", lambda input, axis, p=2, keep_dims=False, epsilon=1e-12: torch.linalg.vector_norm(
        input, p, _dims(axis), keep_dims), "axis p keep_dims epsilon"),
))  # fmt: skip
