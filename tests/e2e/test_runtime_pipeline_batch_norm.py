"""Batch norm in a pipeline has the statistics of each micro batch, as in one process that divides the batch so."""

import copy

import pytest
import torch
from on_ranks import on_ranks
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, MicroBatchInterleaved, Pipeline, WithLoss

MICRO_BATCHES = 4


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3)
    )


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=draw), torch.randint(0, 3, (16,), generator=draw)


def train(net, step, optimizer, steps=5):
    losses = []
    for number in range(steps):
        loss = step(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_one_process(parts):
    net = network()
    criterion = WithLoss(net, nn.CrossEntropyLoss())

    def step(images, labels):
        pairs = zip(images.chunk(parts), labels.chunk(parts), strict=True)
        return torch.stack([criterion(*pair) for pair in pairs]).mean()

    return train(net, step, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)), net


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow), dtype="float64")
@pytest.mark.parametrize(
    ("scheduler", "interleave", "copies"),
    [
        ("1f1b", True, 1),
        pytest.param("gpipe", False, 1, marks=pytest.mark.slow),
        pytest.param("zbv", False, 1, marks=pytest.mark.slow),
        pytest.param("1f1b", False, 2, marks=pytest.mark.slow),
    ],
)
def test_losses_and_statistics_on_every_rank_are_those_of_one_process_that_divides_the_batch(
    scheduler, interleave, copies
):
    net = network()
    inner = WithLoss(net, nn.CrossEntropyLoss())
    wrapped = Pipeline(MicroBatchInterleaved(inner, copies) if copies > 1 else inner, MICRO_BATCHES)
    step = (
        AutoParallel(wrapped)
        .dataset_strategy("full_batch")
        .pipeline(stages=2, scheduler=scheduler, interleave=interleave)
    )
    losses = train(net, step, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    right, alone = in_one_process(MICRO_BATCHES * copies)
    assert losses == pytest.approx(right, rel=1e-10)
    for (name, buffer), expected in zip(net.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-10, atol=1e-12, msg=name)
    assert f"each micro batch changes {len(list(net.buffers()))} buffers in its turn" in step.plan.explain()
    net.eval(), alone.eval()
    found = step(*batch(9)).item()
    with torch.no_grad():
        assert found == pytest.approx(WithLoss(alone, nn.CrossEntropyLoss())(*batch(9)).item(), rel=1e-10)


@on_ranks(2)
def test_statistics_that_two_stages_share_are_refused_by_name():
    norm = nn.BatchNorm1d(8)
    net = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 8), copy.copy(norm), nn.Linear(8, 3))
    net[3].running_mean = norm.running_mean
    places = {"0": 0, "1": 0, "2": 1, "3": 1, "4": 1}
    step = AutoParallel(Pipeline(WithLoss(net, nn.CrossEntropyLoss()), 2, stage_config=places))
    with pytest.raises(StrategyError, match=r"changes buffer .* and several stages of the pipeline use it"):
        step.dataset_strategy("full_batch").pipeline(stages=2)(*batch(0))
