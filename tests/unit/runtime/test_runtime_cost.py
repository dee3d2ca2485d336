"""Prices: of operators and messages, of the activations that a step keeps, of degrees that are searched for.
Plans as values; prices of decisions have the memory of the program that lowering makes."""

import dataclasses
import functools
import importlib
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import transformer_scenarios
from asked_cases import one_fast
from law_graphs import MODULES, graph_of
from small_capture import captured, layouts_of, partitioned
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, Degrees, GradAccumulation, ParallelPlan, recompute, search_degrees, shard
from msrun.runtime.cost.devices import PROFILES, DeviceProfile, Link, find_profile
from msrun.runtime.cost.operators import (
    NOTHING,
    TensorSpec,
    Work,
    backward_work,
    collective_seconds,
    forward_work,
    link_of,
    measured_collective_seconds,
    message_seconds,
    operator_seconds,
)
from msrun.runtime.parallel import degrees
from msrun.runtime.parallel.compilation.compiled import activations_of
from msrun.runtime.parallel.degrees import DividedGraph, PartPrices
from msrun.runtime.parallel.modes.replica_plan import build_lone_plan
from msrun.runtime.parallel.plan import GroupPlan, ParameterPlan
from msrun.runtime.parallel.recomputation import recomputed_in
from msrun.runtime.partition.collective_messages import CollectiveTraffic, Message, Totals
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.events import LocalWork, tell
from msrun.runtime.partition.partition import lower
from msrun.runtime.partition.price import GradientFlow, StepSpec, price
from msrun.runtime.partition.program import OperatorPlan, Use
from msrun.runtime.partition.reads import ParameterUses
from msrun.runtime.schedule.replay import ActivationEstimate
from msrun.runtime.search.search import Search, SearchSpec
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.simulate.calibration import added_s

aten = torch.ops.aten
LINK = Link(1.0, 10.0)


def specs(*shapes, dtype=torch.float32):
    return [TensorSpec(shape, dtype) for shape in shapes]


def test_a_call_like_a_measured_one_takes_what_was_measured_and_another_is_scaled_by_the_model():
    points = {"aten.mm.default float32": [(2e9, 1e6, 0.5), (2e6, 1e4, 0.01)]}
    device = replace(PROFILES["cpu"], operators=points, overhead_s=0.125)
    assert operator_seconds("aten.mm.default float32", Work(2e9, 6e5, 4e5), device) == 0.625
    assert operator_seconds("aten.mm.default float32", Work(4e9, 1.2e6, 8e5), device) == pytest.approx(1.125)
    assert operator_seconds("aten.mm.default float32", Work(2e6, 5e3, 5e3), device) == pytest.approx(0.135)
    other = Work(2e9, 6e5, 4e5)
    assert operator_seconds("aten.bmm.default float32", other, device) == other.seconds(device) + 0.125


def test_messages_take_at_the_least_the_processor_time_of_all_ranks_on_the_cores_that_they_share():
    def more(elapsed_s):
        return [(elapsed_s, 0.5), (elapsed_s, 0.5), (elapsed_s, 0.5), (9.0, 0.5)]

    fewer = [(3.0, 0.1)] * 4
    assert added_s(more(3.1), fewer, ranks_per_core=4.0) == pytest.approx(1.6)
    assert added_s(more(3.1), fewer, ranks_per_core=0.25) == pytest.approx(0.4)
    assert added_s(more(5.0), fewer, ranks_per_core=4.0) == pytest.approx(2.0)


def test_a_collective_inside_a_host_is_scaled_from_the_nearest_measured_one():
    device = replace(PROFILES["cpu"], collectives={"all_gather": [(2, 1000.0, 0.5), (2, 8e6, 2.0)]})
    inside = collective_seconds("all_gather", 1e7, 4, device.in_host)
    nearest = collective_seconds("all_gather", 8e6, 2, device.in_host)
    assert measured_collective_seconds("all_gather", 8e6, 2, device.in_host, device) == 2.0
    assert measured_collective_seconds("all_gather", 1e7, 4, device.in_host, device) == 2.0 * inside / nearest
    outside = collective_seconds("all_gather", 8e6, 2, device.between_hosts)
    assert measured_collective_seconds("all_gather", 8e6, 2, device.between_hosts, device) == outside


