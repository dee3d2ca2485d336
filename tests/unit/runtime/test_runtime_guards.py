"""When a capture is taken again, and how what it holds is replaced."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from asked_cases import one_fast, slow_but
from small_capture import captured
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch.utils.checkpoint import checkpoint

from msrun.runtime import shard
from msrun.runtime.capture import capture as module_of_capture
from msrun.runtime.nn.random_stream import stream_of
from msrun.runtime.nn.replaced import current, replaced_for_now
from msrun.runtime.tensors.plain_tensors import holding

network = nn.Linear(2, 2)
factor = 1.0


def holds(graph, function, *args, **kwargs):
    return graph.traced.holds(function, args, kwargs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.alpha = 0.5
        self.settings = {"beta": 2.0, "names": ["a"]}
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x, *, is_large=False):
        y = self.drop(self.layer(x)) * self.alpha + self.mean * self.settings["beta"]
        return y * 10 if is_large and len(self.settings["names"]) == 1 else y


CHANGES = {
    "attribute": lambda net: setattr(net, "alpha", 0.7),
    "in a dict": lambda net: net.settings.update(beta=3.0),
    "probability": lambda net: setattr(net.drop, "p", 0.1),
    "module": lambda net: setattr(net, "drop", nn.Identity()),
    "evaluation": lambda net: net.drop.eval(),
    "hook": lambda net: net.layer.register_forward_hook(lambda _m, _a, result: result * 2),
    "forward": lambda net: setattr(net.layer, "forward", lambda x: x),
}


@pytest.mark.parametrize("name", slow_but(["attribute", "module", "hook"], CHANGES))
def test_what_the_network_reads_and_the_graph_holds_may_not_change(name):
    net, x = Net(), torch.ones(1, 2)
    graph = captured(net, x)
    with torch.no_grad():
        assert not holds(graph, net, x), "a call without gradients is another"
        net.layer.weight.add_(1)
    net.layer.bias = nn.Parameter(torch.zeros(2))
    net.mean = torch.ones(2)
    assert holds(graph, net, torch.zeros(1, 2)), "values of tensors may change"
    CHANGES[name](net)
    assert not holds(graph, net, x)
    assert graph.traced.why_not(net, (x,), {}) != ""


def test_one_and_true_are_two_arguments():
    net, x = Net(), torch.ones(1, 2)
    graph = captured(net, x, named={"is_large": True})
    assert holds(graph, net, x, is_large=True)
    assert not any(holds(graph, net, x, **other) for other in ({"is_large": 1}, {"is_large": False}, {}))


def test_object_in_the_place_of_another_is_looked_at_and_not_its_address():
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale.factor

    net, x = Scaled(2, 2), torch.ones(1, 2)
    graph = captured(net, x, SimpleNamespace(factor=2.0))
    found = [holds(graph, net, x, SimpleNamespace(factor=2.0 + index % 2)) for index in range(20)]
    assert found == [index % 2 == 0 for index in range(20)]


def make(module, number=1.0, default=0):
    def forward(x, extra=default):
        return module(x) * number + extra

    return forward


def uses_globals(x):
    return network(x) * factor


def test_global_number_that_changes_makes_another_call(monkeypatch):
    x = torch.ones(1, 2)
    graph = captured(uses_globals, x)
    assert holds(graph, uses_globals, x)
    monkeypatch.setattr(sys.modules[__name__], "factor", 2.0)
    assert not holds(graph, uses_globals, x)


def test_closures_and_the_functions_that_they_call_are_looked_into():
    def outer(inner):
        return lambda x: inner(x)

    x, made = torch.ones(1, 2), make(network)
    for same, others in (
        (lambda: make(network), [make(network, 2.0), make(network, 1.0, 5), make(network, number=True)]),
        (lambda: outer(make(network)), [outer(make(network, 3.0))]),
        (lambda: outer(partial(made, extra=1)), [outer(partial(made, extra=2))]),
    ):
        graph = captured(same(), x)
        assert holds(graph, same(), x)
        assert not any(holds(graph, other, x) for other in others)


def test_a_network_has_other_parameters_for_a_while_and_its_stream_of_dropout_goes_on():
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    network[1].weight = old = network[0].weight
    stream, whole = stream_of(network), nn.Parameter(torch.zeros(4, 4))
    with replaced_for_now(network, {id(old): whole}):
        assert network[0].weight is network[1].weight is current(old) is whole
        assert stream_of(network) is stream
    assert network[0].weight is network[1].weight is current(old) is old


def test_a_parameter_holds_another_value_for_a_while_with_its_hooks_and_without_its_gradient():
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


class Block(nn.Module):
    def __init__(self, *, scale=1.0, **modules):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = scale
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x))) * self.scale


class Normed(Block):
    def __init__(self):
        super().__init__(norm=nn.BatchNorm1d(4))

    def forward(self, x):
        return self.norm(super().forward(x))


class Dropped(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class Recomputed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Halves(Block):
    def forward(self, x):
        y = super().forward(x)
        y[:, :2].mul_(2)
        return y


class WithConstant(Block):
    def forward(self, x):
        return super().forward(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Numbered(Block):
    def forward(self, x):
        self.seen = x.shape[0]
        return super().forward(x)


class Pair(Block):
    def forward(self, x, y=None, *, times=1):
        return super().forward(x) * times, x if y is None else y + x


class Pairs(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.layers, self._times = nn.ModuleList(Pair() for _ in times), times

    def forward(self, x):
        y = x * 2
        for layer, times in zip(self.layers, self._times, strict=True):
            x, y = layer(x * 1, y, times=times)
        return x + y


class WritesBehind(Block):
    def __init__(self):
        super().__init__(layers=blocks())

    def forward(self, x):
        x = self.layers(x)
        x.add_(1)
        return x


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in (*self.encoder.layers, *self.decoder):
            x = layer(x)
        return x


def blocks(kind=Block, count=4):
    return nn.Sequential(*(kind() for _ in range(count)))


def with_tied_weights():
    network = blocks()
    for block in network[2:]:
        block.second.weight = nn.Parameter(network[0].second.weight.detach())
        block.second.bias = network[0].second.bias
    return network


def with_one_tied_in_itself():
    network = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)))
    network[2][1].weight = network[2][0].weight
    return network


def with_strategies():
    network = blocks()
    for block in network[1:]:
        shard(block.first, ((1, 1), (2, 1)))
    return network


NETWORKS = {
    "equal": (blocks, 1),
    "dropout": (lambda: blocks(Dropped), 1),
    "checkpoint": (lambda: blocks(Recomputed), 1),
    "batch norm": (lambda: blocks(Normed), 1),
    "writes": (lambda: blocks(Halves), 1),
    "a write behind": (WritesBehind, 5),  # torch's repeated results are leaves: all are traced again
    "a constant": (lambda: blocks(WithConstant), 1),
    "several lists": (Stages, 1),
    "pairs": (lambda: Pairs([1, 1, 1, 1]), 1),
    "strategies": (with_strategies, 2),
    "another argument": (lambda: Pairs([1, 2, 1, 2]), 2),
    "another attribute": (lambda: nn.Sequential(Block(), Block(), Block(scale=2.0), Block()), 2),
    "an attribute of another type": (lambda: nn.Sequential(Block(), Block(scale=1), Block()), 2),
    "a frozen weight": (lambda: nn.Sequential(*blocks()[:3], blocks()[0].requires_grad_(requires_grad=False)), 2),
    "tied weights": (with_tied_weights, 1),
    "a side effect": (lambda: blocks(Numbered), 4),
    "one tied in itself": (with_one_tied_in_itself, 0),  # whose weights are one is none of those whose weights are two
}


def described(graph):
    """Return all that later steps read of a graph."""
    kept = ("msrun_recompute", "checkpoint", "msrun_strategy")
    return [
        (
            str(node.format_node()),
            list(node.meta.get("nn_module_stack", {})),
            {key: str(value) for key, value in node.meta.items() if any(part in key for part in kept)},
            [(v.shape, v.stride(), v.dtype, v.requires_grad) for v in [node.meta.get("val")] if isinstance(v, Tensor)],
        )
        for node in graph.graph.nodes
    ] + [
        graph.parameters,
        graph.buffers,
        graph.inputs,
        str(graph.outputs),
        str(graph.regions),
        sorted(map(str, graph.placeholders)),
    ]


@pytest.fixture
def traced(monkeypatch):
    """The classes whose `forward` dynamo has followed, once for each time."""
    found = []
    build = InliningInstructionTranslator.build_inline_tracer

    def noting(parent, func, *rest, **named):
        code = func.get_code()
        if code.co_name == "forward" and code.co_filename == __file__:
            found.append(code.co_qualname)
        return build(parent, func, *rest, **named)

    monkeypatch.setattr(InliningInstructionTranslator, "build_inline_tracer", staticmethod(noting))
    return found


@pytest.mark.parametrize("name", slow_but(["tied weights"], NETWORKS))
def test_equal_blocks_are_traced_once_for_one_graph(name, traced, monkeypatch):
    build, times = NETWORKS[name]
    torch.manual_seed(0)
    network = build()
    x = torch.ones(2, 4, requires_grad=True)
    graph = captured(network, x)
    assert traced.count("Block.forward") == times
    monkeypatch.setattr(module_of_capture, "find_equal_blocks", lambda _: set())
    assert described(graph) == described(captured(network, x))


@pytest.mark.parametrize("index", one_fast(2, 0, 1, 3))
def test_what_was_read_of_the_first_block_is_guarded_in_each(index):
    network, x = blocks(), torch.ones(2, 4, requires_grad=True)
    trace = captured(network, x).traced
    assert trace.holds(network, (x,), {})
    network[index].scale = 2.0
    assert not trace.holds(network, (x,), {})
    network[index].scale = 1.0
    network[index].first.register_forward_hook(lambda *_: None)
    assert not trace.holds(network, (x,), {})
