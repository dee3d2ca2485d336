"""Operators on the host: where the graph is cut, what is copied, and that numbers stay what they are."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from host_networks import new_batch, new_network
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_parameters import placed
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from msrun.errors import StrategyError
from msrun.runtime import WithLoss, set_target, world
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.parallel import host_operators
from msrun.runtime.parallel.compilation.build_call import build_compiled_call
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.host_operators import moved_at_borders, targets_in
from msrun.runtime.parallel.plan_traffic import predict_traffic
from msrun.runtime.partition.borders import find_readers, place_operators
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.segments import cut_segments
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.rule import apply_collective


def capture_loss(network: nn.Module) -> CapturedGraph:
    x, labels = new_batch(0)
    whole = [tuple(x.shape), tuple(labels.shape)]
    loss = WithLoss(network, F.cross_entropy)
    return capture(
        find_target(loss), [x, labels], {}, input_shapes=whole, parameter_shapes={}, targets=targets_in(loss)
    )


def program_of(captured: CapturedGraph, moved: frozenset[str] = frozenset()) -> LocalProgram:
    layouts = [TensorLayout.replicated(2), TensorLayout.replicated(1)]
    program = partition(captured, build_mesh(1), input_layouts=layouts, strategies={}, output_batch_axes=())
    place_operators(program, stored={}, moved=moved)
    return program


def compile_alone(network: nn.Module, captured: CapturedGraph, program: LocalProgram) -> CompiledCall:
    loss = WithLoss(network, F.cross_entropy)
    stored = {
        name: placed(name, value, on_host=name in program.host_parameters) for name, value in loss.named_parameters()
    }
    buffers = dict(loss.named_buffers())
    return build_compiled_call(captured, program, stored, buffers, mesh=build_mesh(1), rank=0)


def directions(program: LocalProgram) -> list[tuple[str, str]]:
    return [(str(n.kwargs["collective"]), n.all_input_nodes[0].name) for n in program.borders]


@functools.cache
def captured_loss(name: str) -> CapturedGraph:
    return capture_loss(new_network(name).eval())


@st.composite
def placements(draw: st.DrawFn) -> tuple[str, frozenset[str]]:
    name = draw(st.sampled_from(["conv", "mlp", "transformer"]))
    operators = sorted(node.name for node in captured_loss(name).graph.nodes if node.op == "call_function")
    return name, frozenset(draw(st.sets(st.sampled_from(operators))))


@settings(max_examples=40, deadline=None)
@given(placements())
def test_any_operators_on_the_host_change_no_number_and_copy_what_the_plan_says(
    drawn: tuple[str, frozenset[str]],
) -> None:
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
    values = [(str(n.kwargs["collective"]), n.all_input_nodes[0].name) for n in program.borders]
    assert len(values) == len(set(values)), "no value is copied twice"


def test_layer_on_the_host_has_one_copy_in_and_one_out_and_its_parameters_there() -> None:
    network = new_network("mlp")
    set_target(network.second, "cpu")
    program = program_of(capture_loss(network))
    assert directions(program) == [("to_host", "relu_default"), ("to_device", "linear_default_1")]
    assert program.host_parameters == {"network.second.weight", "network.second.bias"}
    assert [o.operator for o in program.operators if o.on_host] == ["aten.linear"]


def test_neighbours_on_the_host_copy_nothing_between_them() -> None:
    network = new_network("mlp")
    set_target(network, "cpu")
    set_target(network.third, "device")
    program = program_of(capture_loss(network))
    assert directions(program) == [("to_host", "input_0"), ("to_device", "tanh_default")]


def test_parameter_that_both_sides_read_stays_on_the_device_and_is_copied_each_step() -> None:
    network = new_network("transformer")
    set_target(network.letters, "cpu")
    program = program_of(capture_loss(network))
    assert program.host_parameters == set()
    assert ("to_host", "p_network_letters_weight") in directions(program)


def test_parameter_that_lies_on_the_host_already_stays_there() -> None:
    captured = capture_loss(new_network("mlp"))
    layouts = [TensorLayout.replicated(2), TensorLayout.replicated(1)]
    program = partition(captured, build_mesh(1), input_layouts=layouts, strategies={}, output_batch_axes=())
    place_operators(program, stored={"network.first.weight": True})
    assert directions(program) == [("to_device", "p_network_first_weight")]


def test_parameter_whose_parts_are_gathered_is_read_by_what_reads_the_whole() -> None:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    gathered = graph.call_function(apply_collective, (weight,), {"collective": Collective("gather", (0,), 0)})
    product = graph.call_function(torch.mm, (x, gathered))
    half = graph.call_function(torch.relu, (weight,))
    graph.output((product, half, weight))
    assert find_readers(weight) == {product, half}


def test_input_on_the_host_is_copied_to_operators_of_the_device_alone() -> None:
    network = new_network("mlp")
    set_target(network.first, "cpu")
    captured = capture_loss(network)
    layouts = [TensorLayout.replicated(2), TensorLayout.replicated(1)]
    program = partition(captured, build_mesh(1), input_layouts=layouts, strategies={}, output_batch_axes=())
    place_operators(program, stored={}, host_inputs=(0, 1))
    assert directions(program) == [("to_device", "linear_default"), ("to_device", "input_1")]


class TwoSides(nn.Module):
    """Two parts that need nothing of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.wide = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.deep(x) + self.wide(x)