def test_priced_strategies_know_the_measured_seconds_of_a_message_and_what_a_step_waits_for_it():
    device = replace(PROFILES["cpu"], collectives={"all_reduce": [(4, 8e6, 2.0)]}, wait_s=0.25, overhead_s=0.5)
    assert message_seconds("all_reduce", 8e6, build_mesh(4), (0, 1), device) == 2.25
    assert message_seconds("all_reduce", 8e6, build_mesh(4), (), device) == 0.0
    assert message_seconds("to_host", 0, build_mesh(4), (), device) == device.to_host.alpha_s
    work = LocalWork(forward=(Work(1.0, 0.0, 0.0), NOTHING), backward=(Work(1.0, 0.0, 0.0, launches=2),))
    forward_s, backward_s = work.compute_seconds(device)
    assert forward_s == pytest.approx(0.5, rel=1e-4) and backward_s == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("operation", "nbytes", "ranks", "steps", "moved"),
    [
        ("all_gather", 40, 4, 3, 3 * 40),
        ("reduce_scatter", 40, 4, 3, 30),
        ("all_to_all", 40, 4, 3, 30),
        ("all_reduce", 40, 2, 1, 40),  # recursive doubling: one step of all bytes; the ring takes two of half
        ("all_reduce", 8000, 8, 14, 2 * 7000),  # a long one goes round the ring
        ("all_reduce", 1, 8, 3, 3),  # and a short one up the tree
        ("all_reduce", 1000, 1, 0, 0),
        ("broadcast", 40, 2, 1, 40),
        ("halo", 40, 4, 2, 40),
        ("send", 40, 2, 1, 40),
    ],
)
def test_a_collective_has_the_price_of_its_formula(operation, nbytes, ranks, steps, moved):
    assert collective_seconds(operation, nbytes, ranks, LINK) == pytest.approx(steps * 1.0 + moved / 10.0)


def test_a_group_that_leaves_its_host_pays_the_link_between_hosts_and_an_unknown_collective_is_refused():
    mesh, device = build_mesh(16), PROFILES["h100"]
    assert link_of(mesh, (1, 2, 3), device) is device.in_host
    assert link_of(mesh, (0,), device) is device.between_hosts
    assert message_seconds("to_host", 64e9, mesh, (), device) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(ValueError, match="unknown collective 'gossip'"):
        collective_seconds("gossip", 1000, 2, LINK)


def test_an_operator_takes_the_longer_of_computing_and_moving_and_at_least_a_launch():
    device = replace(PROFILES["cpu"], peak_flops={"float32": 1e9}, memory_bandwidth=1e8, launch_s=1e-3)
    product = forward_work(aten.linear.default, specs((1000, 1000), (1000, 1000)), specs((1000, 1000)))
    assert product.seconds(device) == pytest.approx(2.0)
    addition = forward_work(aten.add.Tensor, specs((1000, 1000), (1000, 1000)), specs((1000, 1000)))
    assert addition.seconds(device) == pytest.approx(12e6 / 1e8)
    assert forward_work(aten.add.Tensor, specs((2,), (2,)), specs((2,))).seconds(device) == 1e-3


def test_a_view_costs_nothing_and_a_lookup_reads_its_rows_alone():
    assert forward_work(aten.transpose.int, specs((8, 4)), specs((4, 8))) is NOTHING
    table = [TensorSpec((10**6, 4), torch.float32), TensorSpec((3,), torch.int64)]
    assert forward_work(aten.embedding.default, table, specs((3, 4))).read_bytes == 3 * 4 * 4 + 3 * 8


