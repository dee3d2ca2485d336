"""Local programs cut at collectives: what segments read and send, what is run again, sizes that differ by call."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, recompute, shard
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.recomputation import recomputed_in
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.events import tell
from msrun.runtime.partition.partition import lower, partition
from msrun.runtime.schedule.replay import RecomputeSpec, find_regions, forgetting, parameters_of, plan_replays
from msrun.runtime.schedule.segments import cut_segments
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.rule import find_module
from msrun.runtime.sharding.sizes import settle


def program_of(network, ranks=4, rows=4, width=8):
    """Return the program of ranks that are given whole inputs."""
    x, shape = torch.ones(rows, width), (rows, width)
    return partition(
        capture(find_target(network), [x], {}, input_shapes=[shape], parameter_shapes={}),
        build_mesh(ranks),
        input_layouts=[TensorLayout.replicated(2)],
        strategies=strategies_of(network),
        output_batch_axes=(),
        differentiable_inputs=frozenset({0}),
    )


def groups_of(cut, names):
    return {cut.parameters[name].node.name: number for name, number in names.items()}


TWO_GROUPS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": 1}


class Weighted(nn.Module):
    """Classifies; the loss gives classes a weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 5)
        self.weight = nn.Buffer(torch.ones(5))

    def forward(self, x, labels):
        return F.cross_entropy(self.down(torch.relu(self.up(x))), labels, self.weight)


@pytest.mark.parametrize("names", [dict.fromkeys(TWO_GROUPS, 0), TWO_GROUPS])
def test_number_of_labels_leaves_before_anything_is_computed_and_is_read_last(names):
    values, shapes = [torch.ones(8, 8), torch.ones(8, dtype=torch.int64)], [(8, 8), (8,)]
    graph = capture(find_target(Weighted()), values, {}, input_shapes=shapes, parameter_shapes={})
    layouts = [TensorLayout(((0, 1), ())), TensorLayout(((0, 1),))]
    cut = partition(graph, build_mesh(4), input_layouts=layouts, strategies={}, output_batch_axes=())
    segments = cut_segments(cut, groups_of(cut, names))
    first, last = segments[0], segments[-1]
    assert [crossing.collective.kind for crossing in first.crossings] == ["all_reduce"]
    assert set(first.reads) == {cut.inputs[1].name, cut.buffers["weight"].name}
    readers = [i for i, segment in enumerate(segments) if first.crossings[0].result in segment.reads]
    assert readers == [len(segments) - 1]
    assert [crossing.result for crossing in last.crossings] == [cut.outputs[0].name]


def test_view_of_a_parameter_holds_its_group_to_the_last_reader():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            turned, doubled = self.first.weight.t(), self.first.weight * 2
            x = self.middle(self.first(x))
            return x @ turned.reshape(2, 2, 4).flatten(0, 1), x @ doubled

    alone = program_of(Late(), 1, 4, 4)
    first, middle = (alone.parameters[name].node.name for name in ("first.weight", "middle.weight"))
    memory_of = tell(alone).parameter_memory
    assert set(memory_of.values()) == {first, middle}
    views = [node for node in alone.graph.nodes if node.op == "call_function" and node.name in memory_of]
    assert {str(node.target) for node in views} == {"aten.t.default", "aten.reshape.default"}
    segments = cut_segments(alone, {first: 0, middle: 1}, memory_of=memory_of)
    assert [segment.groups for segment in segments] == [[0], [0, 1]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, *, shared=False):
        super().__init__()
        self.first = Block()
        self.second = self.first if shared else Block()

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).pow(2).mean()


def planned(network, *, tensor_parallel=False):
    if tensor_parallel:
        for block in (network.first, network.second):
            shard(block.up, ((1, 1), (4, 1), (4,)))
            shard(block.down, ((1, 4), (1, 4)))
    program = program_of(network)
    regions = find_regions(program, recomputed_in(network))
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    group_of = {use.node.name: 0 for use in program.parameters.values()}
    segments = cut_segments(program, group_of, region_of)
    return segments, plan_replays(segments, regions, program.outputs)


def test_module_is_run_again_from_its_input_and_keeps_its_result():
    network = Blocks()
    assert recompute(network.first) is network.first
    segments, (replay,) = planned(network)
    (index,) = replay.segments
    names = [str(n.target) for n in segments[index].module.graph.nodes if n.op == "call_function"]
    assert names == ["aten.linear.default", "aten.tanh.default", "aten.linear.default", "aten.add.Tensor"]
    (result,) = segments[index].writes
    assert result not in replay.dropped


@pytest.mark.parametrize(("setting", "right"), [(True, ["reduce_scatter"]), (False, [])])
def test_collectives_of_a_module_run_again_unless_their_results_are_kept(*, setting, right):
    network = Blocks()
    recompute(network.first, mp_comm_recompute=setting)
    segments, (replay,) = planned(network, tensor_parallel=True)
    started = [crossing for crossings in replay.crossings.values() for crossing in crossings]
    assert [each.collective.kind for each in started if not each.collective.is_local] == right
    assert {each.result for each in started} <= replay.dropped
    partial_sums = segments[replay.segments[0]].writes
    assert set(partial_sums) <= replay.dropped


