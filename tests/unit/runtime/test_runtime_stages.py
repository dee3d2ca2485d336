"""Stages of a pipeline and what Pipeline asks of a network."""

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import one_fast
from host_networks import new_batch, new_network
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_parameters import placed
from small_capture import captured, partitioned
from torch import Tensor, fx, nn
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from msrun.errors import StrategyError
from msrun.runtime import (
    AutoParallel,
    Pipeline,
    WithLoss,
    set_target,
    world,
)
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.groups import _named_after_ranks
from msrun.runtime.parallel import host_operators
from msrun.runtime.parallel.batch.parts import join_values
from msrun.runtime.parallel.compilation.compiled import build_compiled_call
from msrun.runtime.parallel.host_operators import moved_at_borders, targets_in
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec, pin_modules, pin_parameters
from msrun.runtime.parallel.plan import predict_traffic
from msrun.runtime.partition.borders import place_operators, place_stages
from msrun.runtime.partition.events import tell
from msrun.runtime.partition.stages import SLACK, assign_stages, cut_stages, divide, holders_of
from msrun.runtime.schedule.segments import cut_segments
from msrun.runtime.sharding.layout import build_mesh


class Network(nn.Module):
    """A long skip connection, a tied weight, and labels that are worked on before the loss reads them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.late = nn.Buffer(torch.ones(8))

    def forward(self, x):
        first = h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return (h + first + self.late) @ self.first.weight


def loss_of(scores, labels):
    return F.cross_entropy(scores, F.one_hot(labels, 6).to(scores.dtype) * 0.9 + 0.1 / 6)


@functools.cache
def captured_graph():
    torch.manual_seed(0)
    network = WithLoss(Network(), loss_of)
    return network, captured(network, torch.ones(4, 6), torch.zeros(4, dtype=torch.int64))


def cut(graph, count):
    program = partitioned(graph, 1)
    stage_of = assign_stages(graph, count, {}, "").stage_of
    return program, cut_stages(program, stage_of, count, tell(program).values, program.outputs[0])


def run_stages(network, stages, inputs):
    """Run the stages one after the other, with nothing but what crosses the borders."""
    parameters = dict(network.named_parameters())
    border = {}
    for stage in stages:
        assert {value.name for value in stage.received} == set(border)
        given = {use.node.name: parameters[name] for name, use in stage.program.parameters.items()}
        given |= {node.name: network.get_buffer(name) for name, node in stage.program.buffers.items()}
        given |= {node.name: value for node, value in stage.program.constants.values()}
        user = [inputs[index] for index in stage.user_inputs]
        read = [border[value.name] for value in stage.reads]
        given |= {node.name: value for node, value in zip(stage.program.inputs, [*user, *read], strict=True)}
        order = [given[node.name] for node in stage.program.graph.nodes if node.op == "placeholder"]
        made = fx.Interpreter(fx.GraphModule(nn.Module(), stage.program.graph)).run(*order)
        by_name = dict(zip([node.name for node in stage.program.outputs], made, strict=True))
        if stage.results:
            result = by_name[stage.results[0]]
        border = {value.name: by_name.get(value.name, border.get(value.name)) for value in stage.sent}
    return result


@pytest.mark.parametrize("count", one_fast(3, 1, 2, 4, 6))
def test_stages_one_after_the_other_compute_what_the_network_computes(count):
    network, graph = captured_graph()
    _, stages = cut(graph, count)
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(4, 6, generator=generator), torch.tensor([0, 5, 2, 2])
    torch.testing.assert_close(run_stages(network, stages, [x, labels]), network(x, labels), rtol=0, atol=1e-6)


def test_labels_buffers_and_tied_parameters_are_in_the_stages_that_read_them():
    program, stages = cut(captured_graph()[1], 3)
    assert [stage.user_inputs for stage in stages] == [(0,), (), (1,)]
    assert "one_hot" in str(stages[2].program.graph), "what is computed of labels alone"
    assert [list(stage.program.buffers) for stage in stages] == [[], [], ["network.late"]]
    holders = holders_of(program, stages)
    assert (holders["network.first.weight"], holders["network.first.bias"]) == ((0, 2), (0,))


def stages_of_modules(graph, assignment):
    found = {}
    for node, stage in assignment.stage_of.items():
        paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        found.setdefault(paths[-1].removeprefix("network.") if paths else "", set()).add(stage)
    return found


def test_modules_go_where_the_user_says_and_the_innermost_name_decides():
    network, graph = captured_graph()
    pipeline = Pipeline(network, 2, {"blocks": 0, "blocks.2": 1, "blocks.3": 2, "idle": 1})
    network.network.idle = nn.Identity()
    pins, notes = pin_modules(graph, pipeline.network, pipeline, 3)
    found = stages_of_modules(graph, assign_stages(graph, 3, pins, "stage_config"))
    assert [found[f"blocks.{i}.0"] for i in range(4)] == [{0}, {0}, {1}, {2}]
    assert found["first"] == {0}
    assert notes == ["modules of stage_config that compute nothing: idle"]


@pytest.mark.parametrize(
    ("count", "config", "message"),
    [
        (99, {}, r"operators of the network depend on parameters, too few for 99 stages: use fewer stages"),
        (2, {"blocs": 0}, r"no module 'blocs' \(did you mean blocks\?\); the network's modules are first, blocks"),
        (2, {"first": 2}, r"stage_config\['first'\] = 2: there are 2 stages, numbered from 0 to 1"),
        (2, {"first": 1, "blocks": 0}, r"module blocks.0.0 is in stage 0 but reads what module first in stage 1 makes"),
        (2, {"first": 0}, r"stage 1 of 2 has no operator: name a module for every stage"),
    ],
)
def test_impossible_division_is_refused(count, config, message):
    network, graph = captured_graph()
    with pytest.raises(StrategyError, match=message) as caught:
        assign_stages(graph, count, pin_modules(graph, network, Pipeline(network, 2, config), count)[0], "")
    if count == 99:
        assert assign_stages(graph, int(str(caught.value).split()[0]), {}, "").costs, "as many as there are"


class Remembers(Network):
    """Reads a buffer at its beginning and changes it at its end."""

    def forward(self, x):
        result = (self.first(x) + self.late).tanh() @ self.first.weight
        self.late.add_(result.detach().mean())
        return result


def test_buffer_that_one_stage_changes_and_another_one_reads_is_refused():
    with pytest.raises(StrategyError, match="changes buffer late in its forward pass, and several stages"):
        cut(captured(Remembers(), torch.ones(4, 6)), 2)


def test_operators_follow_parameters_that_are_placed_already():
    """The first stage that holds a tied weight and does not come before what its operator reads."""
    _, graph = captured_graph()
    holders = {"network.first.weight": (0, 1), "network.first.bias": (0,), "network.blocks.0.0.weight": (1,)}
    found = stages_of_modules(graph, assign_stages(graph, 2, pin_parameters(graph, holders), "placed"))
    assert found["first"] == {0}
    assert found["blocks.0.0"] == {1}
    with pytest.raises(StrategyError, match="reads parameters of different stages"):
        pin_parameters(graph, {"network.first.weight": (1,), "network.first.bias": (0,)})


class Narrow(nn.Module):
    """Parameters at both ends alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(4):
            x = torch.softmax(x.exp().cumsum(1), 1)
        return self.last(x)


