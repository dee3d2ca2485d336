"""A convolutional network with batch norm trains as in one process, running statistics included."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import difference
from on_ranks import on_ranks
from torch import Tensor, nn

from msrun.runtime import AutoParallel, MicroBatchInterleaved, WithLoss, no_init_parameters, shard

RANKS, BATCH, CLASSES, SIZE, STEPS = 4, 8, 6, 16, 3


class Decoder(nn.Module):
    """Down and up again with a skip: pads, interpolates, transposes; keeps an average of its images besides."""

    center: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(8, momentum=0.3)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
        self.head = nn.Conv2d(7, CLASSES, 1)
        self.average = nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        given, x = x, x - self.center.view(3, 1, 1)
        with torch.no_grad():
            self.center.mul_(0.9).add_(given.mean((0, 2, 3)), alpha=0.1)
        small = F.silu(self.norm(self.down(x)), inplace=True)
        large = self.up(self.pool(self.depthwise(F.interpolate(small, scale_factor=2.0))))
        return self.average(self.head(torch.cat([large, x], 1))).flatten(1)


ROWS = ((1, 1, 4, 1), (1, 1, 1, 1))
SPACE = dict.fromkeys(("depthwise", "up"), ROWS)
CHANNELS = {
    "down": ((1, 1, 1, 1), (4, 1, 1, 1)),
    "depthwise": ((1, 4, 1, 1), (4, 1, 1, 1)),
    "norm": ((1, 4, 1, 1), (4,), (4,)),
}
MIXED = {
    "down": ((1, 1, 1, 1), (4, 1, 1, 1)),
    "norm": ((2, 1, 2, 1),),
    "depthwise": ((1, 2, 2, 1), (2, 1, 1, 1)),
    "pool": ((2, 2, 1, 1),),
    "up": ROWS,
    "head": ((2, 1, 1, 2), (1, 1, 1, 1)),
    "average": ((1, 1, 2, 2),),
}


@dataclass(frozen=True)
class Scenario:
    """One way."""

    name: str
    strategies: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1
    hsdp: bool = False
    full_batch: bool = True
    deferred: bool = False
    dtype: str = "float64"


SCENARIOS = [
    Scenario("data-parallel", full_batch=False),
    Scenario("data-parallel-float32", full_batch=False, dtype="float32"),
    Scenario("two-copies", copies=2, full_batch=False),
    Scenario("space", SPACE),
    Scenario("channels", CHANNELS),
    Scenario("mixed-two-copies", MIXED, copies=2),
    Scenario("mixed-two-copies-hsdp", MIXED, copies=2, hsdp=True, deferred=True),
]


def make(scenario):
    """Return the network, what computes its loss, and its optimizer."""
    torch.manual_seed(1)
    torch.set_default_dtype(getattr(torch, scenario.dtype))
    network = Decoder()
    whole = WithLoss(network, F.cross_entropy)
    if scenario.copies > 1:
        whole = MicroBatchInterleaved(whole, scenario.copies)
    return network, whole, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)


def in_copies(scenario, tensor):
    """Return the rows in the order in which one process must see them to make the same copies: every rank cuts its
    own part of the batch, so a copy has rows of all ranks."""
    if scenario.full_batch:
        return tensor
    parts = [part.chunk(scenario.copies) for part in tensor.chunk(RANKS)]
    return torch.cat([part[index] for index in range(scenario.copies) for part in parts])


@on_ranks(RANKS)
@pytest.mark.parametrize("scenario", slow_but([], SCENARIOS))
def test_losses_weights_and_running_statistics_are_those_of_one_process(ranks, scenario):
    """The last loss is that of evaluation."""
    alone, serial, theirs = make(scenario)
    with no_init_parameters() if scenario.deferred else nullcontext():
        network, whole, ours = make(scenario)
    for path, strategy in scenario.strategies.items():
        shard(network.get_submodule(path), strategy)
    step = AutoParallel(whole)
    if scenario.full_batch:
        step.dataset_strategy("full_batch")
    if scenario.hsdp:
        step.hsdp(threshold=0, optimizer_level="level3")
    tolerance = 1e-10 if scenario.dtype == "float64" else 1e-5
    generator = torch.Generator().manual_seed(2)
    for number in range(STEPS + 1):
        images = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
        batch = images.to(getattr(torch, scenario.dtype)), torch.randint(0, CLASSES, (BATCH,), generator=generator)
        if number == STEPS:
            network.eval()
            alone.eval()
        loss = step(*(value if scenario.full_batch else ranks.part(value) for value in batch))
        right = serial(*(in_copies(scenario, value) for value in batch))
        assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=tolerance, abs=0)
        if number < STEPS:
            loss.backward()
            right.backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in alone.named_parameters():
        assert difference(network.get_parameter(name), parameter) <= tolerance * 10, name
    for name, value in alone.named_buffers():
        torch.testing.assert_close(network.get_buffer(name), value, rtol=tolerance, atol=tolerance)
    assert int(network.norm.num_batches_tracked) == STEPS * scenario.copies
    users = {o.module_path.removeprefix("network.") for o in step.plan.operators if o.origin == "user"}
    assert users == {*scenario.strategies} and not step.plan.notes
