"""Values in the layouts in which operators read them: moved once, from the nearest layout that they have already."""

from __future__ import annotations

import itertools
from collections.abc import Set

import torch
from torch import fx

from msrun.errors import CaptureError
from msrun.runtime.partition.decisions import Read, Redistribution
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.operators.rule import operator_call, user_line
from msrun.runtime.sharding.redistribution import Move, plan_redistribution


class Reads:
    """Decides how values come to their readers. Owned by `decide`."""

    def __init__(self, mesh: Mesh, differentiable: Set[fx.Node]) -> None:
        self._mesh = mesh
        self._differentiable = differentiable
        self._held: dict[fx.Node, list[TensorLayout]] = {}
        """captured node -> the layouts that it has been brought to"""
        self._made: set[tuple[fx.Node, TensorLayout, str]] = set()
        """(captured node, its layout, collective): two readers of one value share its redistribution"""
        self._readers: dict[tuple[fx.Node, TensorLayout], dict[object, Collective | None]] = {}
        """(captured node, its layout) -> who takes it so: collectives, and operators (None)"""
        self.redistributions: list[Redistribution] = []

    def hold(self, node: fx.Node, layout: TensorLayout) -> None:
        """Say in which layout a captured node's value is."""
        self._held.setdefault(node, [layout])

    def bring(
        self,
        node: fx.Node,
        target: TensorLayout,
        entered: Axes,
        *,
        by: object,
        reader: str,
        kept_axes: Axes = (),
        asked: bool = False,
        producer: str = "",
    ) -> Read:
        """Return how a value comes to a layout, from the nearest one that it has already.

        Args:
            entered: axes along which the reader leaves partial sums of its gradient.
            by: who reads it.
            kept_axes: axes that no move may use; nor may the value be taken from where it is cut along them.
            reader, producer, asked: for the list of redistributions.
        """
        value = node.meta["val"]
        held = [layout for layout in self._held[node] if not layout.used & set(kept_axes)]
        moves = [
            Move(self._mesh, layout, target, tuple(value.shape), node in self._differentiable, kept_axes)
            for layout in held
        ]
        chains = [plan_redistribution(move) for move in moves]
        best = min(range(len(moves)), key=lambda i: moves[i].total_elements(chains[i]))
        steps: list[tuple[Collective, TensorLayout | None]] = []
        layout, is_new = held[best], False
        for index, step in enumerate(chains[best]):
            after = step.after(layout)
            assert after.fits(self._mesh, value.shape), "of every size that the program is for"
            if index == len(chains[best]) - 1 and step.kind == "gather" and entered and set(step.axes) <= set(entered):
                # gather then enter along the same axes: the way back is one reduce-scatter
                steps.append((Collective("gather_enter", step.axes, step.dim), None))
                entered = tuple(axis for axis in entered if axis not in step.axes)
            else:
                steps.append((Collective(step.kind, step.axes, step.dim, step.from_dim), after))
                if after not in self._held[node]:
                    self._held[node].append(after)
            is_new |= self._take(node, layout, steps[-1][0])
            layout = after
        if is_new:
            moved_bytes = moves[best].total_elements(chains[best]) * value.dtype.itemsize
            ends = held[best].numbers(self._mesh), target.numbers(self._mesh)
            producer = producer or _describe(node)
            self.redistributions.append(Redistribution(producer, reader, *ends, moved_bytes, asked))
        if entered:
            steps.append((Collective("enter", entered), None))
            if len(steps) == 1:
                self._take(node, layout, steps[-1][0])
        if not steps:
            self._readers.setdefault((node, layout), {})[by] = None
        return Read(node.name, held[best], tuple(steps))

    def cut_by_all_readers(self, node: fx.Node, layout: TensorLayout) -> Collective | None:
        """Return the slice through which alone a value is read; None when there are other readers, or none."""
        readers = list(self._readers.get((node, layout), {}).values())
        only = readers[0] if len(readers) == 1 else None
        return only if only is not None and only.kind == "slice" else None

    def _take(self, node: fx.Node, layout: TensorLayout, collective: Collective) -> bool:
        """Note that a value passes a collective; returns whether it does so for the first time."""
        key = (node, layout, str(collective))
        self._readers.setdefault((node, layout), {})[str(collective)] = collective
        is_new = key not in self._made
        self._made.add(key)
        return is_new


def scatter_of(collective: Collective, summed: Axes) -> tuple[int, Axes] | None:
    """Return the dimension and axes by which a sum is left cut that is only read through this slice.

    A reduce-scatter moves half of what an all-reduce does.

    Args:
        summed: axes over which the sum goes.
    """
    axes = tuple(itertools.takewhile(frozenset(summed).__contains__, collective.axes))
    return (collective.dim, axes) if axes else None


def _describe(node: fx.Node) -> str:
    return describe_operator(node) if node.op == "call_function" else f"input {node.name}"


def describe_operator(node: fx.Node) -> str:
    """Return what a captured operator is and where it was called."""
    name = str(node.target).removesuffix(".default")
    return f"{name} in module {operator_call(node).module_path or '(top)'}"


def refuse_lists(node: fx.Node) -> None:
    """Refuse an operator that reads all results of another as one list.

    Raises:
        CaptureError: names the operator and the user's line.
    """
    for source in node.all_input_nodes:
        if not isinstance(source.meta.get("val"), torch.Tensor):
            raise CaptureError(
                f"{describe_operator(node)} reads all results of {source.target} as one list: give it the results "
                "themselves, "
                'or use parallel_mode="data_parallel", which needs no capture, where the loss is a mean over rows',
                where=user_line(node),
            )