def test_operators_of_a_later_capture_stay_in_their_stages_where_no_parameter_says_it():
    network = Narrow()
    first, second = (captured(network, torch.ones(rows, 6)) for rows in (4, 8))
    middle = [node for node in first.graph.nodes if node.op == "call_function"][2:-2]
    pins = {node: [1] for node in middle}
    linears = [node for node in first.graph.nodes if node.target is torch.ops.aten.linear.default]
    pins |= {linears[0]: [0], linears[1]: [2]}
    before = assign_stages(first, 3, pins, "")
    holders = {"first.weight": (0,), "first.bias": (0,), "last.weight": (2,), "last.bias": (2,)}
    placed = pin_parameters(second, holders)
    with pytest.raises(StrategyError, match="stage 1 of 3 has no operator"):
        assign_stages(second, 3, placed, "placed")
    assert assign_stages(second, 3, placed, "placed", before.by_name).by_name == before.by_name


@settings(max_examples=150)
@given(st.data())
def test_division_is_the_cheapest_within_the_slack_and_of_those_the_one_with_least_traffic(data):
    costs = data.draw(st.lists(st.sampled_from([0.0, 1.0, 3.0, 5.0, 10.0]), min_size=1, max_size=8))
    count = data.draw(st.integers(1, min(len(costs), 4)))
    traffic = data.draw(st.lists(st.integers(0, 4), min_size=len(costs), max_size=len(costs)))

    def worst(begins):
        ends = [0, *begins, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    every = list(itertools.combinations(range(1, len(costs)), count - 1))
    limit = min(map(worst, every)) * SLACK + 1e-9
    found = divide(costs, traffic, count)
    assert tuple(found) in every
    assert worst(found) <= limit
    least = min(sum(traffic[begin] for begin in begins) for begins in every if worst(begins) <= limit)
    assert sum(traffic[begin] for begin in found) == least


def test_results_that_are_no_scalars_are_joined_by_rows():
    network = nn.Linear(3, 2)
    x = torch.randn(6, 3)
    with torch.no_grad():
        torch.testing.assert_close(Pipeline(network, 3)(x), network(x))
    assert float(join_values([torch.tensor(1), torch.tensor(2)], 0.5)) == 1.5
    assert join_values(["word", "word"], 0.5) == "word"
    assert join_values([torch.ones(1, 2), torch.zeros(1, 2)], 0.5).tolist() == [[1, 1], [0, 0]]


LINEAR = nn.Linear(1, 1)


def pipelined(**settings):
    return AutoParallel(LINEAR).pipeline(**settings)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        *(
            (lambda n=n: Pipeline(LINEAR, n), r"micro_size=.*must be a whole number above 0")
            for n in (0, 1.0, True, "2")
        ),
        *((lambda s=s: Pipeline(LINEAR, 1, {"weight": s}), "must be a whole number, 0") for s in (-1, 1.0, True, "0")),
        (lambda: pipelined(stages=0), r"pipeline\(stages=0\): must be a whole number above 0"),
        (lambda: pipelined(stages=True), r"pipeline\(stages=True\): must be a whole number above 0"),
        (lambda: pipelined(interleave=1), r"pipeline\(interleave=1\): must be True or False"),
        (lambda: pipelined(output_broadcast="yes"), r"pipeline\(output_broadcast='yes'\): must be True or False"),
        (lambda: PipelineSpec(stages=3).ranks_per_stage(8), "8 ranks cannot be divided into 3 equal stages"),
    ],
)
def test_wrong_setting_is_refused_at_once(ask, message):
    with pytest.raises(StrategyError, match=message):
        ask()


