"""recompute: which parts of a program are run again, what is kept of them, and what is refused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, recompute, shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.recomputation import choose_recomputed, recomputed_in
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.replay import (
    RecomputeSpec,
    Replay,
    SavedResults,
    find_regions,
    forgetting,
    parameters_of,
    plan_replays,
)
from msrun.runtime.schedule.segments import Segment, cut_segments
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.rule import find_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first if shared else Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).pow(2).mean()


def local_program(network: nn.Module, *, tensor_parallel: bool = False) -> LocalProgram:
    if tensor_parallel:
        for block in (network.first, network.second):
            shard(block.up, ((1, 1), (4, 1), (4,)))  # type: ignore[union-attr, arg-type]
            shard(block.down, ((1, 4), (1, 4)))  # type: ignore[union-attr, arg-type]
    graph = capture(find_target(network), [torch.ones(4, 8)], {}, input_shapes=[(4, 8)], parameter_shapes={})
    return partition(
        graph,
        build_mesh(4),
        input_layouts=[TensorLayout.replicated(2)],
        strategies=strategies_of(network),
        output_batch_axes=(),
    )


def planned(network: nn.Module, *, tensor_parallel: bool = False) -> tuple[list[Segment], list[Replay]]:
    program = local_program(network, tensor_parallel=tensor_parallel)
    regions = find_regions(program, recomputed_in(network))
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    group_of = {use.node.name: 0 for use in program.parameters.values()}
    segments = cut_segments(program, group_of, region_of)
    return segments, plan_replays(segments, regions, program.outputs)


def test_module_is_run_again_from_its_input_and_keeps_its_result() -> None:
    network = Network()
    assert recompute(network.first) is network.first
    segments, (replay,) = planned(network)
    (index,) = replay.segments
    names = [str(n.target) for n in segments[index].module.graph.nodes if n.op == "call_function"]
    assert names == ["aten.linear.default", "aten.tanh.default", "aten.linear.default", "aten.add.Tensor"]
    (result,) = segments[index].writes
    assert result not in replay.dropped


@pytest.mark.parametrize(("setting", "right"), [(True, ["reduce_scatter"]), (False, [])])
def test_collectives_of_a_module_run_again_unless_their_results_are_kept(*, setting: bool, right: list[str]) -> None:
    network = Network()
    recompute(network.first, mp_comm_recompute=setting)
    segments, (replay,) = planned(network, tensor_parallel=True)
    started = [crossing for crossings in replay.crossings.values() for crossing in crossings]
    assert [each.collective.kind for each in started if not each.collective.is_local] == right
    assert {each.result for each in started} <= replay.dropped
    partial_sums = segments[replay.segments[0]].writes
    assert set(partial_sums) <= replay.dropped


def test_two_calls_of_one_module_are_two_regions() -> None:
    network = Network(shared=True)
    recompute(network.first)
    program = local_program(network)
    assert [region.path for region in find_regions(program, recomputed_in(network))] == ["first", "first"]


def test_parameters_that_others_read_too_are_not_a_regions_own() -> None:
    network = Network()
    network.second.up.weight = network.first.up.weight
    recompute(network.first)
    program = local_program(network)
    regions = find_regions(program, recomputed_in(network))
    assert parameters_of(program, regions) == {"first.up.bias", "first.down.weight"}






def test_parent_and_child_cannot_both_be_recomputed() -> None:
    network = Network()
    recompute(network.first.up)
    with pytest.raises(StrategyError, match=r"\(Block\): Linear up in it is recomputed already; configure one"):
        recompute(network.first)
    with pytest.raises(StrategyError, match=r"recompute\(Linear\): it is recomputed already"):
        recompute(network.first.up)
    recompute(network.second)
    network.second.up.__dict__["_msrun_recompute"] = RecomputeSpec()
    with pytest.raises(StrategyError, match=r"second.up lies in second, which is recomputed already"):
        recomputed_in(network)


@pytest.mark.parametrize("save", [["linear"], [torch.relu], 3, "linear"])
def test_what_to_save_is_operators_or_a_function_of_one(save: Any) -> None:
    with pytest.raises(StrategyError, match="or a function of one"):
        recompute(nn.Linear(1, 1), save=save)


def test_only_modules_are_recomputed() -> None:
    with pytest.raises(StrategyError, match="a torch module is expected"):
        recompute(torch.relu)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1, "1", True, None, float("nan")])
def test_limit_is_a_number_above_0(limit: Any) -> None:
    with pytest.raises(StrategyError, match="must be a number of MB above 0"):
        AutoParallel(Network()).recompute("auto", memory_limit_mb=limit)


def test_only_auto_chooses() -> None:
    with pytest.raises(StrategyError, match='must be "auto"; for one module use recompute'):
        AutoParallel(Network()).recompute("full", memory_limit_mb=1)


def test_search_leaves_the_users_own_choice_alone() -> None:
    program = local_program(Network())
    tried: list[set[str]] = []

    class Bytes:
        def __init__(self, paths: Any) -> None:
            tried.append(set(paths))
            self.peak_bytes = 100 - 30 * len(paths)

    fixed = {"first.up": RecomputeSpec()}
    chosen = choose_recomputed(program, fixed, 50, Bytes)  # type: ignore[arg-type]
    assert set(chosen) == {"first.up", "second"}
    assert all("first" not in paths and "first.up" in paths for paths in tried)


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x).tanh()


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_without_capture_a_module_runs_under_torchs_checkpointing(*, is_recomputed: bool) -> None:
    torch.manual_seed(0)
    module = CountsCalls()
    if is_recomputed:
        recompute(module)
    network = nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 1))
    loss = AutoParallel(network)(torch.ones(4, 8)).sum()
    loss.backward()
    assert module.calls == (2 if is_recomputed else 1)
    assert "forward" not in vars(module)
    assert module.inner.weight.grad is not None


def test_without_gradients_nothing_is_checkpointed() -> None:
    module = CountsCalls()
    recompute(module)
    with torch.no_grad():
        AutoParallel(nn.Sequential(module))(torch.ones(4, 8))
    assert module.calls == 1


def test_what_was_forgotten_cannot_be_used_for_a_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    with forgetting():
        loss = (weight * weight).sum()
    with pytest.raises(RuntimeError, match="before it was run again"):
        loss.backward()


def test_saved_results_ask_for_every_operator_of_a_segment_and_for_nothing_else() -> None:
    asked: list[object] = []
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    results = SavedResults(lambda target: bool(asked.append(target)))
    assert results.run(module, [torch.ones(2)], again=False).tolist() == [2.0, 2.0]
    assert asked == [torch.relu, operator.add]
