"""Which strategy an operator gets: the user's, its input's layout, or data parallel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msrun.errors import StrategyError
from msrun.runtime.graph.autocast import IS_CAST
from msrun.runtime.graph.operators.dropout import BATCH_DIM
from msrun.runtime.graph.operators.rule import Form, Labels, OperatorCall, Rule
from msrun.runtime.layout import Axes, Mesh, TensorLayout, assign_axes

Numbers = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class OperatorStrategy:
    """What the user wants for one operator: parts per dimension, one tuple per input, in MindSpore's form."""

    inputs: Numbers


def choose_split(
    call: OperatorCall,
    rule: Rule,
    form: Form,
    mesh: Mesh,
    strategy: OperatorStrategy | None,
    layouts: Sequence[TensorLayout | None],
) -> tuple[dict[str, Axes], str]:
    """Return the axes of every split label, and where that choice came from.

    Args:
        layouts: present layouts of the tensor inputs; None for a parameter that nobody has used yet.

    Raises:
        StrategyError: the user's strategy is not legal for this operator.
    """
    if strategy is not None:
        return _from_user(call, form, mesh, strategy), "user"
    if not form.sizes:
        return {}, "no rule" if not any(form.inputs) else "follows"
    if rule.follows:
        followed = _follow(form, mesh, layouts)
        if followed or IS_CAST in call.node.meta:
            return followed, "follows"
    return _data_parallel(call, form, mesh, layouts), "data parallel"


def _from_user(call: OperatorCall, form: Form, mesh: Mesh, strategy: OperatorStrategy) -> dict[str, Axes]:
    name = f"{call.operator} in module {call.module_path or '(top)'}"
    if len(strategy.inputs) > len(form.inputs):
        raise StrategyError(
            f"{name}: strategy {strategy.inputs} has {len(strategy.inputs)} tuples for {len(form.inputs)} inputs; "
            "give one tuple for each tensor input"
        )
    parts: dict[str, int] = {}
    for index, (numbers, labels) in enumerate(zip(strategy.inputs, form.inputs, strict=False)):
        folded = numbers if len(numbers) == len(labels) else _folded(numbers, labels)
        if folded is None:
            raise StrategyError(
                f"{name}: strategy {strategy.inputs[index]} of input {index} has {len(strategy.inputs[index])} numbers "
                f"for {len(labels)} dimensions; give one number for each"
            )
        for dim, (number, label) in enumerate(zip(folded, labels, strict=True)):
            _check_number(name, call, form, index, dim, number, label)
            if label is None:
                continue
            if parts.setdefault(label, number) != number:
                raise StrategyError(
                    f"{name}: dimension {dim} of input {index} is cut into {number} but the same dimension of another "
                    f"input into {parts[label]}; give both the same number"
                )
    if math.prod(parts.values()) > mesh.size:
        raise StrategyError(
            f"{name}: strategy {strategy.inputs} makes {math.prod(parts.values())} parts for {mesh.size} ranks"
        )
    axes = assign_axes(mesh, list(parts.values()), what=f"{name}: strategy {strategy.inputs}")
    return {label: cut for label, cut in zip(parts, axes, strict=True) if cut}


def _folded(numbers: tuple[int, ...], labels: Labels) -> tuple[int, ...] | None:
    """Let a strategy written for a matrix serve an input with more batch dimensions: the extra ones are not cut."""
    extra = len(labels) - len(numbers)
    if extra > 0 and len(numbers) == 2:
        return (numbers[0], *(1,) * extra, numbers[1])
    return None


def _check_number(
    name: str, call: OperatorCall, form: Form, index: int, dim: int, number: int, label: str | None
) -> None:
    if number < 1:
        raise StrategyError(f"{name}: {number} parts of dimension {dim} of input {index}; must be 1 or more")
    if number == 1:
        return
    if label is None or label in form.whole:
        raise StrategyError(
            f"{name}: dimension {dim} of input {index} must stay whole but is cut into {number}; give 1"
        )
    size = call.shapes[index][dim]
    if not form.can_split(label, number):
        legal = max(parts for parts in range(1, number + 1) if form.can_split(label, parts))
        limit = form.limits.get(label)
        why = limit.text if limit and size % number == 0 else f"which {number} does not divide"
        raise StrategyError(
            f"{name}: dimension {dim} of input {index} has size {size}, {why}; the nearest legal number is {legal}"
        )


def _follow(form: Form, mesh: Mesh, layouts: Sequence[TensorLayout | None]) -> dict[str, Axes]:
    """Keep the axes that the inputs bring, first input first, where the operator allows it."""
    split: dict[str, Axes] = {}
    used: set[int] = set()
    for labels, layout in zip(form.inputs, layouts, strict=True):
        if layout is None:
            continue
        for label, axes in zip(labels, layout.split, strict=True):
            if not axes or label is None or label in split or used & set(axes):
                continue
            if form.can_split(label, mesh.extent(axes)):
                split[label] = axes
                used |= set(axes)
    return split


def _data_parallel(
    call: OperatorCall, form: Form, mesh: Mesh, layouts: Sequence[TensorLayout | None]
) -> dict[str, Axes]:
    """Cut the batch dimension of the first input that has one over as many ranks as divide it.

    Where the rows of the batch are lost from sight it is dimension 0; what does not come from the batch stays whole.
    """
    dims = [tensor.meta.get(BATCH_DIM, 0) for tensor in call.tensors]
    first = next((i for i, layout in enumerate(layouts) if layout is not None and dims[i] is not None), None)
    if first is None or not form.inputs[first]:
        return {}
    label = form.inputs[first][max(dims[first], 0)]
    axes: list[int] = []
    for axis in mesh.axes:
        if form.can_split(label, mesh.extent((*axes, axis))):
            axes.append(axis)
    return {label: tuple(axes)} if axes and label is not None else {}
