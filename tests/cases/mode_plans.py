"""Cases of tests/workers/runtime/modes.py: what plans say, and that it is what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mode_networks import make_network, mine
from torch import Tensor, nn

from msrun.runtime import AutoParallel, MicroBatchInterleaved, Pipeline, WithLoss, layerwise_parallel, shard
from msrun.runtime.execute.transfers import traffic

Found = dict[str, Any]


class Tied(nn.Module):
    """Its first and its last layer share a weight, so that both stages of a pipeline hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.middle = nn.Linear(24, 24)
        self.last = nn.Linear(24, 24)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def with_loss() -> WithLoss:
    return WithLoss(make_network(), nn.CrossEntropyLoss())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(16, 24, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 6, (16,), generator=generator)


def told(model: AutoParallel, *args: Tensor) -> Found:
    model(*args).backward()
    traffic.reset()
    model(*args).backward()
    plan = model.plan
    predicted = plan.traffic
    return {
        "first": plan.summary(),
        "text": plan.explain(),
        "predicted": None if predicted is None else [predicted.calls, predicted.bytes],
        "counted": [dict(traffic.calls), dict(traffic.bytes)],
    }


def operators() -> Found:
    network = with_loss()
    shard(network.network.layer1, ((1, 1), (2, 1)))
    return told(AutoParallel(network).dataset_strategy("full_batch"), *batch())


def data_parallel(threshold: int | None) -> Found:
    model = AutoParallel(with_loss())
    return told(model if threshold is None else model.hsdp(threshold=threshold), *map(mine, batch()))


def pipeline(schedule: str, *, is_tied: bool = False) -> Found:
    x, y = batch()
    network: nn.Module = WithLoss(Tied().double(), nn.MSELoss()) if is_tied else with_loss()
    model = AutoParallel(Pipeline(MicroBatchInterleaved(network, 2), 4)).pipeline(2, scheduler=schedule)
    return told(model, x.requires_grad_(), x.detach().flip(0) if is_tied else y)


def hybrid() -> Found:
    network = with_loss()
    layerwise_parallel(network.network.layer1.weight)
    model = AutoParallel(network, "hybrid_parallel")
    model(*map(mine, batch())).backward()
    return {"first": model.plan.summary(), "text": model.plan.explain()}


def cases(ranks: int) -> dict[str, Callable[[], Found]]:
    assert ranks == 2
    return {
        "whole": lambda: data_parallel(None),
        "below threshold": lambda: data_parallel(10**6),
        "hsdp": lambda: data_parallel(0),
        "operators": operators,
        "hybrid": hybrid,
        "pipeline/1f1b": lambda: pipeline("1f1b"),
        "pipeline/gpipe tied": lambda: pipeline("gpipe", is_tied=True),
        "pipeline/zbv": lambda: pipeline("zbv", is_tied=True),
    }
