"""When a capture is taken again, and how what it holds is replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import msrun.runtime.parallel.modes.fsdp
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.nn.random_stream import stream_of
from msrun.runtime.nn.replaced import current, replace_parameter, replaced_for_now
from msrun.runtime.partition.partition import _Lowering
from msrun.runtime.tensors.put_value import holding

network = nn.Linear(2, 2)
factor = 1.0


def captured(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CapturedGraph:
    shapes = [tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return capture(find_target(function), args, kwargs, input_shapes=shapes, parameter_shapes={})


def holds(graph: CapturedGraph, function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    return graph.traced.holds(function, args, kwargs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.alpha = 0.5
        self.settings = {"beta": 2.0, "names": ["a"]}
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor, *, is_large: bool | int = False) -> Tensor:
        y = self.drop(self.layer(x)) * self.alpha + self.mean * self.settings["beta"]
        return y * 10 if is_large and len(self.settings["names"]) == 1 else y


def _attribute(net: Net) -> None:
    net.alpha = 0.7


def _in_a_dict(net: Net) -> None:
    net.settings["beta"] = 3.0


def _probability(net: Net) -> None:
    net.drop.p = 0.1


def _module(net: Net) -> None:
    net.drop = nn.Identity()  # type: ignore[assignment]


def _evaluation(net: Net) -> None:
    net.drop.eval()


def _hook(net: Net) -> None:
    net.layer.register_forward_hook(lambda _m, _a, result: result * 2)


def _forward(net: Net) -> None:
    net.layer.forward = lambda x: x  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change", [_attribute, _in_a_dict, _probability, _module, _evaluation, _hook, _forward], ids=lambda f: f.__name__
)
def test_what_the_network_reads_and_the_graph_holds_may_not_change(change: Callable[[Net], None]) -> None:
    net, x = Net(), torch.ones(1, 2)
    graph = captured(net, x)
    assert holds(graph, net, x)
    change(net)
    assert not holds(graph, net, x)
    assert graph.traced.why_not(net, (x,), {}) != ""


def test_values_of_tensors_and_parameters_may_change() -> None:
    net, x = Net(), torch.ones(1, 2)
    graph = captured(net, x)
    with torch.no_grad():
        net.layer.weight.add_(1)
    net.layer.bias = nn.Parameter(torch.zeros(2))
    net.mean = torch.ones(2)
    assert holds(graph, net, torch.zeros(1, 2))


def test_one_and_true_are_two_arguments() -> None:
    net, x = Net(), torch.ones(1, 2)
    graph = captured(net, x, is_large=True)
    assert holds(graph, net, x, is_large=True)
    assert not holds(graph, net, x, is_large=1)
    assert not holds(graph, net, x, is_large=False)
    assert not holds(graph, net, x)


def test_call_without_gradients_is_another_call() -> None:
    net, x = Net(), torch.ones(1, 2)
    graph = captured(net, x)
    with torch.no_grad():
        assert not holds(graph, net, x)


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor


def test_object_in_the_place_of_another_is_looked_at_and_not_its_address() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, scale: Scale) -> Tensor:
            return self.layer(x) * scale.factor

    net, x = Scaled(), torch.ones(1, 2)
    graph = captured(net, x, Scale(2.0))
    found = [holds(graph, net, x, Scale(2.0 + index % 2)) for index in range(20)]
    assert found == [index % 2 == 0 for index in range(20)]


# -- functions ----------------------------------------------------------------------------------------------------


def make(module: nn.Module, number: float = 1.0, default: int = 0) -> Callable[[Any], Any]:
    def forward(x: Any, extra: int = default) -> Any:
        return module(x) * number + extra

    return forward


def uses_globals(x: Any) -> Any:
    return network(x) * factor


def test_closure_made_anew_is_the_same_call() -> None:
    x = torch.ones(1, 2)
    graph = captured(make(network), x)
    assert holds(graph, make(network), x)


def test_other_number_or_default_in_a_closure_makes_another_call() -> None:
    x = torch.ones(1, 2)
    graph = captured(make(network), x)
    assert not holds(graph, make(network, 2.0), x)
    assert not holds(graph, make(network, 1.0, 5), x)
    assert not holds(graph, make(network, number=True), x)


def test_global_number_that_changes_makes_another_call() -> None:
    global factor
    x = torch.ones(1, 2)
    graph = captured(uses_globals, x)
    assert holds(graph, uses_globals, x)
    factor = 2.0
    assert not holds(graph, uses_globals, x)
    factor = 1.0
    assert holds(graph, uses_globals, x)


def test_functions_that_it_calls_are_looked_into() -> None:
    def outer(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: inner(x)

    x = torch.ones(1, 2)
    graph = captured(outer(make(network)), x)
    assert holds(graph, outer(make(network)), x)
    assert not holds(graph, outer(make(network, 3.0)), x)
    graph = captured(outer(partial(make(network), extra=1)), x)
    assert holds(graph, outer(partial(make(network), extra=1)), x)
    assert not holds(graph, outer(partial(make(network), extra=2)), x)


def test_optimizer_made_before_takes_the_new_parameter_and_keeps_its_state() -> None:
    old, new = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([old], lr=0.1, momentum=0.9)
    old.grad = torch.ones(3)
    optimizer.step()
    moment = optimizer.state[old]["momentum_buffer"]
    replace_parameter(old, new)
    assert current(old) is new
    assert old.numel() == 0, "nobody may read what is trained no more"
    new.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["params"] == [new]
    assert optimizer.state[new]["momentum_buffer"] is moment
    torch.testing.assert_close(new.detach(), torch.full((3,), 1 - 0.1 * 1.9))


def test_the_stream_of_dropout_goes_on_with_the_new_parameters() -> None:
    network, whole = nn.Linear(3, 3, bias=False), nn.Parameter(torch.ones(3, 3))
    stream = stream_of(network)
    with replaced_for_now(network, {id(network.weight): whole}):
        assert stream_of(network) is stream
    old, network.weight = network.weight, nn.Parameter(torch.ones(3, 3))
    replace_parameter(old, network.weight)
    assert stream_of(network) is stream


def test_a_network_has_other_parameters_for_a_while() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].weight = old = network[0].weight
    whole = nn.Parameter(torch.zeros(4, 4))
    with replaced_for_now(network, {id(old): whole}):
        assert network[0].weight is network[1].weight is current(old) is whole
    assert network[0].weight is network[1].weight is current(old) is old


def test_a_parameter_holds_another_value_for_a_while_with_its_hooks_and_without_its_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: 3 * gradient)
    loss = parameter.sum()
    loss.backward(retain_graph=True)
    with holding([(parameter, torch.zeros(4))]):
        assert parameter.shape == (4,) and parameter.grad is None
        (gradient,) = torch.autograd.grad(parameter.sum(), [parameter])
        assert gradient.tolist() == [3.0] * 4
    assert parameter.tolist() == [1.0, 1.0]
    loss.backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [6.0, 6.0]


def test_torch_still_has_the_private_names_that_leave_parameters_whole() -> None:
    """Fails loudly when torch moves them; parallel/fsdp.py is the one place to change."""
    assert msrun.runtime.parallel.modes.fsdp.ShardPlacementResult is not None
    assert msrun.runtime.parallel.modes.fsdp.HSDPMeshInfo is not None
    assert callable(msrun.runtime.parallel.modes.fsdp.FSDPState._pre_forward)
    assert "_engine_run_backward" in torch.autograd.grad.__code__.co_names
    assert callable(compute_local_shape_and_global_offset)
    assert callable(nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)


def test_operator_without_a_rule_is_noted_once() -> None:
    lowering: Any = _Lowering.__new__(_Lowering)
    lowering._program = SimpleNamespace(notes=[])
    for name in ("aten.foo", "aten.foo", "aten.bar"):
        lowering._note_replicated(name)
    assert lowering._program.notes == [
        "aten.foo has no rule: every rank computes all of it",
        "aten.bar has no rule: every rank computes all of it",
    ]
