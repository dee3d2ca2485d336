"""Calls around a capture, on two ranks: torch.compile outside, dataclasses as batches, mistakes of the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # noqa: N812
from on_ranks import Ranks, on_ranks
from torch import Tensor, nn

from msrun.errors import CaptureError
from msrun.runtime import AutoParallel, WithLoss

two_ranks = on_ranks(2, dtype="float64")
pytestmark = pytest.mark.slow


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor
    name: str = "train"
    is_done: bool = dataclasses.field(init=False, default=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 8:
            raise ValueError(f"{x.shape[1]} columns")
        return self.layer(x)


class OfBatch(Net):
    def forward(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.layer(batch.x), batch.y)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def with_loss(net: nn.Module) -> nn.Module:
    return WithLoss(net, F.mse_loss)


def of_a_dataclass(net: Net, mode: str) -> Callable[..., Tensor]:
    step = AutoParallel(net, mode)  # type: ignore[arg-type]
    return lambda *given: step(Batch(*given))


def in_a_function(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(lambda *given: step(*given), backend="eager")


CALLS: dict[str, tuple[Callable[[], Net], Callable[[Net, str], Callable[..., Tensor]]]] = {
    "compiled": (Net, lambda net, mode: torch.compile(AutoParallel(with_loss(net), mode), backend="eager")),
    "inside of what is compiled": (Net, lambda net, mode: in_a_function(AutoParallel(with_loss(net), mode))),
    "of compiled": (Net, lambda net, mode: AutoParallel(torch.compile(with_loss(net), backend="eager"), mode)),
    "of a dataclass": (OfBatch, of_a_dataclass),
}


@two_ranks
@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel"])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_those_of_one_process(ranks: Ranks, call: str, mode: str) -> None:
    make, wrap = CALLS[call]
    net, right, (x, y) = make(), Net(), batch()
    step = wrap(net, mode)
    for _ in range(3):
        step(ranks.part(x), ranks.part(y)).backward()
        F.mse_loss(right(x), y).backward()
    torch.testing.assert_close(net.layer.weight.grad, right.layer.weight.grad, rtol=0, atol=1e-12)


@two_ranks
def test_exception_of_the_network_keeps_its_type_on_every_rank() -> None:
    with pytest.raises(ValueError, match=r"^5 columns"):
        AutoParallel(Net())(batch()[0][:, :5])


@two_ranks
def test_batches_of_other_lengths_are_told_with_both_shapes_and_what_to_do(ranks: Ranks) -> None:
    with pytest.raises(CaptureError) as error:
        AutoParallel(Net())(torch.ones(3 + ranks.rank, 8))
    assert "rank 1 got a batch of 4x8, rank 0 a batch of 3x8" in str(error.value)
    assert "give every rank batches of one shape (pad to one length, drop the last, smaller one)" in str(error.value)


class Halved(nn.Module):
    """Writes into `flatten` of what a convolution makes: a view of it, or, of channels_last, a copy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.weight = nn.Conv2d(4, 4, 3, padding=1), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv(x)
        made.flatten(1)[:, ::2].mul_(0.5)
        scaled = x * self.weight
        scaled.flatten(1)[:, ::2].mul_(0.5)
        return made.square().mean() + scaled.square().mean()


@two_ranks
@pytest.mark.parametrize("of_weights", [torch.contiguous_format, torch.channels_last])
def test_write_goes_where_the_order_of_memory_lets_it_go(ranks: Ranks, of_weights: torch.memory_format) -> None:
    net = Halved().to(memory_format=of_weights)
    images = torch.randn(8, 4, 6, 6)
    batches = [images, images.contiguous(memory_format=torch.channels_last), images]
    right = [net(batch).item() for batch in batches]
    step = AutoParallel(net).dataset_strategy("full_batch")
    assert [step(batch).item() for batch in batches] == pytest.approx(right, rel=1e-12)
