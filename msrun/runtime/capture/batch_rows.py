"""Where the rows of the batch are in every value of a captured graph, as far as the operators' rules say."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun.errors import StrategyError
from msrun.runtime.capture.marked_calls import read_mark
from msrun.runtime.sharding.operators.custom import Custom
from msrun.runtime.sharding.operators.dropout import BATCH_DIM, CALL, CAPTURED, LOST
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import Labels, OperatorCall, operator_call
from msrun.runtime.sharding.operators.selection import LikeInType, SomeWhole
from msrun.runtime.sharding.operators.shape import Reshape, outermost_after_reshape

_RESULTS = "batch_dims_of_results"
_IS_MADE = "made_of_nothing"
"""node.meta: its values come from no input and no parameter; their shape alone may be the batch's."""
_IS_SUMMED = "rows_are_summed"
"""node.meta: its values come from the batch through an operator that has summed over all rows."""


def trace_batch_rows(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Write into every node's meta which dimension holds the rows of the batch: dimension 0 of every input.

    A dimension that a reshape has joined counts when the rows are its outermost part. LOST: the rows are summed over,
    look at each other, or are joined otherwise. None: the value does not come from the batch.

    Random numbers that are made of nothing belong to rows of the batch where dimension 0 has their number; where
    another size is a multiple of it, nobody knows.
    """
    rows: list[int] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            node.meta[BATCH_DIM] = (
                0 if node.name in inputs and isinstance(value, torch.Tensor) and value.dim() else None
            )
            if node.meta[BATCH_DIM] == 0:
                rows.append(value.shape[0])
        elif node.op == "call_function":
            tensors = node.all_input_nodes if node.target is operator.getitem else operator_call(node).tensors
            is_like = isinstance(find_rule(node.target), LikeInType)
            node.meta[_IS_MADE] = is_like or all(tensor.meta.get(_IS_MADE, False) for tensor in tensors)
            dims = [None] if is_like else _of_results(node)  # its values come from nothing
            if node.target in CAPTURED and all(tensor.meta.get(_IS_MADE, False) for tensor in tensors):
                dims = [_place_by_size(tuple(result.shape), rows) for result in _tensors_of(node)]
            node.meta[BATCH_DIM] = dims[0]
            node.meta[_RESULTS] = dims
            node.meta[_IS_SUMMED] = dims[0] == LOST and _has_summed(node, tensors)


def rows_of_result(node: fx.Node, rows: Collection[int]) -> int | None:
    """Return which dimension of a result holds the rows of the batch, by where the result stands in the graph.

    Where the operators' rules do not say, dimension 0 does if it is as long as the batch. None: no dimension does.

    Args:
        rows: lengths of dimension 0 of the step's inputs.
    """
    dim: int | None = node.meta.get(BATCH_DIM, LOST)
    if dim is not None and dim != LOST:
        return dim
    shape = node.meta["val"].shape
    is_fixed = node.meta.get(_IS_SUMMED, False) or (dim is None and not node.meta.get(_IS_MADE, False))
    return 0 if shape and shape[0] in rows and not is_fixed else None


def refuse_lost_rows(graph: fx.Graph, parts: int) -> None:
    """Refuse random numbers for values whose rows of the batch nobody knows, when the batch runs in several parts."""
    for node in graph.nodes if parts > 1 else ():
        if CALL not in node.meta:
            continue
        call = operator_call(node)
        drawn_for = node if node.target in CAPTURED else call.tensors[0]
        if drawn_for.meta.get(BATCH_DIM, LOST) == LOST:
            name = f"{call.operator.removesuffix('.default')} in module {call.module_path or '(top)'}"
            shape = tuple(drawn_for.meta["val"].shape)
            raise StrategyError(
                f"{name} draws random numbers for a tensor of shape {shape} whose rows of the batch are not known, so "
                f"{parts} parts of the batch cannot have those of one: put the batch into dimension 0 "
                "(batch_first=True), draw before the batch is mixed, or use one part"
            )


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta["val"]
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _place_by_size(shape: tuple[int, ...], rows: Collection[int]) -> int | None:
    if shape and shape[0] in rows:
        return 0
    return LOST if any(size % count == 0 for size in shape for count in rows if count) else None


def _of_results(node: fx.Node) -> list[int | None]:
    value = node.meta.get("val")
    count = len(value) if isinstance(value, list | tuple) else 1
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return [source.meta[_RESULTS][index]]
    call = operator_call(node)
    dims = [tensor.meta[BATCH_DIM] for tensor in call.tensors]
    if read_mark(node) is not None:
        return dims[:1]
    if all(dim is None for dim in dims):
        return [None] * count
    # Values whose rows are lost, such as statistics of the batch, do not say where those of a result are.
    held = {index: dim for index, dim in enumerate(dims) if dim is not None and dim != LOST}
    if not held:
        return [LOST] * count
    rule = find_rule(node.target)
    if isinstance(rule, Reshape):
        place = outermost_after_reshape(call.shapes[0], call.output_shape, held[0])
        return [LOST if place is None else place]
    form = (rule or REPLICATED).form(call)
    labels = {form.inputs[index][dim] for index, dim in held.items()} - {None}
    if not labels and (rule is None or isinstance(rule, Custom | SomeWhole)):
        return _places_by_trial(call, held)
    return [_place(row, labels) for row in (form.output, *form.others)][:count] or [LOST]


def _places_by_trial(call: OperatorCall, held: Mapping[int, int]) -> list[int | None]:
    """Return which dimension of each result is as long as the batch, also when there are twice as many rows."""
    given = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for index, tensor in enumerate(call.tensors):
            value, shape = tensor.meta["val"], list(call.shapes[index])
            if index in held:
                shape[held[index]] *= 2
            given.append(torch.empty(shape, dtype=value.dtype, device=value.device))
        left = iter(given)
        args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), lambda _: next(left))
        try:
            made = call.node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # noqa: BLE001  # it works on this number of rows alone
            return [LOST] * len(call.output_shapes)
    rows = {call.shapes[index][dim] for index, dim in held.items()}
    found: list[int | None] = []
    for before, after in zip(call.output_shapes, [made] if isinstance(made, Tensor) else made, strict=True):
        pairs = enumerate(zip(before, after.shape, strict=True)) if len(before) == after.dim() else ()
        found.append(next((dim for dim, (size, grown) in pairs if size in rows and grown == 2 * size), LOST))
    return found


def _has_summed(node: fx.Node, tensors: Sequence[fx.Node]) -> bool:
    """Return whether a value without rows has none since they were summed over, here or before."""
    held = [(index, dim) for index, tensor in enumerate(tensors) if (dim := tensor.meta[BATCH_DIM]) is not None]
    lost = [tensors[index] for index, dim in held if dim == LOST]
    if lost:
        return len(lost) == len(held) and all(tensor.meta.get(_IS_SUMMED, False) for tensor in lost)
    rule = find_rule(node.target)
    if rule is None or read_mark(node) is not None:
        return False
    form = rule.form(operator_call(node))
    labels = {form.inputs[index][dim] for index, dim in held}
    return len(labels) == 1 and None not in labels and not labels & set(form.output)


def _place(row: Labels, labels: Collection[str | None]) -> int | None:
    """Return where the one label of the batch stands in a result; with two, rows look at other rows."""
    (label, *more) = labels or (None,)
    return row.index(label) if not more and label is not None and label in row else LOST
