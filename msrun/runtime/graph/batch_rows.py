"""Where the rows of the batch are in every value of a captured graph, as far as the operators' rules say."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.graph.marked_calls import read_mark
from msrun.runtime.graph.operators.dropout import BATCH_DIM, CALL, LOST
from msrun.runtime.graph.operators.registry import find_rule
from msrun.runtime.graph.operators.rule import Labels, operator_call

_RESULTS = "batch_dims_of_results"


def trace_batch_rows(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Write into every node's meta which dimension holds the rows of the batch: dimension 0 of every input.

    A dimension that a reshape has joined counts when the rows are its outermost part. LOST: the rows are mixed, summed
    over, or an operator has no rule. None: the value does not come from the batch.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            node.meta[BATCH_DIM] = (
                0 if node.name in inputs and isinstance(value, torch.Tensor) and value.dim() else None
            )
        elif node.op == "call_function":
            dims = _of_results(node)
            node.meta[BATCH_DIM] = dims[0]
            node.meta[_RESULTS] = dims


def refuse_lost_rows(graph: fx.Graph, parts: int) -> None:
    """Refuse random numbers for values whose rows of the batch nobody knows, when the batch runs in several parts.

    Raises:
        StrategyError: names the operator.
    """
    for node in graph.nodes if parts > 1 else ():
        if CALL not in node.meta:
            continue
        call = operator_call(node)
        (first, *_) = call.tensors or (node,)
        if first.meta.get(BATCH_DIM, LOST) == LOST:
            name = f"{call.operator.removesuffix('.default')} in module {call.module_path or '(top)'}"
            shape = tuple(first.meta["val"].shape)
            raise StrategyError(
                f"{name} draws random numbers for a tensor of shape {shape} whose rows of the batch are not known, so "
                f"{parts} parts of the batch cannot have those of one: put the batch into dimension 0 "
                "(batch_first=True), draw before the batch is mixed, or use one part"
            )


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


def _place(row: Labels, labels: Collection[str | None]) -> int | None:
    """Return where the one label of the batch stands in a result."""
    (label, *more) = labels
    return row.index(label) if not more and label is not None and label in row else LOST
