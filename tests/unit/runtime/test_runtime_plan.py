"""Plans as values; prices of decisions have the memory of the program that lowering makes."""

import dataclasses
import importlib
import itertools
import json

import pytest
import torch
import transformer_scenarios
from asked_cases import one_fast
from law_graphs import MODULES, graph_of
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, ParallelPlan, shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.parallel.compilation.compiled import activations_of
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.modes.replica_plan import build_lone_plan
from msrun.runtime.parallel.plan import GroupPlan, ParameterPlan
from msrun.runtime.partition.collective_messages import CollectiveTraffic, Message, Totals
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.partition import lower
from msrun.runtime.partition.price import StepSpec, price
from msrun.runtime.partition.program import OperatorPlan, Use
from msrun.runtime.partition.reads import ParameterUses
from msrun.runtime.sharding.layout import TensorLayout, build_mesh

GATHER = CollectiveTraffic("gather dim 0 over axes 0", Message("all_gather", 64, 2), None)
PLAN = ParallelPlan(
    mode="semi_auto",
    world_size=4,
    mesh=(2, 2),
    copies=2,
    losses="means",
    optimizer_parallel="whole",
    dataset_strategy="full_batch",
    parameters=(
        ParameterPlan("w", (8, 4), (4, 4), 64, 128, (2, 1), 1, "hsdp is off", 0, ("dp", "None")),
        ParameterPlan("b", (8,), (8,), 32, 32, (1,), 1, "hsdp is off", -1),
    ),
    operators=(
        OperatorPlan("linear", "aten.linear", "fc", ((1, 1), (2, 1)), "user", (GATHER.text,), (GATHER,), 2),
        OperatorPlan("relu", "aten.relu", "", ((1, 2),), "follows", ()),
    ),
    notes=("a note",),
    program="segment 0",
    results=(GATHER,),
    groups=(GroupPlan(("w",), (Message("all_gather", 32, 2),), (Message("reduce_scatter", 64, 2),)),),
    traffic=Totals.of([Message("all_gather", 64, 2), Message("all_gather", 32, 2), Message("reduce_scatter", 64, 2)]),
)


def test_plan_comes_back_from_json_as_it_was():
    assert ParallelPlan.from_json(PLAN.to_json()) == PLAN
    assert ParallelPlan.from_json(json.dumps(PLAN.to_json())) == PLAN
    without = dataclasses.replace(PLAN, traffic=None)
    assert ParallelPlan.from_json(json.dumps(without.to_json())) == without != PLAN


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan.pop("mesh"), "plan: the fields of ParallelPlan are mode, world_size, mesh"),
        (lambda plan: plan.update(colour=3), "found ['borders', 'captured_s', 'colour'"),
        (lambda plan: plan["parameters"][1].pop("reason"), "plan.parameters[1]: the fields of ParameterPlan are name"),
        (lambda plan: plan.update(traffic=7), "plan.traffic: the fields of Totals are calls, bytes; found 7"),
    ],
)
def test_json_that_is_no_plan_is_refused_with_the_place(change, text):
    value = json.loads(json.dumps(PLAN.to_json()))
    change(value)
    with pytest.raises(StrategyError) as caught:
        ParallelPlan.from_json(value)
    assert text in str(caught.value)


def test_plan_prints_its_explanation():
    text = str(PLAN)
    assert text == PLAN.explain()
    assert "captured" not in text
    assert "\ncaptured and cut in 1.23 s" in dataclasses.replace(PLAN, captured_s=1.234).explain()
    assert "  w  8x4 -> 4x4                   (dp, None)             64 B  message 0" in text
    assert "user, the same on 2 ranks" in text
    assert "      gather dim 0 over axes 0: forward all_gather of 64 B by 2 ranks" in text
    assert "1 parameter: forward all_gather of 32 B by 2 ranks, backward reduce_scatter of 64 B by 2 ranks" in text
    assert "what operators move, 2 times: 2 all_gather with 96 B, 1 reduce_scatter with 64 B" in text


