"""Illegal strategies are refused by operator, input and dimension; legal ones are accepted; what nobody cut follows."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest
import torch
from asked_cases import every_third_fast
from operator_cases import BINARY, OperatorCase, OperatorNetwork
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

WITH_RULES = [case for case in BINARY if case.labels.strip(".,")]
MANY = 700


@cache
def captured(name: str) -> CapturedGraph:
    case = next(case for case in BINARY if case.name == name)
    values = case.values(torch.float64)
    network = OperatorNetwork(case, values)
    given = [value for index, value in enumerate(values) if index not in case.parameters]
    shapes = [tuple(value.shape) for value in given]
    return capture(find_target(network), given, {}, input_shapes=shapes, parameter_shapes={})


def partitioned(case: OperatorCase, strategy: Any, world_size: int) -> LocalProgram:
    given = [shape for index, shape in enumerate(case.shapes) if index not in case.parameters]
    return partition(
        captured(case.name),
        build_mesh(world_size),
        input_layouts=[TensorLayout.replicated(len(shape)) for shape in given],
        strategies={"op": OperatorStrategy(strategy)},
        output_batch_axes=(),
    )


@pytest.mark.parametrize("case", every_third_fast(BINARY), ids=lambda case: case.name)
@pytest.mark.parametrize("world_size", [4, 6, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8))])
def test_every_legal_strategy_is_accepted_and_kept(case: OperatorCase, world_size: int) -> None:
    for strategy in case.legal(world_size):
        operators = partitioned(case, strategy, world_size).operators
        assert strategy in [operator.strategy for operator in operators if operator.origin == "user"]


@pytest.mark.parametrize("case", every_third_fast(BINARY), ids=lambda case: case.name)
def test_every_illegal_strategy_is_refused_by_operator_input_and_dimension(case: OperatorCase) -> None:
    candidates = list(case.candidates((1, 2, 4, 3)))
    tried = candidates[:: max(1, len(candidates) // MANY)]
    refused = 0
    for strategy in tried:
        why = case.why_illegal(strategy, 4)
        if not why:
            continue
        refused += 1
        with pytest.raises(StrategyError) as caught:
            partitioned(case, strategy, 4)
        text = str(caught.value)
        assert text.startswith("aten."), text
        assert " in module op: " in text
        assert "\n" not in text
        nearest = ast.literal_eval(text.rpartition("the nearest legal strategy is ")[2])
        assert case.why_illegal(nearest, 4) == "", text
        if why != "product":
            assert "dimension " in text, (strategy, text)
            assert "input " in text, (strategy, text)
    assert refused


@pytest.mark.parametrize(
    ("name", "strategy", "text"),
    [
        ("linear", ((1, 1, 1), (1, 1)), "strategy (1, 1, 1) of input 0 has 3 numbers for 2 dimensions; give one"),
        ("linear", ((1,), (1, 1)), "strategy (1,) of input 0 has 1 numbers for 2 dimensions"),
        ("linear", ((1, 1), (1, 1), (1,)), "has 3 tuples for 2 inputs; give one tuple for each tensor input"),
        ("linear", ((1, 2), (1, 1)), "dimension 1 of input 1 is cut into 1 but the same dimension of another input"),
        ("linear", ((8, 1), (1, 1)), "dimension 0 of input 0 has size 4, which 8 does not divide; the nearest legal"),
        ("linear", ((8, 1), (1, 1)), "the nearest legal strategy is ((4, 1), (1, 1))"),
        ("linear", ((2, 4), (1, 4)), "the nearest legal strategy is ((1, 4), (1, 4))"),
        ("linear-odd", ((6, 1), (1, 1), (1,)), "the nearest legal strategy is ((2, 1), (1, 1), (1,))"),
        ("linear-bias", ((3, 1), (1, 1)), "the nearest legal strategy is ((4, 1), (1, 1), (1,))"),
        ("linear-odd", ((4, 1), (1, 1), (1,)), "size 6, which 4 does not divide; the nearest legal number is 3"),
        ("linear", ((4, 2), (1, 2)), "strategy ((4, 2), (1, 2)) makes 8 parts for 4 ranks"),
        ("linear-odd", ((3, 1), (1, 1), (1,)), "3 parts do not divide 4 ranks"),
        ("addmm-scaled", ((1,), (1, 4), (4, 1)), "dimension 1 of input 1 must stay whole but is cut into 4; give 1"),
        ("mul-broadcast-right", ((1, 2), (1,)), "dimension 0 of input 1 is cut into 1"),
        ("no-rule", ((2, 1), (1, 1)), "dimension 0 of input 0 must stay whole"),
    ],
)
def test_message_says_what_is_wrong_and_what_is_legal(name: str, strategy: Any, text: str) -> None:
    case = next(case for case in BINARY if case.name == name)
    with pytest.raises(StrategyError) as caught:
        partitioned(case, strategy, 4)
    assert text in str(caught.value)


def test_strategy_of_a_matrix_serves_an_input_with_more_dimensions() -> None:
    case = next(case for case in BINARY if case.name == "linear-3d")
    (operator,) = partitioned(case, ((2, 2), (1, 2)), 4).operators
    assert operator.strategy == ((2, 1, 2), (1, 2))


def test_bias_may_be_left_out_of_a_strategy_and_follows_the_weight() -> None:
    case = next(case for case in BINARY if case.name == "linear-bias")
    (operator,) = partitioned(case, ((1, 1), (4, 1)), 4).operators
    assert operator.strategy == ((1, 1), (4, 1), (4,))


@pytest.mark.parametrize(
    "strategy", [(), ((0, 1),), ((-1,),), ((1.0, 2),), ((True, 1),), (1, 2), 3, (("1", 1),), None, ((1, None),)]
)
def test_strategy_that_is_not_tuples_of_numbers_is_refused_at_once(strategy: Any) -> None:
    with pytest.raises(StrategyError, match="give one tuple of whole numbers above 0 for each input"):
        shard(nn.Linear(2, 2), strategy)


def test_only_modules_take_a_strategy() -> None:
    with pytest.raises(StrategyError, match="a torch module is expected"):
        shard(torch.ones(2), ((1, 1),))  # type: ignore[arg-type]


def test_strategies_are_found_by_the_path_of_their_module() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert shard(network[1][0], ((1, 1), [2, 1])) is network[1][0]
    assert strategies_of(network) == {"1.0": OperatorStrategy(((1, 1), (2, 1)))}


class Cumulated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1)


def chain(
    strategies: dict[str, Any], world_size: int = 4, rows: int = 8, last: type[nn.Module] = nn.Softmax
) -> LocalProgram:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), last(*[-1][: last is nn.Softmax]))
    for path, strategy in strategies.items():
        shard(network.get_submodule(path), strategy)
    value = torch.ones(rows, 8)
    graph = capture(find_target(network), [value], {}, input_shapes=[(rows, 8)], parameter_shapes={})
    mesh = build_mesh(world_size)
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
    program = chain({"2": ((1, 1), (4, 1), (4,))}, last=Cumulated)
    cumsum = program.operators[-1]
    assert cumsum.strategy == ((4, 1),)
    assert cumsum.collectives == ("exchange dim 1 -> 0 over axes 0,1",)
    assert program.operators[2].collectives == ("gather_enter dim 0 over axes 0,1",)


def test_batch_that_the_world_does_not_divide_is_cut_as_far_as_it_goes() -> None:
    network = nn.Linear(8, 8)
    graph = capture(find_target(network), [torch.ones(6, 8)], {}, input_shapes=[(6, 8)], parameter_shapes={})
    program = partition(
        graph, build_mesh(4), input_layouts=[TensorLayout.replicated(2)], strategies={}, output_batch_axes=()
    )
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


@pytest.mark.parametrize("case", every_third_fast(WITH_RULES), ids=lambda case: case.name)
def test_decisions_are_lowered_to_the_same_graph_every_time(case: OperatorCase) -> None:
    graph, mesh = captured(case.name), build_mesh(4)
    given = [shape for index, shape in enumerate(case.shapes) if index not in case.parameters]
    layouts = [TensorLayout.replicated(len(shape)) for shape in given]
    for strategy in list(case.legal(4))[::5]:
        decisions = decide(graph, mesh, Constraints(layouts, {"op": OperatorStrategy(strategy)}))
        one, other = (lower(graph, decisions) for _ in range(2))
        assert str(one.graph) == str(other.graph)
        assert one.operators == other.operators
