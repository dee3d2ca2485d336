"""Partition: the captured graph becomes the local program of this rank: decided first, then lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.lower import lower
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.strategies import OperatorStrategy


def partition(
    captured: CapturedGraph,
    mesh: Mesh,
    *,
    input_layouts: Sequence[TensorLayout],
    strategies: Mapping[str, OperatorStrategy],
    output_batch_axes: Axes,
    differentiable_inputs: frozenset[int] = frozenset(),
    stored: Mapping[str, TensorLayout] | None = None,
    is_strict: bool = False,
) -> LocalProgram:
    """Return the local program; the arguments are those of `Constraints`.

    Raises:
        StrategyError: an illegal strategy, or with `is_strict` a redistribution.
    """
    constraints = Constraints(
        input_layouts, strategies, {}, output_batch_axes, differentiable_inputs, stored or {}, is_strict
    )
    return lower(captured, decide(captured, mesh, constraints))