@pytest.mark.parametrize(("rows", "words"), [(2500, "2500 KB"), (91908, "89.8 MB"), (2**24 + 2**21, "18.0 GB")])
def test_plan_gives_sizes_in_units_of_few_digits(rows, words):
    net = nn.Linear(256, rows, bias=False, device="meta")
    plan = build_lone_plan(net, AutoParallel(net, "stand_alone").settings)
    assert plan.summary().endswith(f"parameters whole on every rank, {words}")


MESH, DEVICE = build_mesh(4), PROFILES["h100"]


def test_deciding_ends_when_two_ways_make_each_other_look_better(monkeypatch):
    case = importlib.import_module(MODULES[0]).BINARY[0]
    graph = graph_of(case, torch.float32)
    ways = itertools.cycle({"weight": Use(TensorLayout.replicated(dims), ())} for dims in (1, 2))
    monkeypatch.setattr(ParameterUses, "better_storage", lambda _: next(ways))
    layouts = [TensorLayout.replicated(len(shape)) for shape in case.shapes]
    assert decide(graph, MESH, Constraints(layouts)).operators


def transformer(data, model):
    torch.manual_seed(0)
    network = transformer_scenarios.Gpt(0.1, "layer")
    if model > 1:
        for name, strategy in transformer_scenarios._megatron(data, model).items():
            shard(network.get_submodule(name), strategy)
    text = torch.zeros(transformer_scenarios.BATCH, transformer_scenarios.TOKENS, dtype=torch.int64)
    shape = tuple(text.shape)
    graph = capture(
        find_target(network),
        [text, text],
        {},
        input_shapes=[shape, shape],
        parameter_shapes={},
        strategies=strategies_of(network),
    )
    return graph, Constraints([TensorLayout((MESH.axes, ()))] * 2), network


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), one_fast((2, 2), (4, 1), (1, 4)))
def test_a_transformers_activations_are_priced_as_its_segments_keep_them(data, model):
    graph, given, _ = transformer(data, model)
    decisions = decide(graph, MESH, given)
    program, found = lower(graph, decisions), price(graph, decisions, DEVICE)
    kept = activations_of(program, {}, 1).kept_bytes
    assert found.activation_bytes == pytest.approx(kept, rel=0.1)
    stored = [use.layout.local_shape(MESH, use.shape) for use in program.parameters.values()]
    assert found.parameter_bytes == 4 * sum(torch.Size(shape).numel() for shape in stored)
    assert found.optimizer_bytes == 2 * found.parameter_bytes
    assert found.gradient_bytes == found.parameter_bytes


def test_optimizer_parallel_divides_parameters_and_state_and_level3_gathers_twice():
    network, shape = nn.Sequential(nn.Linear(16, 64), nn.ReLU()), (8, 16)
    graph = capture(find_target(network), [torch.ones(shape)], {}, input_shapes=[shape], parameter_shapes={})
    decisions = decide(graph, MESH, Constraints([TensorLayout((MESH.axes, ()))]))
    weight = "0.weight"
    whole = price(graph, decisions, DEVICE)
    cut = price(graph, decisions, DEVICE, StepSpec({weight: (0, 1)}))
    size = 4 * 16 * 64
    assert whole.parameter_bytes - cut.parameter_bytes == size * 3 // 4
    assert whole.optimizer_bytes - cut.optimizer_bytes == 2 * size * 3 // 4
    assert cut.gathered_bytes == size
    assert [str(each.message) for each in cut.gathers] == [f"all_gather of {size // 4} B by 4 ranks"]
    assert f"reduce_scatter of {size} B by 4 ranks" in [str(each.message) for each in cut.sums]
    assert len(price(graph, decisions, DEVICE, StepSpec({weight: (0, 1)}, regathers=True)).gathers) == 2
