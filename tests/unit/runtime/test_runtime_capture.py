"""What a capture holds, and what cannot be captured."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint_sequential

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, WithLoss, no_init_parameters, shard, value_and_grad
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.capture.writes import make_functional
from msrun.runtime.parallel.given_strategies import strategies_of


def captured(network: Callable[..., Any], *inputs: Any, **settings: Any) -> CapturedGraph:
    shapes = [tuple(value.shape) for value in inputs if isinstance(value, Tensor)]
    return capture(find_target(network), inputs, settings, input_shapes=shapes, parameter_shapes={})


def names(graph: CapturedGraph) -> set[str]:
    return set(graph.parameters.values())


def operators(graph: CapturedGraph) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in graph.graph.nodes if node.op == "call_function"]


class Calls(nn.Module):
    def __init__(self, call: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._call = call

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        return self._call(self, *inputs, **settings)


# -- whose parameters ---------------------------------------------------------------------------------------------

module_of_this_file = nn.Linear(4, 2)


def function_of_this_file(x: Tensor) -> Tensor:
    return module_of_this_file(x).mean()


def test_module_is_its_own_target() -> None:
    network = nn.Sequential(nn.Linear(4, 2))
    assert find_target(network).root is network
    assert names(captured(network, torch.ones(1, 4))) == {"0.weight", "0.bias"}


def test_global_of_a_function_is_found() -> None:
    assert find_target(function_of_this_file).root is module_of_this_file


def test_closure_of_a_function_is_found() -> None:
    network = nn.Linear(4, 2)
    assert find_target(lambda x: network(x).sum()).root is network


def test_function_that_calls_a_function_is_followed() -> None:
    network = nn.Linear(4, 2)

    def inner(x: Tensor) -> Tensor:
        return network(x)

    def outer(x: Tensor) -> Tensor:
        return inner(x).sum()

    assert find_target(outer).root is network


def test_method_finds_the_networks_of_its_object() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.network = nn.Linear(4, 2)
            self.rate = 0.1

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x).sum()

    trainer = Trainer()
    assert find_target(trainer.forward).root is trainer.network


def test_loss_without_parameters_does_not_change_names() -> None:
    network, loss = nn.Linear(4, 2), nn.MSELoss()

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return loss(network(x), y)

    assert names(captured(forward, torch.ones(1, 4), torch.ones(1, 2))) == {"weight", "bias"}


def test_several_networks_keep_their_names_before_theirs() -> None:
    encoder, decoder = nn.Linear(4, 2), nn.Linear(2, 4)
    graph = captured(lambda x: decoder(encoder(x)).sum(), torch.ones(1, 4))
    assert names(graph) == {"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}


def test_function_without_a_module_is_refused() -> None:
    with pytest.raises(CaptureError, match="uses no torch module by name: give value_and_grad a function that calls"):
        find_target(lambda x: x.sum())


def test_loss_wrapper_is_taken_off_the_names_of_auto_parallel() -> None:
    network = nn.Linear(4, 2)
    assert [
        name for name, _ in AutoParallel(WithLoss(WithLoss(network, F.mse_loss), F.mse_loss)).named_parameters()
    ] == [
        "weight",
        "bias",
    ]


# -- what is captured ---------------------------------------------------------------------------------------------


def test_capture_computes_nothing_and_leaves_the_network_as_it_was() -> None:
    network = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    before = dict([*network.named_parameters(), *network.named_buffers()])
    graph = captured(network, torch.ones(3, 4))
    after = dict([*network.named_parameters(), *network.named_buffers()])
    assert all(after[name] is value for name, value in before.items())
    assert "1.running_mean" in graph.buffers.values()


def test_network_that_was_never_initialised_is_captured_on_global_shapes() -> None:
    with no_init_parameters():
        network = nn.Linear(4, 1 << 24)
    graph = capture(find_target(network), [torch.ones(2, 4)], {}, input_shapes=[(16, 4)], parameter_shapes={})
    (output,) = graph.outputs
    assert tuple(output.meta["val"].shape) == (16, 1 << 24)


def test_shapes_of_parameters_that_are_cut_already_are_the_global_ones() -> None:
    network = nn.Linear(4, 2)
    graph = capture(
        find_target(network),
        [torch.ones(3, 4)],
        {},
        input_shapes=[(3, 4)],
        parameter_shapes={"weight": (16, 4), "bias": (16,)},
    )
    assert tuple(graph.outputs[0].meta["val"].shape) == (3, 16)
    assert tuple(network.weight.shape) == (2, 4)


def test_tied_weights_are_one_parameter_with_its_first_name() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    assert names(captured(network, torch.ones(1, 4))) == {"0.weight", "0.bias", "1.bias"}


def test_arguments_that_are_no_tensors_are_fixed() -> None:
    network = Calls(
        lambda s, x, scale, *, square=False: s.layer(x) ** 2 if square else s.layer(x) * scale, layer=nn.Linear(4, 2)
    )
    assert operators(captured(network, torch.ones(1, 4), 3.0)) == ["linear.default", "mul.Tensor"]
    assert operators(captured(network, torch.ones(1, 4), 3.0, square=True)) == ["linear.default", "pow.Tensor_Scalar"]


def test_results_keep_their_structure() -> None:
    network = Calls(lambda s, x: {"loss": s.layer(x).sum(), "other": (x * 2, None, 3)}, layer=nn.Linear(4, 2))
    graph = captured(network, torch.ones(1, 4))
    loss, doubled = graph.outputs
    assert tuple(loss.meta["val"].shape) == ()
    assert tuple(doubled.meta["val"].shape) == (1, 4)
    call = graph.traced.bind(lambda *_: ("a", "b"))
    assert call(network, (torch.ones(1, 4),), {}) == {"loss": "a", "other": ("b", None, 3)}


def test_tensors_made_inside_are_on_the_device_of_the_inputs() -> None:
    network = Calls(
        lambda s, x: s.layer(x + torch.arange(4.0) + torch.ones(4, device=x.device) + x.new_zeros(4)),
        layer=nn.Linear(4, 2),
    )
    graph = captured(network, torch.ones(1, 4))
    assert not any("meta" in str(node.kwargs) for node in graph.graph.nodes)


def test_layers_of_torch_are_captured_as_their_operators_also_in_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        found = captured(layer, torch.ones(2, 3, 8))
    assert "linear.default" in operators(found)
    assert not [name for name in operators(found) if "_fwd" in name]


def test_losses_leave_no_broadcast_behind() -> None:
    network = Calls(lambda s, x, y: F.mse_loss(s.layer(x), y), layer=nn.Linear(4, 2))
    assert operators(captured(network, torch.ones(3, 4), torch.ones(3, 2))) == ["linear.default", "mse_loss.default"]
    with pytest.warns(UserWarning, match="broadcasting"):
        graph = captured(network, torch.ones(3, 4), torch.ones(1, 2))
    assert operators(graph) == ["linear.default", "expand.default", "mse_loss.default"]


def test_conversion_leaves_no_check_behind() -> None:
    network = Calls(lambda s, x: s.layer(x).to(torch.float64).float(), layer=nn.Linear(4, 2))
    assert not [name for name in operators(captured(network, torch.ones(3, 4))) if "assert" in name]


# -- operators that write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: F.relu_(x * 1), ["mul.Tensor", "relu.default"]),
        (lambda x: (x * 1).add_(1).mul_(2), ["mul.Tensor", "add.Tensor", "mul.Tensor"]),
        (lambda x: F.relu_((x * 1).flatten()), ["mul.Tensor", "flatten.using_ints", "relu.default"]),
        (
            lambda x: F.relu_(x * 1).flatten().add_(1),
            ["mul.Tensor", "relu.default", "flatten.using_ints", "add.Tensor"],
        ),
        (nn.ReLU(inplace=True), None),
    ],
)
def test_writing_operators_become_their_twins(call: Callable[[Tensor], Tensor], expected: list[str] | None) -> None:
    network = Calls(lambda s, x: call(s.layer(x)), layer=nn.Linear(4, 4))
    found = operators(captured(network, torch.ones(1, 4)))
    assert found == (["linear.default", *expected] if expected else ["linear.default", "relu.default"])


def test_later_readers_of_a_written_tensor_read_the_new_one() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        before = hidden * 2
        hidden += x
        return before + hidden * 3

    graph = captured(Calls(forward, layer=nn.Linear(4, 4)), torch.ones(1, 4)).graph
    by_name = {node.name: node for node in graph.nodes}
    assert by_name["mul"].args[0] is by_name["linear"]
    (added,) = [
        node for node in graph.nodes if str(node.target) == "aten.add.Tensor" and by_name["linear"] in node.args
    ]
    assert by_name["mul_1"].args[0] is added


def _column(h: Tensor) -> Tensor:
    h[:, 0] = 0
    return h


def _through_a_view(h: Tensor) -> Tensor:
    h.view(-1).add_(1)
    return h


def _view_made_before(h: Tensor) -> Tensor:
    rows = h[1:]
    h.mul_(2)
    h.t()[0].sub_(rows.sum())
    return rows + h[0]


def _shifted(h: Tensor) -> Tensor:
    shifted = torch.zeros_like(h)
    shifted[:, 1:] = h[:, :-1].clone()
    shifted[:, 0] = 3
    return shifted


def _items(h: Tensor) -> Tensor:
    h = h * 1
    first, second = h.detach().unbind(1)[0], h.detach().clone()
    second.chunk(2, 1)[1].add_(first[:, None])
    return h * second


def _twice(h: Tensor) -> Tensor:
    sums = h.new_zeros(2)
    total = sums.add_(h.sum())
    sums += 1
    return h * total[0]


def _other_type(h: Tensor) -> Tensor:
    counts = torch.zeros(4, dtype=torch.int64)
    counts += 1
    low = torch.zeros(4, dtype=torch.bfloat16)
    low += h[0].detach() * 2
    return h * counts + low


def _head_of_a_detector(h: Tensor) -> Tensor:
    h[..., 0] = torch.sigmoid(h[..., 0])
    h[..., 1:3] = h[..., 1:3] * 2
    return h


def _into_a_result(h: Tensor) -> Tensor:
    sums = torch.empty_like(h)
    torch.mul(h.detach(), 2, out=sums)
    return h + sums


@pytest.mark.parametrize("strategy", [None, ((2, 1), (1, 1))], ids=["whole", "strategy"])
@pytest.mark.parametrize(
    "call",
    [
        _column,
        _through_a_view,
        _view_made_before,
        _shifted,
        _items,
        _twice,
        _other_type,
        _head_of_a_detector,
        _into_a_result,
    ],
    ids=lambda f: f.__name__,
)
def test_graph_without_writes_computes_what_the_network_computes(
    call: Callable[[Tensor], Tensor], strategy: Any
) -> None:
    network = Calls(lambda s, x: call(s.layer(x)), layer=nn.Linear(4, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    if strategy is not None:
        shard(network.layer, strategy)
    found = capture(
        find_target(network), (x,), {}, input_shapes=[(3, 4)], parameter_shapes={}, strategies=strategies_of(network)
    )
    assert not [name for name in operators(found) if name.partition(".")[0].endswith("_")]
    parameters = dict(network.named_parameters())
    known = found.constants | {key: parameters[name] for key, name in found.parameters.items()} | {"input_0": x}
    given = [known[node.name] for node in found.graph.nodes if node.op == "placeholder"]
    result = fx.Interpreter(fx.GraphModule(nn.Module(), found.graph)).run(*given)[0]
    right = network(x)
    torch.testing.assert_close(result, right)
    gradients = [torch.autograd.grad(y.square().sum(), list(parameters.values())) for y in (result, right)]
    torch.testing.assert_close(*gradients)


def test_write_whose_memory_has_lost_its_owner_is_an_error_and_not_lost_with_it() -> None:
    graph = fx.Graph()
    x, value = graph.placeholder("input_0"), torch.zeros(3, 4)
    x.meta["val"] = value
    column = graph.call_function(torch.ops.aten.select.int, (x, 1, 0))
    column.meta["val"] = torch.zeros(3, 4).select(1, 0)  # of memory that no node has, as marks once left it
    written = graph.call_function(torch.ops.aten.fill_.Scalar, (column, 1.0))
    written.meta["val"] = column.meta["val"]
    graph.output(([x],))
    with pytest.raises(CaptureError, match="whose owner is lost"):
        make_functional(graph, {})


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Calls(lambda s, x: s.layer(x.add_(1)), layer=nn.Linear(4, 4)), "aten.add_.Tensor changes"),
        (
            Calls(lambda s, x: F.batch_norm(s.layer(x), x[0], x[1], training=True), layer=nn.Linear(4, 4)),
            "aten.batch_norm changes",
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), "depends on a tensor's values"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)),
            "aten.instance_norm changes its running statistics",
        ),
        (Calls(lambda s, x: s.layer(x) if x.sum() > 0 else x, layer=nn.Linear(4, 4)), "depends on a tensor's values"),
        (Calls(lambda s, x: s.layer(x) * float(x.sum()), layer=nn.Linear(4, 4)), ""),
        (Calls(lambda s, x: s.layer(x)[x > 0].sum(), layer=nn.Linear(4, 4)), "a tensor whose size depends on values"),
    ],
    ids=[
        "argument",
        "batch-norm-of-an-argument",
        "average",
        "instance-norm",
        "branch",
        "number",
        "mask",
    ],
)
def test_what_cannot_be_captured_is_named_with_the_mode_that_needs_no_capture(network: nn.Module, words: str) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(network, torch.ones(2, 4))
    assert words in str(caught.value)
    assert 'parallel_mode="data_parallel"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_network_is_whole_again_after_a_capture_that_failed() -> None:
    network = Calls(lambda s, x: s.layer(x) if x.sum() > 0 else x, layer=nn.LSTM(4, 4))
    weights = list(network.parameters())
    with pytest.raises(CaptureError):
        captured(network, torch.ones(2, 4))
    assert all(a is b for a, b in zip(network.parameters(), weights, strict=True))
    assert all(a is b for a, b in zip(network.layer._flat_weights, weights, strict=True))


# -- AutoParallel's own words -------------------------------------------------------------------------------------


def test_unknown_words_are_refused_with_the_nearest_one() -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match=r"did you mean semi_auto\?.*must be semi_auto, data_parallel, "):
        AutoParallel(network, "semi-auto")
    with pytest.raises(StrategyError, match=r"compat='tensorflow': must be torch \(means\) or mindspore \(sums\)"):
        AutoParallel(network, compat="tensorflow")  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=r"did you mean full_batch\?"):
        AutoParallel(network).dataset_strategy("fullbatch")


def test_plan_of_one_process_says_that_nothing_is_cut() -> None:
    text = AutoParallel(nn.Linear(2, 2)).plan.explain()
    assert "one process trains it" in text
    assert "one training step, on each rank: nothing" in text
    assert "nothing is captured, cut or sent" in text


def test_plan_of_a_step_function_before_its_first_call_is_refused() -> None:
    with pytest.raises(CaptureError, match="there is no plan yet"):
        _ = AutoParallel(lambda x: x).plan


def test_parameters_of_a_step_function_are_the_networks() -> None:
    with pytest.raises(StrategyError, match="ask the network"):
        list(AutoParallel(lambda x: x).parameters())


def test_value_and_grad_without_anything_to_differentiate_is_refused() -> None:
    with pytest.raises(StrategyError, match="name arguments or weights"):
        value_and_grad(lambda x: x, None, None)


@pytest.mark.parametrize("parallel", [False, True])
def test_value_and_grad_gives_gradients_in_mindspores_shapes(parallel: Any) -> None:
    network = nn.Linear(3, 1)
    x, y = torch.ones(2, 3), torch.full((2, 1), 2.0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ((network(x) - y) ** 2).sum()

    def ask(*settings: Any, **more: Any) -> Any:
        function = value_and_grad(loss, *settings, **more)
        return (AutoParallel(lambda a, b: function(a, b)) if parallel else function)(x, y)

    weights = list(network.parameters())
    value, of_x = ask()
    assert isinstance(of_x, Tensor)
    assert of_x.shape == x.shape
    assert not value.requires_grad
    _, of_both = ask((0, 1))
    assert [tuple(g.shape) for g in of_both] == [(2, 3), (2, 1)]
    _, of_weights = ask(None, weights)
    assert [tuple(g.shape) for g in of_weights] == [(1, 3), (1,)]
    _, (of_x, of_weights) = ask(0, weights)
    assert of_x.shape == x.shape
    assert len(of_weights) == 2
    assert all(weight.grad is None for weight in weights)
    assert x.grad is None


def test_value_and_grad_passes_other_results_through() -> None:
    network = nn.Linear(3, 1)
    function = value_and_grad(lambda x: (network(x).sum(), x * 2, "word"), None, network.parameters(), has_aux=True)
    (loss, doubled, word), gradients = function(torch.ones(2, 3))
    assert not loss.requires_grad
    assert doubled.tolist() == [[2.0] * 3] * 2
    assert word == "word"
    assert gradients[1].tolist() == [2.0]


def test_weight_that_the_loss_does_not_use_has_gradient_zero() -> None:
    network, other = nn.Linear(3, 1), nn.Linear(2, 2)
    function = value_and_grad(lambda x: network(x).sum(), None, [network.weight, other.weight])
    _, (_, gradient) = function(torch.ones(1, 3))
    assert gradient.tolist() == [[0.0, 0.0]] * 2


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 4)
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def captured_of(network: nn.Module) -> CapturedGraph:
    x = torch.ones(2, 4)
    return capture(find_target(network), (x,), {}, input_shapes=[(2, 4)], parameter_shapes={})


def _default_dtype(net: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return net.layer(x)


def _branch_under_autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.layer(x) if x.sum() > 0 else x


def _number_in_vmap(net: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: net.layer(row) * float(torch.ones(2)[0].item()))(x)


def _packed(net: Any, x: Tensor) -> Tensor:
    packed = rnn.pack_padded_sequence(net.layer(x)[None], torch.tensor([2]), batch_first=True)
    return packed.data


def _written_beside_its_hook(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x)
    column = h[:, 0]
    h.register_hook(lambda gradient: gradient * 2)
    column.zero_()
    return net.head(h)


_inner = AutoParallel(nn.Linear(4, 8))
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "vmap": (lambda net, x: torch.vmap(lambda row: net.head(net.layer(row)))(x), "torch.vmap"),
    "number in vmap": (_number_in_vmap, ""),
    "func.grad": (lambda net, x: torch.func.grad(lambda z: net.layer(z).sum())(x), "torch.func"),
    "jvp": (lambda net, x: torch.func.jvp(net.layer, (x,), (x,))[1], "torch.func"),
    "jacrev": (lambda net, x: torch.func.jacrev(lambda z: net.layer(z).sum())(x), "torch.func"),
    "autograd.grad": (lambda net, x: torch.autograd.grad(net.layer(x).sum(), x)[0], "takes gradients"),
    "cond": (lambda net, x: torch.cond(x.sum() > 0, net.layer, net.layer, (x,)), "cond"),
    "random.uniform": (lambda net, x: net.layer(x) * random.uniform(0, 1), "the random of Python or numpy"),
    "random.randint": (lambda net, x: net.layer(x) * random.randint(0, 9), "the random of Python or numpy"),
    "random.random": (lambda net, x: net.layer(x) * random.random(), "the random of Python or numpy"),
    "random.choice": (lambda net, x: net.layer(x) * random.choice([1, 2]), "the random of Python or numpy"),
    "default dtype": (_default_dtype, "changes torch's default dtype"),
    "branch under autocast": (_branch_under_autocast, "depends on a tensor's values"),
    "packed sequence": (_packed, "pack_padded_sequence"),
    "AutoParallel inside": (lambda net, x: net.head(_inner(x)), "an AutoParallel inside: call the network itself"),
    "wrong shapes": (lambda net, x: net.head(x), "torch raises RuntimeError: a and b must have same reduction dim"),
    "write beside a hook": (_written_beside_its_hook, "after its register_hook"),
    "max_norm": (
        lambda net, x: F.embedding(torch.tensor([1, 2]), net.layer.weight, max_norm=1.0) + x,
        "embedding_renorm_ changes parameter layer_weight",
    ),
}


def process_state() -> tuple[Any, ...]:
    return (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._functorch.get_interpreter_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.mark.parametrize("name", every_third_fast(REFUSED))
def test_refused_habit_is_named_with_its_line_and_leaves_the_process_as_it_was(name: str) -> None:
    call, words = REFUSED[name]
    network, good = Net(call), Net(lambda net, x: net.head(net.layer(x)))
    before = process_state()
    with pytest.raises(CaptureError) as caught:
        captured_of(network)
    assert words in str(caught.value)
    assert 'parallel_mode="data_parallel"' in str(caught.value)
    assert "\n" not in str(caught.value)
    if name != "default dtype":  # which is seen when the whole call was traced
        assert re.match(re.escape(__file__) + r":\d+: ", str(caught.value)), caught.value
    assert process_state() == before
    operators = [str(node.target) for node in captured_of(good).graph.nodes]
    assert operators.count("aten.linear.default") == 2


class Odd(Exception):
    pass


def _raises(error: Callable[[Tensor], Exception]) -> Callable[[Any, Tensor], Tensor]:
    def forward(_: Any, x: Tensor) -> Tensor:
        raise error(x)

    return forward


@pytest.mark.parametrize(
    ("forward", "kind", "words"),
    [
        (_raises(lambda x: ValueError(f"{x.shape[1]} columns")), ValueError, "4 columns"),
        (_raises(lambda _: Odd("odd", 3)), Odd, "3"),
        (lambda _, x: {"a": x}["b"], KeyError, "b"),
        (lambda net, _: net.nothing, AttributeError, "nothing"),
    ],
    ids=["ValueError", "own class", "KeyError", "AttributeError"],
)
def test_exception_of_the_network_keeps_its_type_and_tells_its_line(
    forward: Callable[..., Tensor], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        captured_of(Net(forward))
    assert Path(__file__).name in caught.value.__notes__[0]


def test_arrays_of_numpy_are_followed_like_other_constants() -> None:
    network = Net(lambda net, x: net.layer(x)[:, :4] * torch.from_numpy(net.scale), scale=np.ones(4, np.float32))
    graph = captured_of(network)
    x = torch.ones(2, 4)
    assert graph.traced.holds(network, (x,), {})
    assert graph.traced.holds(network, (x,), {})
    network.scale = np.ones(4, np.float64)
    assert not graph.traced.holds(network, (x,), {})


def _ctc(net: Any, x: Tensor) -> Tensor:
    rows = net.head(net.layer(x)).log_softmax(-1)[:, None]
    return F.ctc_loss(rows, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("network", "operator"),
    [
        (Net(_ctc), "aten.ctc_loss.Tensor"),
        (
            Net(
                lambda net, x: checkpoint_sequential(
                    nn.Sequential(net.layer, net.head, net.layer), 2, x, use_reentrant=False
                )
            ),
            "aten.linear.default",
        ),
        (Net(lambda net, x: net.last(x), last=parametrizations.spectral_norm(nn.Linear(4, 4))), "aten.div.Tensor"),
    ],
    ids=["ctc", "checkpoint_sequential", "spectral_norm"],
)
def test_functions_that_dynamo_does_not_follow_alone_are_captured(network: nn.Module, operator: str) -> None:
    assert operator in [str(node.target) for node in captured_of(network).graph.nodes]


@torch.compiler.allow_in_graph
def _allowed(x: Tensor) -> Tensor:
    return x.sigmoid() * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda h: torch.fft.rfft(h).abs(),
        lambda h: h * torch.signal.windows.hann(8),
        lambda h: torch.linalg.vector_norm(h) + torch.special.expit(h),
        lambda h: rnn.pad_sequence(list(h), batch_first=True),
        lambda h: torch.masked.sum(h, mask=torch.ones(2, 8, dtype=torch.bool)),
        lambda h: h + torch.from_numpy(np.ones(8, np.float32) * 2),
        lambda h: torch.Tensor.add(h, h).T.mT,
        _allowed,
    ],
    ids=["fft", "window", "linalg and special", "padding", "masked", "numpy", "methods", "allow_in_graph"],
)
def test_list_of_operators_is_not_too_short(call: Callable[[Tensor], Tensor]) -> None:
    captured_of(Net(lambda net, x: call(net.layer(x))))


def test_inference_mode_in_forward_records_no_gradients() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            fixed = net.layer(x)
        return net.head(net.layer(x)) + fixed.sum()

    targets = [str(node.target) for node in captured_of(Net(forward)).graph.nodes]
    assert "aten.detach.default" in targets
