"""Custom autograd Functions in a cut graph: value by value they are cut, others run whole unless the user says more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.partition import partition
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.custom import apply_function
from msrun.runtime.sharding.operators.rule import STRATEGY, apply_collective
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
