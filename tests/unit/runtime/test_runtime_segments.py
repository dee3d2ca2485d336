"""The local program cut at its collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.runtime import shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.local_values import local_values, parameter_memory
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.segments import Segment, cut_segments, render_segment
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.rule import apply_collective


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


def program(*, tensor_parallel: bool) -> LocalProgram:
    network = Network()
    if tensor_parallel:
        shard(network.up, ((1, 1), (4, 1), (4,)))
        shard(network.down, ((1, 4), (1, 4)))
    graph = capture(find_target(network), [torch.ones(4, 8)], {}, input_shapes=[(4, 8)], parameter_shapes={})
    return partition(
        graph,
        build_mesh(4),
        input_layouts=[TensorLayout.replicated(2)],
        strategies=strategies_of(network),
        output_batch_axes=(),
        differentiable_inputs=frozenset({0}),
    )


def groups_of(cut: LocalProgram, names: dict[str, int]) -> dict[str, int]:
    return {cut.parameters[name].node.name: number for name, number in names.items()}


ONE_GROUP = {"up.weight": 0, "up.bias": 0, "down.weight": 0}




def run(cut: LocalProgram, segments: list[Segment], values: dict[str, Tensor]) -> Tensor:
    """Run segments one after the other; a collective among equal copies of one rank changes nothing here."""
    for segment in segments:
        if not segment.is_empty:
            written = segment.module(*[values[name] for name in segment.reads])
            values.update(zip(segment.writes, written, strict=True))
        for crossing in segment.crossings:
            values[crossing.result] = values[crossing.source]
    return values[cut.outputs[0].name]


@pytest.mark.parametrize("names", [ONE_GROUP, {"up.weight": 0, "up.bias": 1, "down.weight": 2}])
def test_segments_together_compute_the_program(names: dict[str, int]) -> None:
    network = Network()
    value = torch.randn(4, 8)
    graph = capture(find_target(network), [value], {}, input_shapes=[(4, 8)], parameter_shapes={})
    alone = partition(
        graph, build_mesh(1), input_layouts=[TensorLayout.replicated(2)], strategies={}, output_batch_axes=()
    )
    parameters = {alone.parameters[name].node.name: p.detach() for name, p in network.named_parameters()}
    segments = cut_segments(alone, groups_of(alone, names))
    result = run(alone, segments, {**parameters, alone.inputs[0].name: value})
    torch.testing.assert_close(result, network(value).detach())


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize(
    "names",
    [ONE_GROUP, {"up.weight": 0, "up.bias": 0, "down.weight": 1}, {"up.weight": 0, "up.bias": 1, "down.weight": 2}],
)
def test_levels_obey_collectives_and_groups(names: dict[str, int], tensor_parallel: Any) -> None:
    cut = program(tensor_parallel=tensor_parallel)
    group_of = groups_of(cut, names)
    segments = cut_segments(cut, group_of)
    made_in: dict[str, int] = {}
    for index, segment in enumerate(segments):
        for name in segment.reads:
            assert made_in.get(name, -1) < index, f"{name} is read before it is there"
        for crossing in segment.crossings:
            assert crossing.source not in made_in or made_in[crossing.source] <= index
            made_in[crossing.result] = index
        made_in.update(dict.fromkeys(segment.writes, index))
        assert not any(node.target is apply_collective for node in segment.module.graph.nodes)
        assert segment.groups == sorted({group_of[name] for name in segment.reads if name in group_of})
    new = [group for segment in segments for group in segment.new_groups]
    assert sorted(new) == sorted(set(names.values())), "every group is new once"
    if names["up.weight"] == names["up.bias"]:  # else one operator reads two groups at once
        assert all(len(segment.new_groups) <= 1 for segment in segments), "groups are waited for one at a time"
    collectives = [node for node in cut.graph.nodes if node.target is apply_collective]
    assert len(collectives) == sum(len(segment.crossings) for segment in segments)


class Weighted(nn.Module):
    """Classifies; the loss gives classes a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 5)
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Buffer(weight)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.down(torch.relu(self.up(x))), labels, self.weight)


def classifier(weight: Tensor) -> LocalProgram:
    values, shapes = [torch.ones(8, 8), torch.ones(8, dtype=torch.int64)], [(8, 8), (8,)]
    graph = capture(find_target(Weighted(weight)), values, {}, input_shapes=shapes, parameter_shapes={})
    layouts = [TensorLayout(((0, 1), ())), TensorLayout(((0, 1),))]
    return partition(graph, build_mesh(4), input_layouts=layouts, strategies={}, output_batch_axes=())


TWO_GROUPS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": 1}


@pytest.mark.parametrize("names", [dict.fromkeys(TWO_GROUPS, 0), TWO_GROUPS])
def test_number_of_labels_leaves_before_anything_is_computed_and_is_read_last(names: dict[str, int]) -> None:
    cut = classifier(torch.ones(5))
    segments = cut_segments(cut, groups_of(cut, names))
    first, last = segments[0], segments[-1]
    assert [crossing.collective.kind for crossing in first.crossings] == ["all_reduce"]
    assert set(first.reads) == {cut.inputs[1].name, cut.buffers["weight"].name}
    readers = [i for i, segment in enumerate(segments) if first.crossings[0].result in segment.reads]
    assert readers == [len(segments) - 1]
    assert [crossing.result for crossing in last.crossings] == [cut.outputs[0].name]


def test_number_of_labels_that_needs_a_parameter_comes_when_that_is_there() -> None:
    cut = classifier(nn.Parameter(torch.ones(5), requires_grad=False))
    segments = cut_segments(cut, groups_of(cut, {**TWO_GROUPS, "weight": 2}))
    assert segments[0].crossings == []
    assert sum(len(segment.crossings) for segment in segments) == 2




def test_view_of_a_parameter_holds_its_group_to_the_last_reader() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            turned, doubled = self.first.weight.t(), self.first.weight * 2
            x = self.middle(self.first(x))
            return x @ turned.reshape(2, 2, 4).flatten(0, 1), x @ doubled

    graph = capture(find_target(Late()), [torch.ones(4, 4)], {}, input_shapes=[(4, 4)], parameter_shapes={})
    alone = partition(
        graph, build_mesh(1), input_layouts=[TensorLayout.replicated(2)], strategies={}, output_batch_axes=()
    )
    first, middle = (alone.parameters[name].node.name for name in ("first.weight", "middle.weight"))
    memory_of = parameter_memory(local_values(alone))
    assert set(memory_of.values()) == {first, middle}
    views = [node for node in alone.graph.nodes if node.op == "call_function" and node.name in memory_of]
    assert {str(node.target) for node in views} == {"aten.t.default", "aten.reshape.default"}
    segments = cut_segments(alone, {first: 0, middle: 1}, memory_of=memory_of)
    assert [segment.groups for segment in segments] == [[0], [0, 1]]
