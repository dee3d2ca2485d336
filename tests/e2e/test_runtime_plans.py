"""The plan's first lines agree with each other and with what happens; a pipeline's step is told by stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mode_networks import make_network, mine
from on_ranks import on_all_ranks, on_ranks
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


pytestmark = pytest.mark.slow
on_two = on_ranks(2)
CASES: dict[str, Callable[[], Found]] = {
    "whole": lambda: data_parallel(None),
    "below threshold": lambda: data_parallel(10**6),
    "hsdp": lambda: data_parallel(0),
    "operators": operators,
    "hybrid": hybrid,
    "pipeline/1f1b": lambda: pipeline("1f1b"),
    "pipeline/gpipe tied": lambda: pipeline("gpipe", is_tied=True),
    "pipeline/zbv": lambda: pipeline("zbv", is_tied=True),
}


outcomes = on_all_ranks(CASES)
PIPELINES = [name for name in CASES if name.startswith("pipeline/")]


@on_two
@pytest.mark.parametrize(
    ("case", "begin", "end"),
    [
        ("whole", "2 ranks as 2, semi_auto, hsdp is off; ", "; parameters whole on every rank, 8 KB"),
        (
            "below threshold",
            "2 ranks as 2, semi_auto, hsdp level1 cuts no parameter of this network; ",
            "; parameters whole on every rank, 8 KB",
        ),
        (
            "hsdp",
            "2 ranks as 2, semi_auto, hsdp level1: weights and optimizer state sharded; ",
            "; parameters 4 KB of 8 KB on this rank",
        ),
        ("operators", "2 ranks as 2, semi_auto, hsdp is off; ", "; parameters 5 KB of 8 KB on this rank"),
        (
            "hybrid",
            "2 ranks as 2, hybrid_parallel, hsdp is off; ",
            "; parameters 8 KB on this rank, 1 of 4 of them this rank's own parts",
        ),
    ],
)
def test_the_first_line_says_what_of_the_parameters_is_here(case: str, begin: str, end: str) -> None:
    for rank in outcomes(case):
        assert rank["first"].startswith(begin) and rank["first"].endswith(end), rank["first"]


@on_two
def test_a_part_cut_by_hand_is_not_called_whole() -> None:
    line = next(line for line in outcomes("hybrid")[0]["text"].splitlines() if " layer1.weight " in line)
    assert "? -> 32x24" in line and line.endswith("this rank's own part")


@on_two
@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipelines_plan_tells_the_traffic_of_a_step_for_every_stage(case: str) -> None:
    for rank in outcomes(case):
        assert rank["predicted"] == rank["counted"]
        told = [line for line in rank["text"].splitlines() if line.startswith("one training step, on each rank of ")]
        assert len(told) == 2 and "not known" not in rank["text"]
        assert ("stages 0, 3: " if case.endswith("zbv") else "stage 0: ") in told[0]


@on_two
@pytest.mark.parametrize("case", ["whole", "hsdp", "operators"])
def test_the_traffic_of_a_step_is_the_counted_one(case: str) -> None:
    for rank in outcomes(case):
        assert rank["predicted"] == rank["counted"]
