"""Sizes that differ from call to call: symbols while a program is made, numbers that know their origin afterwards."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.partition import lower
from msrun.runtime.schedule.segments import cut_segments
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.sizes import common_divisor, settle, settled

ROWS, TOKENS, WIDTH = 4, 6, 8
pytestmark = pytest.mark.filterwarnings("ignore:Raw Sym")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        halves = self.layer(x).view(rows, tokens, 2, WIDTH).transpose(1, 2).reshape(rows, 2 * tokens, WIDTH)
        return F.softmax(halves, 1).sum() / tokens**0.5


def captured(network: nn.Module | None = None, free: Any = ((0, 0), (0, 1))) -> CapturedGraph:
    x = torch.ones(ROWS, TOKENS, WIDTH)
    target = find_target(network or Net())
    return capture(target, [x], {}, input_shapes=[tuple(x.shape)], parameter_shapes={}, free=free, keeps_sizes=True)


def symbols_of(graph: fx.Graph) -> list[str]:
    found: list[Any] = []
    for node in graph.nodes:
        found += pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(node.meta.get("val"), Tensor):
            found += node.meta["val"].shape
    return [str(value) for value in found if isinstance(value, torch.SymInt | torch.SymFloat)]


def test_a_plan_asks_of_a_size_only_that_its_parts_are_equal() -> None:
    graph, mesh = captured(), build_mesh(2)
    decide(graph, mesh, Constraints([TensorLayout((mesh.axes, (), ()))]))
    assert [sizes.why_not([(ROWS + 2, TOKENS + 5, WIDTH)]) for sizes in graph.sizes] == ["", ""]
    assert "Mod(size[0][0], 2)" in graph.sizes[-1].why_not([(ROWS + 1, TOKENS, WIDTH)])
    assert graph.sizes[-1].is_free


def test_a_size_of_one_is_another_program() -> None:
    assert captured().sizes[0].why_not([(ROWS, 1, WIDTH)])


@pytest.mark.parametrize(("rows", "tokens"), [(ROWS, TOKENS), (6, 3), (2, 9)])
def test_a_program_for_any_size_computes_what_the_network_does(rows: int, tokens: int) -> None:
    network = Net()
    graph = captured(network)
    program = lower(graph, decide(graph, build_mesh(1), Constraints([TensorLayout.replicated(3)])))
    settle(program.graph)
    assert not symbols_of(program.graph)
    (segment,) = cut_segments(program, {})
    segment.use(graph.sizes[-1].find([(rows, tokens, WIDTH)]))
    x = torch.randn(rows, tokens, WIDTH)
    given = {"input_0": x, "p_layer_weight": network.layer.weight, "p_layer_bias": network.layer.bias}
    (result,) = segment.run(*(given[name] for name in segment.reads))
    torch.testing.assert_close(result, network(x))


def test_a_graph_that_was_priced_has_its_symbols_again() -> None:
    graph = captured()
    before = symbols_of(graph.graph)
    with settled(graph.graph):
        assert not symbols_of(graph.graph)
    assert symbols_of(graph.graph) == before != []