def test_the_way_back_of_a_product_is_one_product_for_each_gradient():
    inputs, results = specs((8, 16), (32, 16), (32,)), specs((8, 32))
    forward = forward_work(aten.linear.default, inputs, results)
    assert forward.operations == 2 * 8 * 16 * 32
    assert backward_work(aten.linear.default, inputs, results, [0, 1, 2]).operations == 2 * forward.operations
    assert backward_work(aten.linear.default, inputs, results, [1, 2]).operations == forward.operations
    assert backward_work(aten.linear.default, inputs, results, []) is NOTHING


def test_a_profile_comes_back_from_json_and_from_a_file(tmp_path):
    device = PROFILES["ascend910b"]
    assert DeviceProfile.from_json(json.dumps(device.to_json())) == device
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(device.to_json()))
    assert find_profile(path) == find_profile("Ascend910B") == find_profile(device) == device


def test_what_is_no_profile_is_refused_in_one_line(tmp_path):
    with pytest.raises(StrategyError, match=r"device 'a10'.*must be one of ascend910a, ascend910b, a100"):
        find_profile("a10")
    with pytest.raises(StrategyError, match="cannot be read: No such file"):
        find_profile(tmp_path / "none.json")
    with pytest.raises(StrategyError, match=r"device profile: KeyError: 'in_host'; its fields are name, peak_flops"):
        DeviceProfile.from_json("{}")
    with pytest.raises(StrategyError, match=r"memory_bandwidth = 0; give numbers above 0"):
        replace(PROFILES["cpu"], memory_bandwidth=0)


FLOAT = 4
FEW, WIDE, NARROW = 4, 16, 8


