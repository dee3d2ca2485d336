"""Equal blocks are traced once, and every other capture is what it is without that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch.utils.checkpoint import checkpoint

from msrun.runtime import shard
from msrun.runtime.capture import capture as module_of_capture
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.parallel.given_strategies import strategies_of


class Block(nn.Module):
    def __init__(self, *, scale: float = 1.0, **modules: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = scale
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x))) * self.scale


class Normed(Block):
    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Halves(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[:, :2].mul_(2)
        return y


class WithConstant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Numbered(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.shape[0]
        return super().forward(x)


class Pair(Block):
    def forward(self, x: Tensor, y: Tensor | None = None, *, times: int = 1) -> tuple[Tensor, Tensor]:
        return super().forward(x) * times, x if y is None else y + x


class Pairs(nn.Module):
    def __init__(self, times: list[int]) -> None:
        super().__init__()
        self.layers, self._times = nn.ModuleList(Pair() for _ in times), times

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        for layer, times in zip(self.layers, self._times, strict=True):
            x, y = layer(x * 1, y, times=times)
        return x + y


class WritesBehind(Block):
    def __init__(self) -> None:
        super().__init__(layers=blocks())

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        x.add_(1)
        return x


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.encoder.layers, *self.decoder):
            x = layer(x)
        return x


def blocks(kind: Callable[[], nn.Module] = Block, count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(count)))


def with_tied_weights() -> nn.Sequential:
    network = blocks()
    for block in network[2:]:
        block.second.weight = nn.Parameter(network[0].second.weight.detach())
        block.second.bias = network[0].second.bias
    return network


def with_one_tied_in_itself() -> nn.Sequential:
    network = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)))
    network[2][1].weight = network[2][0].weight
    return network


def with_strategies() -> nn.Sequential:
    network = blocks()
    for block in network[1:]:
        shard(block.first, ((1, 1), (2, 1)))
    return network


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
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
}


def captured(network: nn.Module, x: Tensor) -> CapturedGraph:
    strategies = strategies_of(network)
    return capture(
        find_target(network), (x,), {}, input_shapes=[tuple(x.shape)], parameter_shapes={}, strategies=strategies
    )


def described(graph: CapturedGraph) -> list[Any]:
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
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes whose `forward` dynamo has followed, once for each time."""
    found: list[str] = []
    build = InliningInstructionTranslator.build_inline_tracer

    def noting(parent: Any, func: Any, *rest: Any, **named: Any) -> Any:
        code = func.get_code()
        if code.co_name == "forward" and code.co_filename == __file__:
            found.append(code.co_qualname)
        return build(parent, func, *rest, **named)

    monkeypatch.setattr(InliningInstructionTranslator, "build_inline_tracer", staticmethod(noting))
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_blocks_are_traced_once_and_leave_the_same_graph(
    name: str, traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, times = NETWORKS[name]
    torch.manual_seed(0)
    network = build()
    x = torch.ones(2, 4, requires_grad=True)
    graph = captured(network, x)
    assert traced.count("Block.forward") == times
    monkeypatch.setattr(module_of_capture, "find_equal_blocks", lambda _: set())
    assert described(graph) == described(captured(network, x))


def test_a_block_whose_weights_are_one_is_none_of_those_whose_weights_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = with_one_tied_in_itself(), torch.ones(2, 4)
    graph = captured(network, x)
    monkeypatch.setattr(module_of_capture, "find_equal_blocks", lambda _: set())
    assert described(graph) == described(captured(network, x))


@pytest.mark.parametrize("index", range(4))
def test_what_was_read_of_the_first_block_is_guarded_in_each(index: int) -> None:
    network, x = blocks(), torch.ones(2, 4, requires_grad=True)
    trace = captured(network, x).traced
    assert trace.holds(network, (x,), {})
    network[index].scale = 2.0
    assert not trace.holds(network, (x,), {})
    network[index].scale = 1.0
    network[index].first.register_forward_hook(lambda *_: None)
    assert not trace.holds(network, (x,), {})
