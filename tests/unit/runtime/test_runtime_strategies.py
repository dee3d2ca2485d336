"""Illegal strategies are refused by operator, input and dimension; legal ones are accepted; what nobody cut follows."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from typing import Any

import operator_cases
import operator_cases_conv
import pytest
import torch
from asked_cases import every_third_fast
from law_graphs import MODULES
from operator_cases import OperatorCase, OperatorNetwork
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.partition import lower, partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.strategies import OperatorStrategy

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
WITH_LAWS_OF_THEIR_OWN = [*operator_cases.BINARY, *operator_cases_conv.BINARY]
MANY = 250
BY_NAME: dict[str, Any] = {case.name: case for name in MODULES for case in importlib.import_module(name).BINARY}


@cache
def captured(name: str) -> CapturedGraph:
    case = BY_NAME[name]
    values = case.values(torch.float64)
    given = [value for index, value in enumerate(values) if index not in case.parameters]
    shapes = [tuple(value.shape) for value in given]
    return capture(find_target(OperatorNetwork(case, values)), given, {}, input_shapes=shapes, parameter_shapes={})


def layouts_of(case: OperatorCase) -> list[TensorLayout]:
    return [TensorLayout.replicated(len(s)) for index, s in enumerate(case.shapes) if index not in case.parameters]


def partitioned(name: str, strategy: Any, world_size: int = 4) -> LocalProgram:
    layouts = layouts_of(BY_NAME[name])
    return partition(
        captured(name),
        build_mesh(world_size),
        input_layouts=layouts,
        strategies={"op": OperatorStrategy(strategy)},
        output_batch_axes=(),
        differentiable_inputs=frozenset(range(len(layouts))),
    )


@pytest.mark.parametrize("case", every_third_fast(WITH_LAWS_OF_THEIR_OWN), ids=lambda case: case.name)
@pytest.mark.parametrize("world_size", [4, 6, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8))])
def test_every_legal_strategy_is_accepted_and_kept(case: OperatorCase, world_size: int) -> None:
    if world_size == 8 and case in operator_cases_conv.BINARY:
        world_size = 3  # their outputs are too short for 8 parts
    for strategy in case.legal(world_size):
        operators = partitioned(case.name, strategy, world_size).operators
        assert strategy in [operator.strategy for operator in operators if operator.origin == "user"]


@pytest.mark.parametrize("name", every_third_fast(BY_NAME))
def test_every_illegal_strategy_is_refused_by_operator_input_and_dimension(name: str) -> None:
    case = BY_NAME[name]
    candidates = list(case.candidates((1, 2, 4, 3)) if sum(map(len, case.shapes)) < 8 else case.candidates((1, 2)))
    many = 700 if case in operator_cases.BINARY else MANY
    reasons = {s: case.why_illegal(s, 4) for s in candidates[:: max(1, len(candidates) // many)]}
    assert any(reasons.values())
    for strategy, why in reasons.items():
        if not why:
            continue
        with pytest.raises(StrategyError) as caught:
            partitioned(name, strategy)
        text = str(caught.value)
        assert text.startswith("aten.") and " in module op: " in text and "\n" not in text, text
        if case in WITH_LAWS_OF_THEIR_OWN and why != "product":
            assert "dimension " in text and "input " in text, (strategy, text)
        if case in operator_cases.BINARY:
            nearest = ast.literal_eval(text.rpartition("the nearest legal strategy is ")[2])
            assert case.why_illegal(nearest, 4) == "", text


ROWS_OF_2, ROWS_OF_4 = "slice dim 2 over axes 0", "slice dim 2 over axes 0,1"
GROUPS = "in 4 groups, which must stay whole; the nearest legal number is 4"


@pytest.mark.parametrize(
    ("name", "strategy", "world_size", "text"),
    [
        ("linear", ((1, 1, 1), (1, 1)), 4, "strategy (1, 1, 1) of input 0 has 3 numbers for 2 dimensions; give one"),
        ("linear", ((1,), (1, 1)), 4, "strategy (1,) of input 0 has 1 numbers for 2 dimensions"),
        ("linear", ((1, 1), (1, 1), (1,)), 4, "has 3 tuples for 2 inputs; give one tuple for each tensor input"),
        ("linear", ((1, 2), (1, 1)), 4, "dimension 1 of input 1 is cut into 1 but the same dimension of another input"),
        (
            "linear",
            ((8, 1), (1, 1)),
            4,
            "dimension 0 of input 0 has size 4, which 8 does not divide; the nearest legal",
        ),
        ("linear", ((8, 1), (1, 1)), 4, "the nearest legal strategy is ((4, 1), (1, 1))"),
        ("linear", ((2, 4), (1, 4)), 4, "the nearest legal strategy is ((1, 4), (1, 4))"),
        ("linear-odd", ((6, 1), (1, 1), (1,)), 4, "the nearest legal strategy is ((2, 1), (1, 1), (1,))"),
        ("linear-bias", ((3, 1), (1, 1)), 4, "the nearest legal strategy is ((4, 1), (1, 1), (1,))"),
        ("linear-odd", ((4, 1), (1, 1), (1,)), 4, "size 6, which 4 does not divide; the nearest legal number is 3"),
        ("linear", ((4, 2), (1, 2)), 4, "strategy ((4, 2), (1, 2)) makes 8 parts for 4 ranks"),
        ("linear-odd", ((3, 1), (1, 1), (1,)), 4, "3 parts do not divide 4 ranks"),
        ("addmm-scaled", ((1,), (1, 4), (4, 1)), 4, "dimension 1 of input 1 must stay whole but is cut into 4; give 1"),
        ("mul-broadcast-right", ((1, 2), (1,)), 4, "dimension 0 of input 1 is cut into 1"),
        ("no-rule", ((2, 1), (1, 1)), 4, "dimension 0 of input 0 must stay whole"),
        ("conv2d", ((1, 1, 1, 1), (1, 1, 3, 1)), 4, "dimension 2 of input 1 must stay whole but is cut into 3; give 1"),
        ("conv2d-strided", ((1, 1, 8, 1), (1, 1, 1, 1)), 8, "has size 8, but its output has size 4, which must be cut"),
        ("conv2d-groups", ((1, 8, 1, 1), (1, 1, 1, 1)), 8, f"dimension 1 of input 0 has size 8, {GROUPS}"),
        ("group-norm", ((1, 8, 1), (8,), (8,)), 8, f"dimension 1 of input 0 has size 8, {GROUPS}"),
        ("avg-pool1d-ceil", ((1, 1, 2),), 4, "dimension 2 of input 0 must stay whole but is cut into 2; give 1"),
        (
            "batch-norm-2d",
            ((1, 4, 1, 1), (4,), (4,)),
            4,
            "size 2, which 4 does not divide; the nearest legal number is 2",
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
        ("conv2d", ((1, 1, 2, 1), (1, 1, 1, 1)), [ROWS_OF_2, "halo dim 2, 4 rows from -1 every 2 over axes 0"]),
        ("conv2d-1x1-strided", ((1, 1, 1, 4), (1, 1, 1, 1)), ["slice dim 3 over axes 0,1"]),
        ("conv1d-valid", ((1, 1, 4), (1, 1, 1)), [ROWS_OF_4, "halo dim 2, 5 rows from 0 every 1 over axes 0,1"]),
        ("max-pool2d", ((1, 1, 4, 1),), [ROWS_OF_4]),
        ("max-pool2d-overlapping", ((1, 1, 4, 1),), [ROWS_OF_4, "halo dim 2, 3 rows from -1 every 2 over axes 0,1"]),
        ("global-average", ((1, 1, 4, 1),), [ROWS_OF_4, "all_reduce over axes 0,1"]),
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
    ("name", "given", "kept"),
    [
        ("linear-3d", ((2, 2), (1, 2)), ((2, 1, 2), (1, 2))),  # that of a matrix serves an input with more dimensions
        ("linear-bias", ((1, 1), (4, 1)), ((1, 1), (4, 1), (4,))),  # the bias follows the weight
    ],
)
def test_what_a_strategy_leaves_out_is_added(name: str, given: Any, kept: Any) -> None:
    (operator,) = partitioned(name, given).operators
    assert operator.strategy == kept


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


def test_strategies_are_found_by_the_path_of_their_module() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert shard(network[1][0], ((1, 1), [2, 1])) is network[1][0]
    assert strategies_of(network) == {"1.0": OperatorStrategy(((1, 1), (2, 1)))}


class Cumulated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1)


def chain(strategies: dict[str, Any], last: nn.Module | None = None) -> LocalProgram:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), last or nn.Softmax(-1))
    for path, strategy in strategies.items():
        shard(network.get_submodule(path), strategy)
    graph = capture(find_target(network), [torch.ones(8, 8)], {}, input_shapes=[(8, 8)], parameter_shapes={})
    mesh = build_mesh(4)
    return partition(
        graph,
        mesh,
        input_layouts=[TensorLayout((mesh.axes, ()))],
        strategies=strategies_of(network),
        output_batch_axes=mesh.axes,
    )


def origins(program: LocalProgram) -> list[tuple[str, str, Any]]:
    return [(o.operator, o.origin, o.strategy[0]) for o in program.operators]


def test_operator_without_strategy_is_data_parallel_and_the_cheap_ones_follow() -> None:
    assert origins(chain({})) == [
        ("aten.linear", "data parallel", (4, 1)),
        ("aten.relu", "follows", (4, 1)),
        ("aten.linear", "data parallel", (4, 1)),
        ("aten.softmax.int", "follows", (4, 1)),
    ]


def test_cheap_operator_keeps_the_cut_of_a_strategy_before_it() -> None:
    program = chain({"0": ((1, 1), (4, 1), (4,)), "2": ((1, 4), (1, 4))})
    assert origins(program) == [
        ("aten.linear", "user", (1, 1)),
        ("aten.relu", "follows", (1, 4)),
        ("aten.linear", "user", (1, 4)),
        ("aten.softmax.int", "follows", (4, 1)),
    ]
    texts = [collective for operator in program.operators for collective in operator.collectives]
    assert texts == ["gather dim 0 over axes 0,1", "reduce_scatter dim 0 over axes 0,1"]


def test_dimension_that_must_stay_whole_hands_its_cut_to_another() -> None:
    program = chain({"2": ((1, 1), (4, 1), (4,))}, last=Cumulated())
    cumsum = program.operators[-1]
    assert cumsum.strategy == ((4, 1),)
    assert cumsum.collectives == ("exchange dim 1 -> 0 over axes 0,1",)
    assert program.operators[2].collectives == ("gather_enter dim 0 over axes 0,1",)


def test_batch_that_the_world_does_not_divide_is_cut_as_far_as_it_goes() -> None:
    layer = nn.Linear(8, 8)
    graph = capture(find_target(layer), [torch.ones(6, 8)], {}, input_shapes=[(6, 8)], parameter_shapes={})
    whole = [TensorLayout.replicated(2)]
    program = partition(graph, build_mesh(4), input_layouts=whole, strategies={}, output_batch_axes=())
    assert program.operators[0].strategy[0] == (2, 1)


class OneWeightTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.b(torch.tanh(self.a(x)))
        return x


def test_weight_that_was_cut_for_one_use_is_taken_as_it_is_stored_for_a_use_that_sums_over_that_cut() -> None:
    network = OneWeightTwice()
    shard(network.b, ((1, 4), (1, 4)))
    shapes = {name: tuple(value.shape) for name, value in network.named_parameters()}
    graph = capture(find_target(network), [torch.ones(4, 8)], {}, input_shapes=[(4, 8)], parameter_shapes=shapes)
    program = partition(
        graph,
        build_mesh(4),
        input_layouts=[TensorLayout.replicated(2)],
        strategies=strategies_of(network),
        output_batch_axes=(),
    )
    assert [operator.strategy for operator in program.operators if operator.origin == "user"] == [((1, 4), (1, 4))] * 2


@pytest.mark.parametrize("case", every_third_fast(operator_cases.BINARY), ids=lambda case: case.name)
def test_decisions_are_lowered_to_the_same_graph_every_time(case: OperatorCase) -> None:
    for strategy in list(case.legal(4))[::5]:
        given = Constraints(layouts_of(case), {"op": OperatorStrategy(strategy)})
        decisions = decide(captured(case.name), build_mesh(4), given)
        one, other = (lower(captured(case.name), decisions) for _ in range(2))
        assert (str(one.graph), one.operators) == (str(other.graph), other.operators)
