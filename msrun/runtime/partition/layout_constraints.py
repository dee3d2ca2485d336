"""What a tuple or a Layout that the user gave for one tensor means as mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.capture.assignment import LayoutConstraint
from msrun.runtime.capture.batch_rows import rows_of_result
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout, assign_axes
from msrun.runtime.sharding.named_layout import Layout
from msrun.runtime.sharding.strategies import Entry, entry_numbers


def entry_layout(
    entry: Entry,
    shape: tuple[int, ...],
    mesh: Mesh,
    *,
    what: str,
    near: TensorLayout | None = None,
    order: Sequence[int] | None = None,
) -> TensorLayout:
    """Return the layout that a user's entry means for a tensor.

    Args:
        near, order: which axes numbers prefer, as in `assign_axes`.

    Raises:
        StrategyError: the entry does not fit the tensor.
    """
    numbers = entry_numbers(entry, mesh)
    if len(numbers) != len(shape):
        raise StrategyError(
            f"{what}: {entry} has {len(numbers)} numbers for {len(shape)} dimensions; give one for each"
        )
    for dim, (number, size) in enumerate(zip(numbers, shape, strict=True)):
        if size % number:
            legal = max(n for n in range(1, number + 1) if size % n == 0 and mesh.size % n == 0)
            raise StrategyError(
                f"{what}: dimension {dim} has size {size}, which {number} does not divide; "
                f"the nearest legal entry is {(*numbers[:dim], legal, *numbers[dim + 1 :])}"
            )
    if isinstance(entry, Layout):
        return entry.resolve(mesh)
    return TensorLayout(assign_axes(mesh, numbers, what=what, near=near, order=order))


def layouts_of_outputs(captured: CapturedGraph, mesh: Mesh, axes: Axes) -> list[TensorLayout | None]:
    """Return how each result of a step leaves it: the rows of the batch cut by `axes`, everything else whole.

    None: no value. What the call stores in attributes is whole as well.
    """
    inputs = [node for node in captured.graph.nodes if node.op == "placeholder" and node.name in captured.inputs]
    rows = [node.meta["val"].shape[0] for node in inputs if node.meta["val"].dim()]

    def layout(index: int, node: fx.Node) -> TensorLayout:
        shape = node.meta["val"].shape
        dim = None if index in captured.stored or not axes else rows_of_result(node, rows)
        if dim is None or shape[dim] % mesh.extent(axes):
            return TensorLayout.replicated(len(shape))
        return TensorLayout(tuple(axes if each == dim else () for each in range(len(shape))))

    return [layout(i, value) if isinstance(value, fx.Node) else None for i, value in enumerate(captured.outputs)]


def layout_of_result(
    constraint: LayoutConstraint, shape: tuple[int, ...], mesh: Mesh, held: TensorLayout, summed: Axes
) -> TensorLayout:
    """Return the layout that a mark asks for: with the axes that the value has and, next, those of its partial sums.

    So MatMul ((A, B), (B, C)) with out_strategy (A * B, C) cuts its rows by the very axes that it sums over.
    """
    side = "out_strategy" if constraint.leaves else "in_strategy"
    near = held
    if not isinstance(constraint.entry, Layout) and len(constraint.entry) == len(shape):
        near = _with_summed(constraint.entry, mesh, held, summed)
    return entry_layout(constraint.entry, shape, mesh, what=f"{side} of {constraint.name}", near=near)


def _with_summed(numbers: tuple[int, ...], mesh: Mesh, held: TensorLayout, summed: Axes) -> TensorLayout:
    rest = [axis for axis in summed if axis not in held.used]  # a sum may have been left cut by some of its axes
    split = []
    for number, axes in zip(numbers, held.split, strict=True):
        cut = axes
        for axis in tuple(rest):
            if number % mesh.extent((*cut, axis)) == 0:
                cut = (*cut, axis)
                rest.remove(axis)
        split.append(cut)
    return TensorLayout(tuple(split))
