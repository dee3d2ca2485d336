"""Where the rows of the batch are in every value of a captured graph, as far as the operators' rules say."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.capture.marked_calls import read_mark
from msrun.runtime.sharding.operators.dropout import BATCH_DIM, CALL, LOST
from msrun.runtime.sharding.operators.random_draws import CAPTURED
from msrun.runtime.sharding.operators.registry import find_rule
from msrun.runtime.sharding.operators.rule import Labels, operator_call
from msrun.runtime.sharding.operators.selection import LikeInType

_RESULTS = "batch_dims_of_results"
_IS_MADE = "made_of_nothing"
"""node.meta: its values come from no input and no parameter; their shape alone may be the batch's."""
_IS_SUMMED = "rows_are_summed"
"""node.meta: its values come from the batch through an operator that has summed over all rows."""


def trace_batch_rows(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Write into every node's meta which dimension holds the rows of the batch: dimension 0 of every input.

    A dimension that a reshape has joined counts when the rows are its outermost part. LOST: the rows are mixed, summed
    over, or an operator has no rule. None: the value does not come from the batch.

    Random numbers that are made of nothing belong to rows of the batch where dimension 0 has their number; where
    another size is a multiple of it, nobody knows.
    """
    rows: set[int] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            node.meta[BATCH_DIM] = (
                0 if node.name in inputs and isinstance(value, torch.Tensor) and value.dim() else None
            )
            if node.meta[BATCH_DIM] == 0:
                rows.add(value.shape[0])
        elif node.op == "call_function":
            tensors = operator_call(node).tensors
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
    """Refuse random numbers for values whose rows of the batch nobody knows, when the batch runs in several parts.

    Raises:
        StrategyError: names the operator.
    """
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
    tensors = operator_call(node).tensors
    if read_mark(node) is not None:
        return [tensors[0].meta[BATCH_DIM]]
    held = {index: tensor.meta[BATCH_DIM] for index, tensor in enumerate(tensors) if tensor.meta[BATCH_DIM] is not None}
    if not held:
        return [None] * count
    # a single value taken from the batch, such as its mean, is spread over rows that another input has
    held = {index: dim for index, dim in held.items() if dim != LOST or tensors[index].meta["val"].numel() > 1}
    if not held:
        return [LOST] * count
    rule = find_rule(node.target)
    if rule is None or LOST in held.values():
        return [LOST] * count
    form = rule.form(operator_call(node))
    labels = {form.inputs[index][dim] for index, dim in held.items()}
    return [_place(row, labels) for row in (form.output, *form.others)][:count] or [LOST]


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
    """Return where the one label of the batch stands in a result."""
    (label, *more) = labels
    return row.index(label) if not more and label is not None and label in row else LOST
