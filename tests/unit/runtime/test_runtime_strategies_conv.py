"""Convolutional operators: what may be cut is accepted as it is, what may not is refused with the nearest that may."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from asked_cases import every_third_fast, one_fast
from operator_cases import OperatorCase, OperatorNetwork
from operator_cases_conv import BINARY

from msrun.errors import StrategyError
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.strategies import OperatorStrategy

MANY = 250
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
BY_NAME = {case.name: case for case in BINARY}


@cache
def captured(name: str) -> CapturedGraph:
    case = BY_NAME[name]
    values = case.values(torch.float64)
    given = [value for index, value in enumerate(values) if index not in case.parameters]
    shapes = [tuple(value.shape) for value in given]
    network = OperatorNetwork(case, values)
    return capture(find_target(network), given, {}, input_shapes=shapes, parameter_shapes={})


def partitioned(name: str, strategy: Any, world_size: int = 4) -> LocalProgram:
    case = BY_NAME[name]
    given = [shape for index, shape in enumerate(case.shapes) if index not in case.parameters]
    return partition(
        captured(name),
        build_mesh(world_size),
        input_layouts=[TensorLayout.replicated(len(shape)) for shape in given],
        strategies={"op": OperatorStrategy(strategy)},
        output_batch_axes=(),
        differentiable_inputs=frozenset(range(len(given))),
    )


@pytest.mark.parametrize("case", every_third_fast(BINARY), ids=lambda case: case.name)
@pytest.mark.parametrize("world_size", one_fast(4, 2, 6))
def test_every_legal_strategy_is_accepted_and_kept(case: OperatorCase, world_size: int) -> None:
    for strategy in case.legal(world_size):
        operators = partitioned(case.name, strategy, world_size).operators
        assert strategy in [operator.strategy for operator in operators if operator.origin == "user"]


@pytest.mark.parametrize("case", every_third_fast(BINARY), ids=lambda case: case.name)
def test_every_illegal_strategy_is_refused_by_operator_input_and_dimension(case: OperatorCase) -> None:
    candidates = list(case.candidates((1, 2, 4, 3)))
    refused = 0
    for strategy in candidates[:: max(1, len(candidates) // MANY)]:
        why = case.why_illegal(strategy, 4)
        if not why:
            continue
        refused += 1
        with pytest.raises(StrategyError) as caught:
            partitioned(case.name, strategy)
        text = str(caught.value)
        assert text.startswith("aten."), text
        assert " in module op: " in text
        assert "\n" not in text
        if why != "product":
            assert "dimension " in text, (strategy, text)
            assert "input " in text, (strategy, text)
    assert refused


@pytest.mark.parametrize(
    ("name", "strategy", "world_size", "text"),
    [
        ("conv2d", ((1, 1, 1, 1), (1, 1, 3, 1)), 4, "dimension 2 of input 1 must stay whole but is cut into 3; give 1"),
        ("conv2d", ((1, 2, 1, 1), (1, 1, 1, 1)), 4, "is cut into 1 but the same dimension of another input into 2"),
        (
            "conv2d-strided",
            ((1, 1, 8, 1), (1, 1, 1, 1)),
            8,
            "dimension 2 of input 0 has size 8, but its output has size 4, which must be cut into as many parts",
        ),
        (
            "conv2d-groups",
            ((1, 8, 1, 1), (1, 1, 1, 1)),
            8,
            "dimension 1 of input 0 has size 8, in 4 groups, which must stay whole; the nearest legal number is 4",
        ),
        (
            "conv2d-depthwise",
            ((1, 1, 1, 1), (8, 1, 1, 1)),
            8,
            "dimension 0 of input 1 has size 8, in 4 groups, which must stay whole; the nearest legal number is 4",
        ),
        (
            "group-norm",
            ((1, 8, 1), (8,), (8,)),
            8,
            "dimension 1 of input 0 has size 8, in 4 groups, which must stay whole; the nearest legal number is 4",
        ),
        ("avg-pool1d-ceil", ((1, 1, 2),), 4, "dimension 2 of input 0 must stay whole but is cut into 2; give 1"),
        ("adaptive-average", ((1, 1, 8, 1),), 8, "but its output has size 4, which must be cut into as many parts"),
        ("pixel-shuffle", ((1, 8, 1, 1),), 8, "but its output has size 4, which must be cut into as many parts"),
        (
            "batch-norm-2d",
            ((1, 4, 1, 1), (4,), (4,)),
            4,
            "has size 2, which 4 does not divide; the nearest legal number is 2",
        ),
    ],
)
def test_message_says_what_is_wrong_and_what_is_legal(name: str, strategy: Any, world_size: int, text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        partitioned(name, strategy, world_size)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "strategy", "expected"),
    [
        ("conv2d", ((2, 1, 1, 1), (1, 1, 1, 1)), ["slice dim 0 over axes 0"]),
        ("conv2d", ((1, 1, 1, 1), (4, 1, 1, 1)), ["enter over axes 0,1"]),
        ("conv2d", ((1, 2, 1, 1), (1, 2, 1, 1)), ["slice dim 1 over axes 0", "all_reduce over axes 0"]),
        (
            "conv2d",
            ((1, 1, 2, 2), (1, 1, 1, 1)),
            [
                "slice dim 2 over axes 0",
                "slice dim 3 over axes 1",
                "halo dim 2, 4 rows from -1 every 2 over axes 0",
                "halo dim 3, 4 rows from -1 every 2 over axes 1",
            ],
        ),
        ("conv2d-1x1-strided", ((1, 1, 1, 4), (1, 1, 1, 1)), ["slice dim 3 over axes 0,1"]),
        (
            "conv1d-valid",
            ((1, 1, 4), (1, 1, 1)),
            ["slice dim 2 over axes 0,1", "halo dim 2, 5 rows from 0 every 1 over axes 0,1"],
        ),
        ("max-pool2d", ((1, 1, 4, 1),), ["slice dim 2 over axes 0,1"]),
        (
            "max-pool2d-overlapping",
            ((1, 1, 4, 1),),
            ["slice dim 2 over axes 0,1", "halo dim 2, 3 rows from -1 every 2 over axes 0,1"],
        ),
        ("global-average", ((1, 1, 4, 1),), ["slice dim 2 over axes 0,1", "all_reduce over axes 0,1"]),
        ("layer-norm", ((4, 1), (1,), (1,)), ["slice dim 0 over axes 0,1"]),
        ("layer-norm", ((1, 4), (4,), (4,)), ["slice dim 1 over axes 0,1", "gather_enter dim 0 over axes 0,1"]),
        ("rms-norm", ((1, 1, 2), (2,)), ["slice dim 2 over axes 0", "all_reduce over axes 0", "enter over axes 0"]),
        ("group-norm", ((1, 4, 1), (4,), (4,)), ["slice dim 1 over axes 0,1"]),
    ],
)
def test_only_what_a_cut_needs_is_sent(name: str, strategy: Any, expected: list[str]) -> None:
    (operator,) = [o for o in partitioned(name, strategy).operators if o.origin == "user"]
    assert list(operator.collectives) == expected


@pytest.mark.parametrize(
    ("strategy", "gathers"),
    [
        (((2, 1, 2, 1), (1,), (1,)), ["gather_enter dim 0 over axes 0,1"]),
        (((2, 2, 1, 1), (2,), (2,)), ["gather_enter dim 0 over axes 0"]),
        (((1, 2, 1, 1), (2,), (2,)), []),
    ],
)
def test_statistics_of_a_batch_travel_in_one_message_along_what_cuts_it(strategy: Any, gathers: list[str]) -> None:
    (operator,) = [o for o in partitioned("batch-norm-2d", strategy).operators if o.origin == "user"]
    assert [text for text in operator.collectives if text.startswith("gather_enter")] == gathers


@pytest.mark.parametrize("case", [case for case in BINARY if "transpose" in case.name], ids=lambda case: case.name)
def test_part_of_a_transposed_convolution_reads_its_own_rows_and_keeps_its_own_outputs(case: OperatorCase) -> None:
    for strategy in case.legal(4):
        cuts = [dim for dim, parts in enumerate(strategy[0]) if dim >= 2 and parts > 1]
        nodes = list(partitioned(case.name, strategy).graph.nodes)
        (whole,) = (n.meta["val"].shape for n in captured(case.name).graph.nodes if n.op == "call_function")
        kept = {node.args[1]: node.args[3] for node in nodes if node.target is torch.ops.aten.narrow.default}
        assert kept == {dim: whole[dim] // strategy[0][dim] for dim in cuts}
        halos = [node.kwargs["collective"] for node in nodes if "collective" in node.kwargs]
        for halo in (halo for halo in halos if halo.window is not None):
            assert halo.window.size == case.shapes[0][halo.dim]
            assert halo.window.step == case.shapes[0][halo.dim] // strategy[0][halo.dim]