class SmallBlock(nn.Module):
    """Autograd keeps the result of tanh, which is what `down` reads, too."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE)
        self.down = nn.Linear(WIDE, NARROW)
        self.register_buffer("shift", torch.ones(WIDE))
        self.shift: Tensor

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)) * self.shift)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SmallBlock(), SmallBlock()

    def forward(self, x):
        return self.second(self.first(x)).exp()


def estimate(network, *, ranks=1, copies=1):
    program = partitioned(captured(network, torch.ones(FEW, NARROW)), ranks, is_cut=True)
    return activations_of(program, recomputed_in(network), copies)


def kept_by_autograd(network):
    """Return the bytes of storages that autograd keeps of one pass, beside parameters, buffers and the batch."""
    x = torch.ones(FEW, NARROW)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers(), x)}
    kept = {}
    holds = []

    def pack(tensor):
        holds.append(tensor)
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = network(x)
    kept[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
    return sum(size for pointer, size in kept.items() if pointer not in given)


def test_what_is_kept_is_what_autograd_keeps_on_each_rank_for_each_copy():
    network, found = Network(), recomputing()
    assert found.kept_bytes == kept_by_autograd(network) == 2 * estimate(network, ranks=2).kept_bytes
    assert found.again_bytes == 0
    assert estimate(network, copies=3).peak_bytes == 3 * found.kept_bytes
    text = "activations 6.00 MB: 2.00 MB kept and 1.00 MB computed again for each of 2 copies"
    assert str(ActivationEstimate(2 << 20, 1 << 20, 2)) == text


@functools.cache
def recomputing(*blocks, **settings):
    network = Network()
    for block in blocks:
        recompute(network.get_submodule(block), **settings)
    return estimate(network)


def test_recomputed_block_keeps_its_ends_alone_and_is_counted_while_it_runs_again():
    none, one, both = recomputing(), recomputing("second"), recomputing("first", "second")
    hidden = FEW * WIDE * FLOAT  # of tanh and of the product
    result = FEW * NARROW * FLOAT  # stands between the block and what reads it
    assert one.kept_bytes == none.kept_bytes - 2 * hidden + result
    assert one.again_bytes >= 2 * hidden
    assert both.kept_bytes < one.kept_bytes
    assert both.again_bytes == one.again_bytes, "the greatest region counts"
    assert recomputing("second", save=(torch.ops.aten.tanh,)).kept_bytes == one.kept_bytes + hidden


H100 = PROFILES["h100"]
ROWS, WIDTH, BLOCKS = 512, 512, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Equal blocks and a loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack(rows=ROWS):
    with torch.device("meta"):
        return Stack(), torch.empty(rows, WIDTH)


@functools.cache
def prices_of(stages, rows):
    """Return the prices of a part of the batch on one rank a stage, and seconds and bytes of it without stages."""
    network, batch = stack()
    search_of = degrees._Search(network, [batch], stages, degrees.SearchSettings("exact", H100), 60.0)
    graph, mesh = search_of._capture(ROWS // rows), build_mesh(1)
    spec = SearchSpec("dynamic_programming", H100)
    plan = Search(
        graph, mesh, Constraints([TensorLayout.replicated(2)]), spec, lambda _, *, shards_all: StepSpec()
    ).run()
    divided = DividedGraph(graph, stages, search_of._paths(ROWS // rows))
    return PartPrices(divided, plan.plan), plan.plan.price.seconds, plan.plan.price.memory_bytes


def test_an_undivided_step_has_the_price_of_its_strategies():
    prices, seconds, nbytes = prices_of(1, ROWS)
    step = prices.step(Degrees(), H100)
    assert step.seconds == pytest.approx(seconds) and step.memory_bytes == nbytes


def test_a_pipeline_of_equal_stages_has_the_bubble_of_1f1b_and_a_stage_its_part_of_the_memory():
    micro_batches, stages = 8, 2
    (alone, *_), (line, *_) = prices_of(1, ROWS // micro_batches), prices_of(stages, ROWS // micro_batches)
    whole = alone.step(Degrees(1, micro_batches), H100)
    divided = line.step(Degrees(stages, micro_batches), H100)
    least = whole.seconds / stages * (micro_batches + stages - 1) / micro_batches
    assert 0.95 * least < divided.seconds < 1.15 * least, "messages take the rest, and the loss in the last stage"
    assert whole.memory_bytes / stages <= divided.memory_bytes < whole.memory_bytes * 0.75


def test_recomputed_blocks_take_their_forward_pass_again_and_keep_what_they_read():
    prices, *_ = prices_of(1, ROWS)
    plain, again = (prices.step(Degrees(recomputes=recomputes), H100) for recomputes in (False, True))
    assert 1.1 * plain.seconds < again.seconds < 1.4 * plain.seconds
    block_bytes = ROWS * WIDTH * 4 * 5  # hidden values and the result
    assert plain.memory_bytes - again.memory_bytes == pytest.approx((BLOCKS - 1) * block_bytes, rel=0.3)


@pytest.mark.slow
def test_memory_is_never_exceeded_and_more_of_it_never_takes_longer():
    network, batch = stack(4)
    free = search_degrees(network, batch, worker_num=4, device="h100")
    sizes_mb = sorted(each.memory_bytes / 2**20 for each in free.priced)
    before, refused, kinds = math.inf, 0, set[Degrees]()
    for limit_mb in (sizes_mb[0] / 2, sizes_mb[0], free.step.memory_bytes / 2**20):
        try:
            found = search_degrees(network, batch, worker_num=4, device="h100", memory_limit_mb=limit_mb)
        except StrategyError as error:
            assert f"fits into {limit_mb:.1f} MB: the smallest step found needs" in str(error)
            refused += 1
            continue
        fitting = [each.seconds for each in found.priced if each.memory_bytes <= limit_mb * 2**20]
        assert found.step.memory_bytes <= limit_mb * 2**20
        assert found.step.seconds == min(fitting) <= before
        before = found.step.seconds
        kinds.add(found.degrees)
    assert refused == 1 and len(kinds) > 1


def test_a_search_ends_at_its_limit_of_time_with_the_undivided_step_and_what_has_no_meaning_is_refused():
    network, batch = stack()
    found = search_degrees(network, batch, worker_num=2, device="h100", time_limit_s=1e-9)
    assert {(each.degrees.stages, each.degrees.parts) for each in found.priced} == {(1, 1)}
    assert "the time limit came" in str(found)
    for ask, words in (
        (lambda: search_degrees(GradAccumulation(network, 2), batch), r"give it the network with its loss"),
        (lambda: search_degrees(network, batch, worker_num=0), r"worker_num=0\): must be a whole number above 0"),
        (lambda: search_degrees(network, batch, time_limit_s=-1), r"time_limit_s=-1\): must be a number of seconds"),
        (lambda: found.apply(network), "was for 2 ranks, and there are 1"),
        (lambda: found.apply(network, Degrees(64)), "was not priced"),
    ):
        with pytest.raises(StrategyError, match=words):
            ask()


def test_batch_statistics_keep_the_batch_in_one_part():
    class Loss(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

    network = Loss(nn.Linear(8, 8), nn.BatchNorm1d(8))
    found = search_degrees(network, torch.randn(16, 8), worker_num=4, device="h100")
    assert {(each.degrees.stages, each.degrees.parts) for each in found.priced} == {(1, 1)}
    assert "changes buffers" in str(found)


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
    graph = graph_of(case, dtype=torch.float32)
    ways = itertools.cycle({"weight": Use(TensorLayout.replicated(dims), ())} for dims in (1, 2))
    monkeypatch.setattr(ParameterUses, "better_storage", lambda _: next(ways))
    assert decide(graph, MESH, Constraints(layouts_of(graph, MESH))).operators


def transformer(data, model):
    torch.manual_seed(0)
    network = transformer_scenarios.Gpt(0.1, "layer")
    if model > 1:
        for name, strategy in transformer_scenarios._megatron(data, model).items():
            shard(network.get_submodule(name), strategy)
    text = torch.zeros(transformer_scenarios.BATCH, transformer_scenarios.TOKENS, dtype=torch.int64)
    graph = captured(network, text, text)
    return graph, Constraints(layouts_of(graph, MESH, is_cut=True))


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), one_fast((2, 2), (4, 1), (1, 4)))
def test_a_transformers_activations_are_priced_as_its_segments_keep_them(data, model):
    graph, given = transformer(data, model)
    decisions = decide(graph, MESH, given)
    program, found = lower(graph, decisions), price(graph, decisions, DEVICE)
    kept = activations_of(program, {}, 1).kept_bytes
    assert found.activation_bytes == pytest.approx(kept, rel=0.1)
    stored = [use.layout.local_shape(MESH, use.shape) for use in program.parameters.values()]
    assert found.parameter_bytes == 4 * sum(torch.Size(shape).numel() for shape in stored)
    assert found.optimizer_bytes == 2 * found.parameter_bytes
    assert found.gradient_bytes == found.parameter_bytes


class PartlyRead(nn.Module):
    """The loss reads one half of a result; the other one goes to a further result, and into the loss detached."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.beside = nn.Linear(16, 8), nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.bias.requires_grad_(requires_grad=False)
        shard(self.up, ((4, 1), (1, 1)), out_strategy=((4, 1),))

    def forward(self, x):
        left, right = torch.tanh(self.up(x)).chunk(2, -1)
        return (self.down(left) + right.detach()).square().mean(), self.beside(right)


def test_gradients_are_those_that_the_loss_gives_and_state_is_kept_of_all_that_is_trained():
    graph = captured(PartlyRead(), torch.ones(8, 16))
    decisions = decide(graph, MESH, Constraints(layouts_of(graph, MESH, is_cut=True)))
    flow = GradientFlow.of(graph, tell(lower(graph, decisions)))
    without = {"p_beside_weight", "p_beside_bias", "getitem_1", "linear_2"}
    assert {node.name for node in flow.differentiable - flow.reached} == without
    trained = {node.name for node in flow.reached if node.op == "placeholder"}
    assert trained == {"p_up_weight", "p_up_bias", "p_down_weight"} and flow.reached <= flow.differentiable
    found = price(graph, decisions, DEVICE)
    assert found.parameter_bytes == FLOAT * (136 + 20 + 20)
    assert found.optimizer_bytes == 2 * FLOAT * (136 + 16 + 20)
    assert found.gradient_bytes == FLOAT * (136 + 16)