def test_groups_that_members_make_are_named_after_their_ranks_alone(monkeypatch):
    """Torch's own name depends on how many groups the process has made, which differs between ranks. When the first
    assertion fails torch has mended it: take member_groups away."""
    name = distributed_c10d._hash_ranks_to_str([0, 1])
    monkeypatch.setitem(distributed_c10d._world.pg_names, object(), "another")
    monkeypatch.setattr(distributed_c10d._world, "group_count", distributed_c10d._world.group_count + 1)
    assert distributed_c10d._hash_ranks_to_str([0, 1]) != name
    with _named_after_ranks():
        assert distributed_c10d._process_group_name([0, 1], use_hashed_name=True) == "members-0-1"
    assert distributed_c10d._hash_ranks_to_str([0, 1]) != "members-0-1"


def capture_loss(network):
    loss = WithLoss(network, F.cross_entropy)
    return captured(loss, *new_batch(0), targets=targets_in(loss))


def program_of(graph, moved=frozenset(), **more):
    program = partitioned(graph, 1)
    place_operators(program, **{"stored": {}, "moved": moved, **more})
    return program


def compile_alone(network, graph, program):
    loss = WithLoss(network, F.cross_entropy)
    stored = {
        name: placed(name, value, on_host=name in program.host_parameters) for name, value in loss.named_parameters()
    }
    buffers = dict(loss.named_buffers())
    return build_compiled_call(graph, program, stored, buffers, mesh=build_mesh(1), rank=0)


def directions(program):
    return [(str(n.kwargs["collective"]), n.all_input_nodes[0].name) for n in program.borders]


@functools.cache
def captured_loss(name):
    return capture_loss(new_network(name).eval())


@st.composite
def placements(draw):
    name = draw(st.sampled_from(["conv", "mlp", "transformer"]))
    operators = sorted(node.name for node in captured_loss(name).graph.nodes if node.op == "call_function")
    return name, frozenset(draw(st.sets(st.sampled_from(operators))))


@settings(max_examples=4)
@given(placements())
def test_operators_on_the_host_change_no_number_and_copy_what_the_plan_says(drawn):
    name, moved = drawn
    network = new_network(name).eval()
    alone, (x, labels) = copy.deepcopy(network), new_batch(1)
    program = program_of(captured_loss(name), moved)
    call = compile_alone(network, captured_loss(name), program)
    traffic.reset()
    (loss,) = call.run([x, labels])
    loss.backward()
    right = F.cross_entropy(alone(x), labels)
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-12)
    for own, other in zip(network.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-14)
    plan = predict_traffic(call, 0).totals
    assert plan is not None
    assert (dict(traffic.calls), dict(traffic.bytes)) == (plan.calls, plan.bytes)
    values = directions(program)
    assert len(values) == len(set(values)), "no value is copied twice"


IN, OUT = "to_host", "to_device"


