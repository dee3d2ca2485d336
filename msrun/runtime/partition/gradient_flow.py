"""Where gradients flow in a captured graph during a training step, told from global shapes."""

from __future__ import annotations

import operator
from collections.abc import Set

from torch import Tensor, fx

from msrun.runtime.capture.assignment import layout_constraint
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.partition.decide import is_whole_operator
from msrun.runtime.partition.local_work import LocalWorks, has_gradient
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import operator_call


class GradientFlow:
    """Which values of a captured graph have a gradient, and to which one comes back in a step.

    Gradients enter at the loss: the first result that is a floating-point scalar, or else every result with one.
    """

    def __init__(
        self, captured: CapturedGraph, works: LocalWorks, differentiable_inputs: frozenset[int] = frozenset()
    ) -> None:
        self.differentiable: Set[fx.Node] = _differentiable(captured, works, differentiable_inputs)
        """Nodes that would be given a gradient."""
        self.reached: Set[fx.Node] = self._find_reached(captured)
        """Nodes that get one."""

    def _find_reached(self, captured: CapturedGraph) -> set[fx.Node]:
        results = [node for node in captured.outputs if isinstance(node, fx.Node) and node in self.differentiable]
        waiting = [node for node in results if not node.meta["val"].shape][:1] or results
        reached: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in reached and node in self.differentiable:
                reached.add(node)
                waiting += node.all_input_nodes
        return reached


def _differentiable(captured: CapturedGraph, works: LocalWorks, inputs: frozenset[int]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    given = {captured.inputs[index] for index in inputs}
    for node in captured.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            is_trained = node.name in captured.parameters and node.meta["val"].requires_grad
            if is_trained or node.name in given:
                found.add(node)
        elif any(source in found for source in node.all_input_nodes) and _passes(node, works, found):
            found.add(node)
    return found


def _passes(node: fx.Node, works: LocalWorks, differentiable: Set[fx.Node]) -> bool:
    """Return whether an operator whose inputs have gradients gives its result one."""
    value = node.meta.get("val")
    rule = find_rule(node.target)
    if node.target is operator.getitem or layout_constraint(node) is not None or is_whole_operator(node, rule):
        return not isinstance(value, Tensor) or has_gradient(value.dtype)
    rule, call = rule or REPLICATED, operator_call(node)
    needed = [source in differentiable for source in call.tensors]
    return works.of(call, rule, rule.form(call), {}, differentiable=needed).is_differentiable
