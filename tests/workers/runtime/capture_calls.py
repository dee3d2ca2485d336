"""Calls around a capture: torch.compile outside, dataclasses as batches, mistakes of the user. RESULT.json, per rank.

usage: capture_calls.py RESULT.json
"""

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.runtime import AutoParallel, WithLoss, get_rank, init, release

init(timeout_s=60)
torch.set_default_dtype(torch.float64)
warnings.simplefilter("ignore")


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


generator = torch.Generator().manual_seed(1)
x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)
mine = [value.chunk(2)[get_rank()] for value in (x, y)]


def compiled(mode: str) -> float:
    net = Net()
    step = torch.compile(AutoParallel(WithLoss(net, F.mse_loss), mode), backend="eager")
    return difference(net, lambda: step(*mine))


def of_compiled(mode: str) -> float:
    net = Net()
    step = AutoParallel(torch.compile(WithLoss(net, F.mse_loss), backend="eager"), mode)
    return difference(net, lambda: step(*mine))


def of_dataclass(mode: str) -> float:
    net = OfBatch()
    step = AutoParallel(net, mode)
    return difference(net, lambda: step(Batch(*mine)))


def difference(net: Net, call: Callable[[], Tensor]) -> float:
    right = Net()
    for _ in range(3):
        call().backward()
        F.mse_loss(right(x), y).backward()
    found, wanted = net.layer.weight.grad, right.layer.weight.grad
    assert found is not None
    assert wanted is not None
    return (found - wanted).abs().max().item()


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


found: dict[str, Any] = {
    f"{case.__name__} {mode}": case(mode)
    for case in (compiled, of_compiled, of_dataclass)
    for mode in ("semi_auto", "data_parallel")
}
found["wrong columns"] = refusal(lambda: AutoParallel(Net())(x[:, :5]))
found["other lengths"] = refusal(lambda: AutoParallel(Net())(torch.ones(3 + get_rank(), 8)))
everyone: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(everyone, found)
if get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(everyone))
release()