def test_part_of_the_host_that_needs_nothing_of_the_device_begins_first() -> None:
    network = TwoSides().double()
    set_target(network.wide, "cpu")
    program = program_of(capture_loss(network))
    groups = {use.node.name: int(name.endswith("bias")) for name, use in program.parameters.items()}
    segments = cut_segments(program, groups)
    (host,) = [index for index, segment in enumerate(segments) if segment.on_host]
    readers = [i for i, s in enumerate(segments) if any("linear" in name for name in s.writes) and not s.on_host]
    assert host < readers[0], "its thread computes while the device does"


def test_function_with_a_target_is_cut_out_and_the_innermost_target_counts() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(on_host(self.inner, x))

    on_host = set_target(lambda layer, x: torch.sin(layer(torch.cos(x))), "cpu")
    network = Network().double()
    assert [o.operator for o in program_of(capture_loss(network)).operators if o.on_host] == [
        "aten.cos",
        "aten.linear",
        "aten.sin",
    ]
    set_target(network.inner, "device")
    assert [o.operator for o in program_of(capture_loss(network)).operators if o.on_host] == ["aten.cos", "aten.sin"]
    set_target(network, "device")
    assert [o.operator for o in program_of(capture_loss(network)).operators if o.on_host] == ["aten.cos", "aten.sin"]


def test_error_in_an_operator_of_the_host_is_raised_where_it_is_called() -> None:
    network = new_network("transformer").eval()
    set_target(network.letters, "cpu")
    captured = capture_loss(network)
    call = compile_alone(network, captured, program_of(captured))
    x, labels = new_batch(1)
    network.letters.weight.data = network.letters.weight.data[:1]
    with pytest.raises(IndexError, match="out of range"):
        call.run([x + 3, labels])[0].item()


@pytest.mark.parametrize(
    ("target", "words"),
    [("host", 'must be "cpu" or "device"'), ("devise", "did you mean device"), (1, "target=1")],
)
def test_unknown_target_is_refused(target: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        set_target(nn.Linear(2, 2), target)


def test_what_cannot_be_called_has_no_target() -> None:
    with pytest.raises(StrategyError, match="a torch module is expected, or a function"):
        set_target(nn.Linear, "cpu")


def test_one_process_on_an_accelerator_moves_modules_and_functions_at_their_borders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's meta device stands for the accelerator, with empty copies: no operator may read both memories."""
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(world, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(
        host_operators,
        "_moved",
        lambda values, memory: tree_map_only(Tensor, lambda x: torch.empty_like(x, device=memory), values),
    )

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.device.type, self.weight.device.type))
            return super().forward(x)

    def double(x: Tensor) -> Tensor:
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
