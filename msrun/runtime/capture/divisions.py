"""Wrappers that divide the batch, in a captured graph: it is one part's program, so nothing may stand around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.capture.marked_calls import calls_of, erase_marks, skip_marks


class Wrapper(Protocol):
    """A network whose batch is divided; its calls are marked with its number."""

    number: int


def check_wrappers(
    graph: fx.Graph, wrappers: Sequence[Wrapper], inputs: Collection[str], results: Collection[int]
) -> None:
    """Check that the step hands its own batch to the wrappers and returns what they return; take their marks out.

    Args:
        wrappers: outermost first.
        inputs: names of the placeholders of the step's own batch.
        results: indexes of the outputs that are the step's results.

    Raises:
        StrategyError: a wrapper is not called, or twice, on something that is computed, or its result is used.
    """
    if not wrappers:
        return
    calls = {wrapper.number: calls_of(graph, wrapper.number) for wrapper in wrappers}
    for wrapper in wrappers:
        name = type(wrapper).__name__
        if not calls[wrapper.number]:
            raise StrategyError(f"{name} is not called by the step that uses its network: call it, or take it out")
        if len(calls[wrapper.number]) > 1:
            raise StrategyError(f"{name} is called twice in one step: call it once, on the whole batch")
        entering, _ = calls[wrapper.number][0]
        if any(skip_marks(mark).name not in inputs for mark in entering):
            raise StrategyError(
                f"{name} is called with tensors that the step has computed, so its copies cannot be interleaved: hand "
                "the step's own inputs to it, and put what you do with them before into its network"
            )
    own = {node for wrapper in wrappers for node in calls[wrapper.number][0][1]}
    output: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    for value in (output[index] for index in sorted(results)):
        if isinstance(value, fx.Node) and value not in own and skip_marks(value).name not in inputs:
            raise StrategyError(
                "the step computes with the result of a network whose batch is divided (MicroBatchInterleaved, "
                "GradAccumulation, Pipeline), so its parts cannot be run apart: return it as it is, and put the rest "
                "into the network"
            )
    for wrapper in wrappers:
        for entering, leaving in calls[wrapper.number]:
            erase_marks([*entering, *leaving])
