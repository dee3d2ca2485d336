"""What the patterns share: their table, small networks, batches, and comparisons with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from torch import Tensor, nn

from msrun.runtime import AutoParallel, WithLoss, get_rank

WORLD_SIZE = 4


PATTERNS: dict[str, Callable[[], None]] = {}


def pattern(function: Callable[[], None]) -> Callable[[], None]:
    PATTERNS[function.__name__] = function
    return function


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(16, 8)
        self.layer2 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(torch.relu(self.layer1(x)))


class Calls(nn.Module):
    """A network whose forward is a function of itself and its inputs."""

    def __init__(self, forward: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._call = forward

    def forward(self, *inputs: Any) -> Any:
        return self._call(self, *inputs)


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def batch(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 4, generator=generator)


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(WORLD_SIZE)[get_rank()]


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(found, value)
    return found


def whole(parameter: nn.Parameter | Tensor, like: Tensor) -> Tensor:
    """Return a parameter, or its gradient, as one tensor: parts are rows of consecutive ranks."""
    own = local(parameter)
    if own.shape == like.shape:
        return own
    parts = [torch.empty_like(own) for _ in range(WORLD_SIZE)]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def assert_close(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def assert_gradients(network: nn.Module, right: nn.Module) -> None:
    named = dict(right.named_parameters())
    for name, parameter in network.named_parameters():
        assert (parameter.grad is None) == (named[name].grad is None), name
        if parameter.grad is not None:
            assert_close(whole(parameter.grad, named[name]), named[name].grad)


def refused(kind: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except kind as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    raise AssertionError(f"{kind.__name__} was not raised")


def both() -> tuple[nn.Module, nn.Module, AutoParallel]:
    """Return a network of one process, the same one for all ranks, and its AutoParallel with every weight cut."""
    serial = seeded(Mlp)
    network = copy.deepcopy(serial)
    return serial, network, AutoParallel(WithLoss(network, F.mse_loss)).hsdp(threshold=0)
