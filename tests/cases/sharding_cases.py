"""Networks cut by hand in every way that `shard` knows, on 6 ranks; each must train like one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.runtime import Layout, shard

WORLD_SIZE = 6
BATCH, INPUTS, HIDDEN, OUTPUTS = 12, 12, 24, 6

TWO_BY_THREE = Layout((2, 3), ("dp", "mp"))
TRANSPOSED = Layout((3, 2), ("mp", "dp"), [0, 3, 1, 4, 2, 5])
"""The same axes as TWO_BY_THREE, the other way round."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(INPUTS, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Matrices(nn.Module):
    """Calls functions of tensors instead of modules."""

    def __init__(self, multiply: Callable[..., Tensor], activate: Callable[..., Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(INPUTS, HIDDEN) / 4)
        self.second = nn.Parameter(torch.randn(HIDDEN, OUTPUTS) / 4)
        self.multiply, self.activate = multiply, activate

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.activate(self.multiply(x, self.first)), self.second)


class Tied(nn.Module):
    """One weight encodes and decodes; the decoder reads it transposed, in another layout than the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(INPUTS, HIDDEN)
        self.decode = _Decode(self.encode.weight)
        self.head = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decode(torch.tanh(self.encode(x))))


class _Decode(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)


def plain() -> nn.Module:
    return Mlp()


def layouts(layout: Layout) -> Callable[[], nn.Module]:
    """Return a column-cut and a row-cut layer with named axes."""

    def build() -> nn.Module:
        net = Mlp()
        shard(net.fc1, (layout("dp", "None"), layout("mp", "None"), layout("mp")))
        shard(net.fc2, (layout("dp", "mp"), layout("None", "mp")))
        return net

    return build


def scattered_linear() -> nn.Module:
    net = Mlp()
    shard(net.fc1, ((1, 1), (6, 1)))
    shard(net.fc2, ((1, 6), (1, 6)), out_strategy=((6, 1),))
    return net


def gathered_linear() -> nn.Module:
    net = Mlp()
    shard(net.fc1, ((1, 1), (6, 1)), out_strategy=(1, 1))
    return net


def operator_function() -> nn.Module:
    return Matrices(shard(torch.matmul, ((2, 3), (3, 1)), ((6, 1),)))


def operator_with_layouts() -> nn.Module:
    cut = shard(torch.matmul, (TWO_BY_THREE("dp", "None"), TWO_BY_THREE("None", "mp")), TWO_BY_THREE("dp", "mp"))
    return Matrices(cut)


def decorated_function() -> nn.Module:
    @shard(in_strategy=((2, 3),), out_strategy=((1, 3),))
    def activate(x: Tensor) -> Tensor:
        return F.gelu(torch.tanh(x) * 2) + x.mean(0, keepdim=True)

    return Matrices(torch.matmul, activate)


def region() -> nn.Module:
    net = Mlp()
    plan = {
        "fc1.weight": TWO_BY_THREE("mp", "None"),
        "fc1.bias": TWO_BY_THREE("mp"),
        "self.fc2.weight": TWO_BY_THREE("None", "mp"),
    }
    return shard(net, (TWO_BY_THREE("dp", "None"),), (TWO_BY_THREE("dp", "None"),), plan)


def region_of_tuples() -> nn.Module:
    plan = {"fc1.weight": (3, 1), "fc1.bias": (3,), "fc2.weight": (1, 3)}
    return shard(Mlp(), ((2, 1),), parameter_plan=plan)


def tied() -> nn.Module:
    return Tied()


def tied_in_two_layouts() -> nn.Module:
    net = Tied()
    shard(net.encode, ((2, 1), (3, 1), (3,)))
    shard(net.decode, ((3, 1), (1, 2)))
    return net


def tied_with_two_sums() -> nn.Module:
    net = Tied()
    shard(net.encode, ((6, 1), (1, 1), (1,)))
    shard(net.decode, ((2, 1), (1, 1)))
    return net


def frozen() -> nn.Module:
    net = scattered_linear()
    net.get_parameter("fc1.weight").requires_grad_(requires_grad=False)
    return net


@dataclass(frozen=True)
class ShardingCase:
    """One way."""

    name: str
    build: Callable[[], nn.Module]
    dataset: Any = "full_batch"
    hsdp: dict[str, Any] | None = None
    copies: int = 1
    mesh: tuple[int, ...] = (3, 2)
    strict: bool = False
    collectives: dict[str, int] = field(default_factory=dict)
    """Known by hand: operation -> number in one step; empty = not."""
    float32: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float64", "float32") if self.float32 else ("float64",)


HSDP = {"threshold": 0}
LEVEL3 = {"threshold": 0, "optimizer_level": "level3"}
CASES = [
    # fc2's sum over mp, the number of labels and the loss over dp, and one message with all gradients over dp
    ShardingCase("layouts", layouts(TWO_BY_THREE), mesh=(2, 3), float32=True, collectives={"all_reduce": 4}),
    ShardingCase("layouts-of-a-rank-list", layouts(TRANSPOSED), mesh=(2, 3)),
    ShardingCase("layouts-copies-hsdp", layouts(TWO_BY_THREE), hsdp=HSDP, copies=2, mesh=(2, 3)),
    ShardingCase(
        "layouts-of-the-data", layouts(TWO_BY_THREE), (TWO_BY_THREE("dp", "None"), TWO_BY_THREE("dp")), mesh=(2, 3)
    ),
    # fc2's sum scattered, gathered on the way back; number of labels and loss, and one message of gradients
    ShardingCase(
        "out-strategy-scatters",
        scattered_linear,
        collectives={"reduce_scatter": 1, "all_gather": 1, "all_reduce": 3},
        float32=True,
    ),
    ShardingCase("out-strategy-gathers", gathered_linear),
    ShardingCase("operator-function", operator_function, float32=True),
    ShardingCase("operator-function-own-batches", operator_function, "data_parallel"),
    ShardingCase("operator-function-hsdp-copies", operator_function, "data_parallel", HSDP, 2),
    ShardingCase("operator-function-layouts", operator_with_layouts, mesh=(2, 3)),
    ShardingCase("decorated-function", decorated_function),
    ShardingCase("region", region, mesh=(2, 3), float32=True, collectives={"all_reduce": 4}),
    ShardingCase("region-hsdp-level3", region, hsdp=LEVEL3, mesh=(2, 3)),
    ShardingCase("region-of-tuples", region_of_tuples),
    ShardingCase("tied", tied, "data_parallel"),
    ShardingCase("tied-in-two-layouts", tied_in_two_layouts, float32=True),
    ShardingCase("tied-in-two-layouts-own-batches-copies", tied_in_two_layouts, "data_parallel", None, 2),
    ShardingCase("tied-in-two-layouts-hsdp", tied_in_two_layouts, hsdp=HSDP),
    ShardingCase("tied-with-two-sums", tied_with_two_sums),
    ShardingCase(
        "tied-with-two-sums-hsdp-level3", tied_with_two_sums, hsdp={"threshold": 0, "optimizer_level": "level3"}
    ),
    ShardingCase("frozen", frozen),
    ShardingCase("frozen-hsdp-level3", frozen, "data_parallel", LEVEL3),
    ShardingCase("strict", plain, "data_parallel", strict=True),
    ShardingCase("strict-with-out-strategy", scattered_linear, strict=True),
]
