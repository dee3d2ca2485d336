"""Moves: values of the local graph brought to the layouts in which operators read them, each move made once."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from msrun.errors import CaptureError
from msrun.runtime.graph.collectives import Collective
from msrun.runtime.graph.operators.rule import LocalBuilder, operator_call, user_line
from msrun.runtime.graph.strictness import Redistribution
from msrun.runtime.layout import Axes, TensorLayout
from msrun.runtime.redistribution import Move, plan_redistribution


class Moves:
    """Adds redistributions to a local graph. Owned by the partition."""

    def __init__(self, build: LocalBuilder, differentiable: Set[fx.Node]) -> None:
        self._build = build
        self._differentiable = differentiable
        self._held: dict[fx.Node, list[tuple[fx.Node, TensorLayout]]] = {}
        """captured node -> its value in every layout that it has been brought to"""
        self._made: dict[tuple[fx.Node, str], fx.Node] = {}
        """(local node, collective) -> result: two readers of one value share its redistribution"""
        self.redistributions: list[Redistribution] = []

    def hold(self, node: fx.Node, local: fx.Node, layout: TensorLayout) -> None:
        """Say where a captured node's value is."""
        self._held.setdefault(node, [(local, layout)])

    def bring(
        self,
        node: fx.Node,
        wanted: TensorLayout,
        entered: Axes,
        *,
        reader: str,
        kept_axes: Axes = (),
        asked: bool = False,
        producer: str = "",
    ) -> fx.Node:
        """Return a value in the wanted layout, moved from the nearest one that it has already.

        Args:
            entered: axes along which the reader leaves partial sums of its gradient.
            kept_axes: axes that no move may use.
            reader, producer, asked: for the list of redistributions.
        """
        held, value = self._held[node], node.meta["val"]
        moves = [
            Move(self._build.mesh, layout, wanted, tuple(value.shape), node in self._differentiable, kept_axes)
            for _, layout in held
        ]
        chains = [plan_redistribution(move) for move in moves]
        best = min(range(len(moves)), key=lambda i: moves[i].total_elements(chains[i]))
        (local, layout), steps = held[best], chains[best]
        made = len(self._made)
        for index, step in enumerate(steps):
            layout = step.after(layout)
            if index == len(steps) - 1 and step.kind == "gather" and entered and set(step.axes) <= set(entered):
                # gather then enter along the same axes: the way back is one reduce-scatter
                local = self._make(local, Collective("gather_enter", step.axes, step.dim))
                entered = tuple(axis for axis in entered if axis not in step.axes)
                continue
            local = self._make(local, Collective(step.kind, step.axes, step.dim, step.from_dim))
            if all(known != layout for _, known in held):
                held.append((local, layout))
        if len(self._made) > made:
            moved_bytes = moves[best].total_elements(steps) * value.dtype.itemsize
            source, target = (each.numbers(self._build.mesh) for each in (moves[best].source, wanted))
            producer = producer or _describe(node)
            self.redistributions.append(Redistribution(producer, reader, source, target, moved_bytes, asked))
        return self._make(local, Collective("enter", entered)) if entered else local

    def _make(self, local: fx.Node, collective: Collective) -> fx.Node:
        key = (local, str(collective))
        if key not in self._made:
            self._made[key] = self._build.collective(collective, local)
        return self._made[key]


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
                'themselves, or use parallel_mode="data_parallel", which needs no capture',
                where=user_line(node),
            )
