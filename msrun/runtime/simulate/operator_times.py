"""What operators take here, measured while training steps run on all ranks at once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.runtime.cost.devices import Point
from msrun.runtime.simulate.dispatched import operator_name, work_of

WARM_STEPS, TIMED_STEPS = 1, 5
_TINY_LAYERS, _TINY_STEPS = 20, 50
_COLLECTIVES = ("c10d", "_c10d_functional")
Step = Callable[[], object]
Key = tuple[str, float, float]
"""Name in the profile, operations, bytes."""


@dataclass
class _Total:
    count: int = 0
    seconds: float = 0.0


class OperatorTimes(TorchDispatchMode):
    """Times every operator that runs under it, collectives left out; of DTensors the operators on their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Key, _Total] = defaultdict(_Total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        begin = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - begin
        if func.namespace not in _COLLECTIVES:
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            work = work_of(func, args, kwargs, result, made)
            if work.launches:
                key = operator_name(func, work), work.operations, work.read_bytes + work.written_bytes
                self.found[key].count += 1
                self.found[key].seconds += seconds
        return result


def measure_operators(steps: Sequence[Step]) -> dict[str, list[Point]]:
    """Return what the operators of these training steps take: name -> (operations, bytes, seconds) of each size.

    Seconds are the mean over ranks and calls, times how much longer the slowest rank of a step takes than the mean:
    the others wait for it.
    """
    own = [_timed(step) for step in steps for _ in range(_warm(step))]
    ranks: list[list[dict[Key, _Total]]] = [own]
    if dist.is_initialized():
        ranks = [own] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
    totals: dict[Key, _Total] = defaultdict(_Total)
    for found in (found for each in ranks for found in each):
        for key, total in found.items():
            totals[key].count += total.count
            totals[key].seconds += total.seconds
    mean_s = {key: total.seconds / total.count for key, total in totals.items()}
    slowest = [max(_slowness(found, mean_s) for found in of_ranks) for of_ranks in zip(*ranks, strict=True)]
    spread = sum(slowest) / len(slowest)
    points: dict[str, list[Point]] = defaultdict(list)
    for (name, operations, nbytes), seconds in sorted(mean_s.items()):
        points[name].append((operations, nbytes, spread * seconds))
    return dict(points)


def _warm(step: Step) -> int:
    """Run a step without looking; returns how often it is timed afterwards."""
    for _ in range(WARM_STEPS):
        step()
    return TIMED_STEPS


def _timed(step: Step) -> dict[Key, _Total]:
    if dist.is_initialized():
        dist.barrier()
    times = OperatorTimes()
    with times:
        step()
    return dict(times.found)


def _slowness(found: Mapping[Key, _Total], mean_s: Mapping[Key, float]) -> float:
    """Return the seconds of one rank's step as a multiple of what its operators take in the mean."""
    expected_s = sum(total.count * mean_s[key] for key, total in found.items())
    return sum(total.seconds for total in found.values()) / expected_s


def measure_overhead_s() -> float:
    """Return what Python and autograd take for each operator, beside the operator: of a network of tiny layers."""
    net = nn.Sequential(*(layer for _ in range(_TINY_LAYERS) for layer in (nn.Linear(4, 4), nn.Tanh())))
    batch = torch.ones(4, 4)

    def step() -> None:
        net(batch).sum().backward()
        net.zero_grad()

    _warm(step)
    found = list(_timed(step).values())
    operators = sum(total.count for total in found)
    begin = time.perf_counter()
    for _ in range(_TINY_STEPS):
        step()
    return max(0.0, ((time.perf_counter() - begin) / _TINY_STEPS - sum(total.seconds for total in found)) / operators)


class _Sample(nn.Module):
    """A network with all usual kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.AvgPool2d(2)
        )
        self.words = nn.Embedding(1000, 128)
        self.layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(128 + 32, 1000)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """(8, 3, 32, 32) images and (8, 64) words -> (8, 1000) scores."""
        features = self.convolutions(images).mean((2, 3))
        scores: Tensor = self.head(torch.cat([self.layer(self.words(words)).mean(1), features], 1))
        return scores


def sample_step() -> Step:
    """Return a training step of a small network with all usual kinds of layers, and of torch's AdamW."""
    with torch.random.fork_rng(devices=()):
        net = _Sample()
        images, words, labels = torch.randn(8, 3, 32, 32), torch.randint(1000, (8, 64)), torch.randint(1000, (8,))
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.random.fork_rng(devices=()):
            cross_entropy(net(images, words), labels).backward()
        optimizer.step()

    return step
