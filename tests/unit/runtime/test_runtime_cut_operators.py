"""How single operators are cut: custom autograd Functions, and attention whose sequence is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import parallelize
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.price import Price, StepSpec, price
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.search.search import Search, SearchSpec
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.custom import apply_function
from msrun.runtime.sharding.operators.rule import STRATEGY, LabelSplit, apply_collective
from msrun.runtime.sharding.strategies import OperatorStrategy


class Cubed(torch.autograd.Function):
    """Works value by value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class Centred(torch.autograd.Function):
    """Mixes the rows, of a batch of any size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Halved(torch.autograd.Function):
    """Gives another shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x.view(2, -1, x.shape[1]).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.cat([gradient, gradient])


class Fixed(torch.autograd.Function):
    """Runs on four rows alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.reshape(4, 8) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Spread(torch.autograd.Function):
    """Makes four rows of any number of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x.sum(0).expand(4, 8).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.sum(0).expand(ctx.rows, 8)


class Applied(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function.apply(x)  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.applied = Applied(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.applied(self.layer(x)) + 1


def program_of(network: nn.Module, strategy: tuple[int, int] | None = None) -> LocalProgram:
    """Cut it on two ranks; `strategy`: the user's, for the function."""
    x = torch.ones(4, 8)
    graph = capture(find_target(network), [x], {}, input_shapes=[(4, 8)], parameter_shapes={})
    if strategy is not None:
        (node,) = [node for node in graph.graph.nodes if "custom_function" in str(node.target)]
        node.meta[STRATEGY] = OperatorStrategy((strategy,))
    mesh = build_mesh(2)
    cut = TensorLayout((mesh.axes, ()))
    return partition(graph, mesh, input_layouts=[cut], strategies=strategies_of(network), output_batch_axes=mesh.axes)


def gathers(program: LocalProgram) -> list[str]:
    """Return what is said before the function runs."""
    nodes = list(program.graph.nodes)
    first = next(number for number, node in enumerate(nodes) if node.target is apply_function)
    return [node.kwargs["collective"].kind for node in nodes[:first] if node.target is apply_collective]


def test_function_that_works_value_by_value_is_cut_with_the_batch() -> None:
    assert gathers(program_of(Network(Cubed))) == []


@pytest.mark.parametrize("function", [Centred, Halved])
def test_function_of_which_nothing_is_known_runs_whole(function: type[torch.autograd.Function]) -> None:
    assert gathers(program_of(Network(function))) == ["gather"]


def test_strategy_is_the_users_promise_that_parts_may_be_run() -> None:
    assert gathers(program_of(Network(Centred), (2, 1))) == []


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Fixed, r"does not run on parts of shapes \[\[2, 8\]\]: .*; leave it whole, or write it without fixed sizes"),
        (Spread, r"makes \[4, 8\] of parts of shapes \[\[2, 8\]\], not \[2, 8\] as its strategy says: leave it whole"),
        (Halved, r"dimension 0 of input 0 must stay whole but is cut into 2"),
    ],
)
def test_function_that_does_not_fit_its_strategy_is_refused(function: type[torch.autograd.Function], why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        program_of(Network(function), (2, 1))


WIDTH = 8
"""Of a head."""
MESH = build_mesh(4)
H100 = PROFILES["h100"]


class Attention(nn.Module):
    def __init__(self, heads: int, key_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(64, heads * WIDTH), nn.Linear(heads * WIDTH, 64)
        self.k, self.v = (nn.Linear(64, key_heads * WIDTH) for _ in range(2))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


def captured(network: nn.Module, length: int) -> CapturedGraph:
    shape, given = (1, length, 64), strategies_of(network)
    target, values = find_target(network), [torch.ones(shape)]
    return capture(target, values, {}, input_shapes=[shape], parameter_shapes={}, strategies=given)


def constraints(splits: dict[str, LabelSplit] | None = None) -> Constraints:
    return Constraints([TensorLayout(((), MESH.axes, ()))], splits=splits or {})


def attention_of(graph: CapturedGraph) -> str:
    return next(node.name for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))


def price_of(graph: CapturedGraph, way: str) -> Price:
    decisions = decide(graph, MESH, constraints({attention_of(graph): {way: MESH.axes}}))
    return price(graph, decisions, H100, StepSpec())


@pytest.mark.parametrize("length", [512, 2048, 8192])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2)])
def test_a_ring_keeps_its_part_of_keys_values_results_and_sums(heads: int, key_heads: int, length: int) -> None:
    """Queries are counted where they are made."""
    graph = captured(Attention(heads, key_heads), length)
    rows = length // MESH.size
    numbers = rows * (heads * WIDTH + 2 * key_heads * WIDTH + heads)
    assert price_of(graph, "ring").activations[attention_of(graph)] == 4 * numbers


@pytest.mark.parametrize(("heads", "way"), [(4, "ulysses"), (6, "ring")])
def test_a_search_cuts_a_sequence_that_is_too_long(heads: int, way: str) -> None:
    """Where heads cannot be shared out it is the ring."""
    graph = captured(Attention(heads, 2 if way == "ring" else heads), 65536)
    found = Search(graph, MESH, constraints(), SearchSpec("exact", H100), lambda _, *, shards_all: StepSpec()).run()
    split = found.plan.splits[attention_of(graph)]
    assert set(split) <= {"ring"} if way == "ring" else set(split) <= {"ulysses", "b1"}
    assert split


@pytest.mark.parametrize(
    ("network", "word", "words"),
    [
        (Attention(6, 6), "ulysses", r"ulysses cuts a size of 64 and 6 heads to exchange into 4; .* is 2, or use"),
        (Attention(4, 4, dropout=0.1), "ring", r"ring is for self attention \(as many queries as keys, no drop"),
        (nn.Sequential(nn.Linear(64, 64)), "ring", r"0 is to attend by ring, but it calls scaled_dot_.* 0 times"),
        (Attention(4, 4), "rings", r"'rings' is no word of a plan \(did you mean ring\?\)"),
    ],
)
def test_what_does_not_go_is_refused_by_name(network: nn.Module, word: str, words: str) -> None:
    whole = nn.Sequential(network)
    with pytest.raises(StrategyError, match=words):
        decide(captured(parallelize(whole, {"0": word}), 64), MESH, constraints())