@pytest.mark.parametrize(
    ("name", "targets", "more", "copies", "on_host"),
    [
        ("mlp", {"second": "cpu"}, {}, [(IN, "relu_default"), (OUT, "linear_default_1")], {"second"}),
        ("mlp", {"": "cpu", "third": "device"}, {}, [(IN, "input_0"), (OUT, "tanh_default")], {"first", "second"}),
        ("mlp", {}, {"stored": {"network.first.weight": True}}, [(OUT, "p_network_first_weight")], None),
        ("mlp", {"first": "cpu"}, {"host_inputs": (0, 1)}, [(OUT, "linear_default"), (OUT, "input_1")], {"first"}),
        ("transformer", {"letters": "cpu"}, {}, [(IN, "p_network_letters_weight")], set()),
    ],
    ids=["a layer", "neighbours", "a parameter that lies there", "inputs that lie there", "a parameter of both sides"],
)
def test_values_are_copied_where_the_graph_is_cut_and_parameters_lie_where_they_are_read(
    name, targets, more, copies, on_host
):
    network = new_network(name)
    for module, target in targets.items():
        set_target(network.get_submodule(module), target)
    program = program_of(capture_loss(network), **more)
    assert {*copies} <= {*directions(program)}
    assert name == "transformer" or copies == directions(program)
    if on_host is not None:
        assert program.host_parameters == {f"network.{m}.{part}" for m in on_host for part in ("weight", "bias")}


def test_each_stage_of_a_pipeline_copies_for_its_own_operators_of_the_host():
    network = new_network("mlp")
    set_target(network.second, "cpu")
    program, stages = cut(capture_loss(network), 2)
    place_stages(program, stages, stored={}, host_inputs=())
    second = {"network.second.weight", "network.second.bias"}
    for stage in stages:
        has_second = second <= stage.program.parameters.keys()
        assert stage.program.host_parameters == (second if has_second else set())
        assert [way for way, _ in directions(stage.program)] == ([IN, OUT] if has_second else [])
    assert program.host_parameters == second


class TwoSides(nn.Module):
    """Two parts that need nothing of each other."""

    def __init__(self):
        super().__init__()
        self.deep, self.wide = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(8, 4)

    def forward(self, x):
        return self.deep(x) + self.wide(x)


def test_part_of_the_host_that_needs_nothing_of_the_device_begins_first():
    network = TwoSides().double()
    set_target(network.wide, "cpu")
    program = program_of(capture_loss(network))
    groups = {use.node.name: int(name.endswith("bias")) for name, use in program.parameters.items()}
    segments = cut_segments(program, groups)
    (host,) = [index for index, segment in enumerate(segments) if segment.on_host]
    readers = [i for i, s in enumerate(segments) if any("linear" in name for name in s.writes) and not s.on_host]
    assert host < readers[0], "its thread computes while the device does"


def test_error_in_an_operator_of_the_host_is_raised_where_it_is_called():
    network = new_network("transformer").eval()
    set_target(network.letters, "cpu")
    graph = capture_loss(network)
    call = compile_alone(network, graph, program_of(graph))
    x, labels = new_batch(1)
    network.letters.weight.data = network.letters.weight.data[:1]
    with pytest.raises(IndexError, match="out of range"):
        call.run([x + 3, labels])[0].item()


@pytest.mark.parametrize(
    ("module", "target", "words"),
    [
        (nn.ReLU(), "host", 'must be "cpu" or "device"'),
        (nn.ReLU(), "devise", "did you mean device"),
        (nn.ReLU(), 1, "target=1"),
        (nn.Linear, "cpu", "a torch module is expected, or a function"),
    ],
)
def test_unknown_target_is_refused(module, target, words):
    with pytest.raises(StrategyError, match=words):
        set_target(module, target)


def test_process_on_an_accelerator_moves_modules_and_functions_at_borders(monkeypatch):
    """torch's meta device stands for the accelerator, with empty copies: no operator may read both memories."""
    seen = []
    monkeypatch.setattr(world, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(
        host_operators,
        "_moved",
        lambda values, memory: tree_map_only(Tensor, lambda x: torch.empty_like(x, device=memory), values),
    )

    class Noting(nn.Linear):
        def forward(self, x):
            seen.append((x.device.type, self.weight.device.type))
            return super().forward(x)

    def double(x):
        seen.append((x.device.type, "function"))
        return 2 * x

    network = nn.Sequential(Noting(4, 4).to("meta"), nn.Sequential(Noting(4, 4), Noting(4, 4)))
    network[1][1].to_empty(device="meta")
    set_target(network[1], "cpu")
    set_target(network[1][1], "device")
    x = torch.ones(2, 4, device="meta")
    with moved_at_borders(network):
        assert set_target(double, "cpu")(network(x)).device.type == "meta"
    assert seen == [("meta", "meta"), ("cpu", "cpu"), ("meta", "meta"), ("cpu", "function")]
    assert "forward" not in vars(network[1])