def test_two_calls_of_one_module_are_two_regions():
    network = Blocks(shared=True)
    recompute(network.first)
    program = program_of(network)
    assert [region.path for region in find_regions(program, recomputed_in(network))] == ["first", "first"]


def test_parameters_that_others_read_too_are_not_a_regions_own():
    network = Blocks()
    network.second.up.weight = network.first.up.weight
    recompute(network.first)
    program = program_of(network)
    regions = find_regions(program, recomputed_in(network))
    assert parameters_of(program, regions) == {"first.up.bias", "first.down.weight"}


@pytest.mark.parametrize(("path", "right"), [("a.b.c", "a.b"), ("a", None), ("a.bc", None), (None, None), ("d", "d")])
def test_operator_belongs_to_the_recomputed_module_around_it(path, right):
    assert find_module(path, {"a.b": RecomputeSpec(), "d": RecomputeSpec()}) == right
    assert path is None or find_module(path, {"": RecomputeSpec()}) == ""


def test_parent_and_child_cannot_both_be_recomputed():
    network = Blocks()
    recompute(network.first.up)
    with pytest.raises(StrategyError, match=r"\(Block\): Linear up in it is recomputed already; configure one"):
        recompute(network.first)
    with pytest.raises(StrategyError, match=r"recompute\(Linear\): it is recomputed already"):
        recompute(network.first.up)
    recompute(network.second)
    network.second.up.__dict__["_msrun_recompute"] = RecomputeSpec()
    with pytest.raises(StrategyError, match=r"second.up lies in second, which is recomputed already"):
        recomputed_in(network)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        *((lambda s=s: recompute(Block(), save=s), "function of one") for s in (["linear"], [torch.relu], 3)),
        (lambda: recompute(torch.relu), "a torch module is expected"),
        *(
            (lambda mb=limit: AutoParallel(Blocks()).recompute("auto", memory_limit_mb=mb), "a number of MB above 0")
            for limit in (0, -1, "1", True, None, float("nan"))
        ),
        (lambda: AutoParallel(Blocks()).recompute("full", memory_limit_mb=1), 'must be "auto"; for one module use'),
    ],
)
def test_wrong_words_of_recompute_are_refused(ask, text):
    with pytest.raises(StrategyError, match=text):
        ask()


def test_without_capture_a_module_runs_under_torchs_checkpointing_where_there_are_gradients():
    module, calls = recompute(Block()), list[int]()
    module.up.register_forward_hook(lambda *_: calls.append(1))
    network = nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 1))
    AutoParallel(network)(torch.ones(4, 8)).sum().backward()
    assert len(calls) == 2
    assert "forward" not in vars(module)
    assert module.up.weight.grad is not None
    with torch.no_grad():
        AutoParallel(network)(torch.ones(4, 8))
    assert len(calls) == 3


def test_what_was_forgotten_cannot_be_used_for_a_gradient():
    weight = torch.ones(2, requires_grad=True)
    with forgetting():
        loss = (weight * weight).sum()
    with pytest.raises(RuntimeError, match="before it was run again"):
        loss.backward()


pytestmark = pytest.mark.filterwarnings("ignore:Raw Sym")
ROWS, TOKENS, WIDTH = 4, 6, 8


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        rows, tokens, _ = x.shape
        halves = self.layer(x).view(rows, tokens, 2, WIDTH).transpose(1, 2).reshape(rows, 2 * tokens, WIDTH)
        return F.softmax(halves, 1).sum() / tokens**0.5


def sized(network=None, free=((0, 0), (0, 1))):
    x = torch.ones(ROWS, TOKENS, WIDTH)
    target = find_target(network or Halves())
    return capture(target, [x], {}, input_shapes=[tuple(x.shape)], parameter_shapes={}, free=free, keeps_sizes=True)


def test_a_plan_asks_of_a_size_only_that_its_parts_are_equal():
    graph, mesh = sized(), build_mesh(2)
    decide(graph, mesh, Constraints([TensorLayout((mesh.axes, (), ()))]))
    assert [sizes.why_not([(ROWS + 2, TOKENS + 5, WIDTH)]) for sizes in graph.sizes] == ["", ""]
    assert "Mod(size[0][0], 2)" in graph.sizes[-1].why_not([(ROWS + 1, TOKENS, WIDTH)])
    assert graph.sizes[-1].is_free


def test_a_size_of_one_is_another_program():
    assert sized().sizes[0].why_not([(ROWS, 1, WIDTH)])


@pytest.mark.parametrize(("rows", "tokens"), [(ROWS, TOKENS), (6, 3), (2, 9)])
def test_a_program_for_any_size_computes_what_the_network_does(rows, tokens):
    network = Halves()
    graph = sized(network)
    program = lower(graph, decide(graph, build_mesh(1), Constraints([TensorLayout.replicated(3)])))
    settle(program.graph)
    (segment,) = cut_segments(program, {})
    segment.use(graph.sizes[-1].find([(rows, tokens, WIDTH)]))
    x = torch.randn(rows, tokens, WIDTH)
    given = {"input_0": x, "p_layer_weight": network.layer.weight, "p_layer_bias": network.layer.bias}
    (result,) = segment.run(*(given[name] for name in segment.reads))
    torch.testing.assert_close(result, network(x))
