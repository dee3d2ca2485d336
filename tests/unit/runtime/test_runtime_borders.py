"""Operators on the host: where the graph is cut, what is copied, and that numbers stay what they are."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from host_networks import new_batch, new_network
from hypothesis import given
from hypothesis import strategies as st
from placed_parameters import placed
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from msrun.errors import StrategyError
from msrun.runtime import WithLoss, set_target, world
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.parallel import host_operators
from msrun.runtime.parallel.compilation.compiled import CompiledCall, build_compiled_call
from msrun.runtime.parallel.host_operators import moved_at_borders, targets_in
from msrun.runtime.parallel.plan import predict_traffic
from msrun.runtime.partition.borders import place_operators
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.segments import cut_segments
from msrun.runtime.sharding.layout import TensorLayout, build_mesh


def capture_loss(network: nn.Module) -> CapturedGraph:
    x, labels = new_batch(0)
    whole = [tuple(x.shape), tuple(labels.shape)]
    loss = WithLoss(network, F.cross_entropy)
    return capture(
        find_target(loss), [x, labels], {}, input_shapes=whole, parameter_shapes={}, targets=targets_in(loss)
    )


def program_of(captured: CapturedGraph, moved: frozenset[str] = frozenset(), **more: Any) -> LocalProgram:
    layouts = [TensorLayout.replicated(2), TensorLayout.replicated(1)]
    program = partition(captured, build_mesh(1), input_layouts=layouts, strategies={}, output_batch_axes=())
    place_operators(program, **{"stored": {}, "moved": moved, **more})
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


@given(placements())
def test_operators_on_the_host_change_no_number_and_copy_what_the_plan_says(drawn: tuple[str, frozenset[str]]) -> None:
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
    name: str, targets: dict[str, str], more: dict[str, Any], copies: list[tuple[str, str]], on_host: set[str] | None
) -> None:
    network = new_network(name)
    for module, target in targets.items():
        set_target(network.get_submodule(module), target)
    program = program_of(capture_loss(network), **more)
    assert {*copies} <= {*directions(program)}
    assert name == "transformer" or copies == directions(program)
    if on_host is not None:
        assert program.host_parameters == {f"network.{m}.{part}" for m in on_host for part in ("weight", "bias")}


class TwoSides(nn.Module):
    """Two parts that need nothing of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.wide = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(8, 4)

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
    ("module", "target", "words"),
    [
        (nn.ReLU(), "host", 'must be "cpu" or "device"'),
        (nn.ReLU(), "devise", "did you mean device"),
        (nn.ReLU(), 1, "target=1"),
        (nn.Linear, "cpu", "a torch module is expected, or a function"),
    ],
)
def test_unknown_target_is_refused(module: Any, target: Any, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        set_target(module, target)


def test_process_on_an_accelerator_moves_modules_and_functions_at_borders(monkeypatch: pytest.MonkeyPatch) -> None:
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
