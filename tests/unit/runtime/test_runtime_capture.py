"""What a capture holds, and what cannot be captured."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast, one_fast, slow_but
from small_capture import captured
from torch import Tensor, fx, nn
from torch.nn.utils import rnn
from torch.utils._pytree import tree_map_only

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, no_init_parameters, shard, value_and_grad
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.capture.writes import make_functional


def operators(graph):
    return [str(node.target).removeprefix("aten.") for node in graph.graph.nodes if node.op == "call_function"]


class Net(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in {"layer": nn.Linear(4, 8), "head": nn.Linear(8, 4), **parts}.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *inputs, **settings):
        return self._forward(self, *inputs, **settings)


module_of_this_file = nn.Linear(4, 2)


def function_of_this_file(x):
    return module_of_this_file(x).mean()


class Trainer:
    def __init__(self, network):
        self.network = network
        self.rate = 0.1

    def forward(self, x):
        return self.network(x).sum()


def test_network_of_a_function_is_found():
    network = nn.Linear(4, 2)

    def inner(x):
        return network(x)

    for target in (network, inner, lambda x: inner(x).sum(), Trainer(network).forward):
        assert find_target(target).root is network
    assert find_target(function_of_this_file).root is module_of_this_file
    with pytest.raises(CaptureError, match="uses no torch module by name: give value_and_grad a function that calls"):
        find_target(lambda x: x.sum())


def test_names_of_parameters_are_those_of_the_networks():
    encoder, decoder, loss = nn.Linear(4, 2), nn.Linear(2, 4), nn.MSELoss()
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    for forward, names in (
        (lambda x: loss(encoder(x), x[:, :2]), {"weight", "bias"}),
        (lambda x: decoder(encoder(x)), {"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}),
        (tied, {"0.weight", "0.bias", "1.bias"}),
    ):
        assert {*captured(forward, torch.ones(1, 4)).parameters.values()} == names


def test_capture_computes_nothing_and_leaves_the_network_as_it_was_also_when_it_fails():
    network = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    before = [*network.parameters(), *network.buffers()]
    assert "1.running_mean" in captured(network, torch.ones(3, 4)).buffers.values()
    assert all(a is b for a, b in zip([*network.parameters(), *network.buffers()], before, strict=True))
    failing = Net(lambda s, x: s.layer(x) if x.sum() > 0 else x, layer=nn.LSTM(4, 4))
    weights = list(failing.parameters())
    with pytest.raises(CaptureError):
        captured(failing, torch.ones(2, 4))
    for found in (failing.parameters(), [*failing.layer._flat_weights, *failing.head.parameters()]):
        assert all(a is b for a, b in zip(found, weights, strict=True))


def test_shapes_are_the_global_ones_also_of_parameters_that_are_cut_or_were_never_initialised():
    with no_init_parameters():
        network = nn.Linear(4, 1 << 24)
    for cut, shape in (({}, (16, 1 << 24)), ({"weight": (1 << 25, 4), "bias": (1 << 25,)}, (16, 1 << 25))):
        graph = captured(network, torch.ones(2, 4), input_shapes=[(16, 4)], parameter_shapes=cut)
        assert tuple(graph.outputs[0].meta["val"].shape) == shape
    assert tuple(network.weight.shape) == (1 << 24, 4)


def test_results_keep_their_structure():
    network = Net(lambda s, x: {"loss": s.layer(x).sum(), "other": (x * 2, None, 3)}, layer=nn.Linear(4, 2))
    graph = captured(network, torch.ones(1, 4))
    assert [tuple(output.meta["val"].shape) for output in graph.outputs] == [(), (1, 4)]
    call = graph.traced.bind(lambda *_: ("a", "b"))
    assert call(network, (torch.ones(1, 4),), {}) == {"loss": "a", "other": ("b", None, 3)}


def _without_gradients(self, x):
    with torch.inference_mode():
        fixed = self.layer(x)
    return self.layer(x) + fixed


scaled = Net(
    lambda s, x, scale, *, square=False: s.layer(x) ** 2 if square else s.layer(x) * scale, layer=nn.Linear(4, 2)
)


@pytest.mark.parametrize(
    ("network", "arguments", "settings", "expected"),
    [
        (scaled, (3.0,), {}, ["linear.default", "mul.Tensor"]),
        (scaled, (3.0,), {"square": True}, ["linear.default", "pow.Tensor_Scalar"]),
        (
            Net(lambda s, x, y: F.mse_loss(s.layer(x), y), layer=nn.Linear(4, 2)),
            (torch.ones(3, 2),),
            {},
            ["linear.default", "mse_loss.default"],
        ),
        (Net(lambda s, x: s.layer(x).double(), layer=nn.Linear(4, 2)), (), {}, ["linear.default", "to.dtype"]),
        (
            Net(_without_gradients, layer=nn.Linear(4, 2)),
            (),
            {},
            ["detach.default"] * 2 + ["linear.default"] * 2 + ["add.Tensor"],
        ),
    ],
    ids=["number", "keyword", "loss without a broadcast", "conversion without a check", "inference mode"],
)
def test_graph_holds_the_operators_of_the_call_and_nothing_else(network, arguments, settings, expected):
    assert operators(captured(network, torch.ones(3, 4), *arguments, named=settings)) == expected


def test_layers_of_torch_in_evaluation_and_tensors_made_inside_are_captured_as_in_training():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    network = Net(
        lambda s, x: s.layer(x + torch.arange(8.0) + torch.ones(8, device=x.device) + x.new_zeros(8)), layer=layer
    )
    with torch.no_grad():
        found = captured(network, torch.ones(2, 3, 8))
    assert "linear.default" in operators(found)
    assert not [name for name in operators(found) if "_fwd" in name]
    assert not any("meta" in str(node.kwargs) for node in found.graph.nodes)


def _view_made_before(h):
    rows = h[1:]
    h.mul_(2)
    h.t()[0].sub_(rows.sum())
    return rows + h[0]


def _shifted(h):
    shifted = torch.zeros_like(h)
    shifted[:, 1:] = h[:, :-1].clone()
    shifted[:, 0] = 3
    return shifted


def _items(h):
    h = h * 1
    first, second = h.detach().unbind(1)[0], h.detach().clone()
    second.chunk(2, 1)[1].add_(first[:, None])
    return h * second


def _twice(h):
    sums = h.new_zeros(2)
    total = sums.add_(h.sum())
    sums += 1
    return h * total[0]


def _other_type(h):
    counts = torch.zeros(4, dtype=torch.int64)
    counts += 1
    low = torch.zeros(4, dtype=torch.bfloat16)
    low += h[0].detach() * 2
    return h * counts + low


def _head_of_a_detector(h):
    h[..., 0] = torch.sigmoid(h[..., 0])
    h[..., 1:3] = h[..., 1:3] * 2
    return h


def _into_a_result(h):
    sums = torch.empty_like(h)
    torch.mul(h.detach(), 2, out=sums)
    return h + sums


def _read_before_and_after(h):
    before = h * 2
    h += 1
    return before + F.relu_((h * 1).flatten()).view_as(h)


@pytest.mark.parametrize("strategy", one_fast(((2, 1), (1, 1)), None), ids=["strategy", "whole"])
@pytest.mark.parametrize(
    "call",
    every_third_fast(
        [
            _view_made_before,
            _shifted,
            _items,
            _twice,
            _other_type,
            _head_of_a_detector,
            _into_a_result,
            _read_before_and_after,
            nn.ReLU(inplace=True),
        ]
    ),
    ids=lambda f: getattr(f, "__name__", "module"),
)
def test_graph_without_writes_computes_what_the_network_does(call, strategy):
    network = Net(lambda s, x: call(s.layer(x)), layer=nn.Linear(4, 4), head=nn.Identity()).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    if strategy is not None:
        shard(network.layer, strategy)
    found = captured(network, x)
    assert not [name for name in operators(found) if name.partition(".")[0].endswith("_")]
    parameters = dict(network.named_parameters())
    known = found.constants | {key: parameters[name] for key, name in found.parameters.items()} | {"input_0": x}
    given = [known[node.name] for node in found.graph.nodes if node.op == "placeholder"]
    result = fx.Interpreter(fx.GraphModule(nn.Module(), found.graph)).run(*given)[0]
    right = network(x)
    torch.testing.assert_close(result, right)
    gradients = [torch.autograd.grad(y.square().sum(), list(parameters.values())) for y in (result, right)]
    torch.testing.assert_close(*gradients)


def test_write_whose_memory_has_lost_its_owner_is_an_error_and_not_lost_with_it():
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


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x.max().item()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Net(lambda s, x: s.layer(x.add_(1)), layer=nn.Linear(4, 4)), "aten.add_.Tensor changes"),
        (
            Net(lambda s, x: F.batch_norm(s.layer(x), x[0], x[1], training=True), layer=nn.Linear(4, 4)),
            "aten.batch_norm changes",
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), "depends on a tensor's values"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)),
            "aten.instance_norm changes its running statistics",
        ),
        (Net(lambda s, x: s.layer(x)[x > 0].sum(), layer=nn.Linear(4, 4)), "a tensor whose size depends on values"),
        (Net(lambda s, x: Scaled.apply(s.layer(x)), layer=nn.Linear(4, 4)), "let the number stay a tensor"),
    ],
    ids=["argument", "batch norm of an argument", "average", "instance norm", "mask", "number of a function"],
)
def test_what_cannot_be_captured_is_named_with_the_mode_that_needs_no_capture(network, words):
    with pytest.raises(CaptureError) as caught:
        captured(network, torch.ones(2, 4))
    assert words in str(caught.value)
    assert 'parallel_mode="data_parallel"' in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: AutoParallel(nn.ReLU(), "semi-auto"), r"did you mean semi_auto\?.*must be semi_auto, data_parallel, "),
        (lambda: AutoParallel(nn.ReLU(), compat="tensorflow"), r"must be torch \(means\) or mindspore \(sums\)"),
        (lambda: AutoParallel(nn.ReLU()).dataset_strategy("fullbatch"), r"did you mean full_batch\?"),
        (lambda: AutoParallel(lambda x: x).plan, "there is no plan yet"),
        (lambda: value_and_grad(lambda x: x, None, None), "name arguments or weights"),
    ],
)
def test_words_and_questions_without_a_meaning_are_refused(ask, words):
    with pytest.raises((StrategyError, CaptureError), match=words):
        ask()


@pytest.mark.parametrize("parallel", [False, True])
def test_value_and_grad_gives_gradients_in_mindspores_shapes(parallel):
    network = nn.Linear(3, 1)
    weights = list(network.parameters())
    x, y = torch.ones(2, 3), torch.full((2, 1), 2.0)

    def ask(*settings):
        function = value_and_grad(lambda x, y: ((network(x) - y) ** 2).sum(), *settings)
        value, gradients = (AutoParallel(lambda a, b: function(a, b)) if parallel else function)(x, y)
        assert not value.requires_grad
        return tree_map_only(Tensor, lambda gradient: gradient.shape, gradients)

    assert ask() == x.shape
    assert [*ask((0, 1))] == [x.shape, y.shape]
    assert [*ask(None, weights)] == [(1, 3), (1,)]
    of_x, of_weights = ask(0, weights)
    assert (of_x, [*of_weights]) == (x.shape, [(1, 3), (1,)])
    assert all(value.grad is None for value in (*weights, x))


def test_value_and_grad_passes_other_results_through_and_gives_zeros_for_unused_weights():
    network, weights = nn.Linear(3, 1), [nn.Parameter(torch.ones(2, 2))]
    weights += network.parameters()
    function = value_and_grad(lambda x: (network(x).sum(), x * 2, "word"), None, weights, has_aux=True)
    (loss, doubled, word), gradients = function(torch.ones(2, 3))
    assert not loss.requires_grad
    assert (doubled.tolist(), word) == ([[2.0] * 3] * 2, "word")
    assert [gradient.tolist() for gradient in gradients] == [[[0.0, 0.0]] * 2, [[2.0] * 3], [2.0]]


def _default_dtype(net, x):
    torch.set_default_dtype(torch.float64)
    return net.layer(x)


def _branch_under_autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return net.layer(x) if x.sum() > 0 else x


def _packed(net, x):
    packed = rnn.pack_padded_sequence(net.layer(x)[None], torch.tensor([2]), batch_first=True)
    return packed.data


def _written_beside_its_hook(net, x):
    h = net.layer(x)
    column = h[:, 0]
    h.register_hook(lambda gradient: gradient * 2)
    column.zero_()
    return net.head(h)


_inner = AutoParallel(nn.Linear(4, 8))
REFUSED = {
    "vmap": (lambda net, x: torch.vmap(lambda row: net.head(net.layer(row)))(x), "torch.vmap"),
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


def process_state():
    return (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._functorch.get_interpreter_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.mark.parametrize("name", every_third_fast(REFUSED, 6))
def test_refused_habit_is_named_with_its_line_and_leaves_the_process_as_it_was(name):
    call, words = REFUSED[name]
    network, good = Net(call), Net(lambda net, x: net.head(net.layer(x)))
    before = process_state()
    with pytest.raises(CaptureError) as caught:
        captured(network, torch.ones(2, 4))
    assert words in str(caught.value)
    assert 'parallel_mode="data_parallel"' in str(caught.value)
    assert "\n" not in str(caught.value)
    if name != "default dtype":  # which is seen when the whole call was traced
        assert re.match(re.escape(__file__) + r":\d+: ", str(caught.value)), caught.value
    assert process_state() == before
    assert operators(captured(good, torch.ones(2, 4))).count("linear.default") == 2


class Odd(Exception):
    pass


def _raises(error):
    def forward(_, x):
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
def test_exception_keeps_its_type_and_tells_its_line(forward, kind, words):
    with pytest.raises(kind, match=words) as caught:
        captured(Net(forward), torch.ones(2, 4))
    assert Path(__file__).name in caught.value.__notes__[0]


def test_arrays_of_numpy_are_followed_like_other_constants():
    network = Net(lambda net, x: net.layer(x)[:, :4] * torch.from_numpy(net.scale), scale=np.ones(4, np.float32))
    x = torch.ones(2, 4)
    graph = captured(network, x)
    assert graph.traced.holds(network, (x,), {})
    network.scale = np.ones(4, np.float64)
    assert not graph.traced.holds(network, (x,), {})


@torch.compiler.allow_in_graph
def _allowed(x):
    return x.sigmoid() * 2


FOLLOWED = {
    "ctc": lambda h: F.ctc_loss(h[:, None], torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1])),
    "window": lambda h: h * torch.signal.windows.hann(8),
    "linalg and special": lambda h: torch.linalg.vector_norm(h) + torch.special.expit(h),
    "padding": lambda h: rnn.pad_sequence(list(h), batch_first=True),
    "masked": lambda h: torch.masked.sum(h, mask=torch.ones(2, 8, dtype=torch.bool)),
    "numpy": lambda h: h + torch.from_numpy(np.ones(8, np.float32) * 2),
    "methods": lambda h: torch.Tensor.add(h, h).T.mT,
    "allow_in_graph": _allowed,
}


@pytest.mark.parametrize("name", slow_but(["window", "numpy", "allow_in_graph"], FOLLOWED))
def test_functions_that_dynamo_does_not_follow_alone_are_captured(name):
    captured(Net(lambda net, x: FOLLOWED[name](net.layer(x))), torch.ones(2, 4))
