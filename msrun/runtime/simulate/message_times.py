"""What a step waits for its messages beside their own seconds, measured here with programs of this runtime."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.runtime import world
from msrun.runtime.capture.target import Target
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.compile_call import compile_call
from msrun.runtime.parallel.given_strategies import shard
from msrun.runtime.parallel.parameters.storage import ParameterStorage
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.sharding.layout import build_mesh

WIDTH, ROWS, PAIRS = 256, 64, 6
ROUNDS = 24


class _Pairs(nn.Module):
    """Pairs of linear layers; by columns and rows over `parts` ranks, each computes as much as one rank alone of
    layers that are whole."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(PAIRS):
            up, down = nn.Linear(WIDTH, WIDTH * parts, bias=False), nn.Linear(WIDTH * parts, WIDTH, bias=False)
            self.layers += [shard(up, ((1, 1), (parts, 1))), shard(down, ((1, parts), (1, parts)))]

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) -> a loss."""
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def measure_wait_s(message_s: Callable[[int], float]) -> float:
    """Return what one message adds to a step beside its own seconds, from steps with and without messages by turns.

    All ranks call it together. Lower quartiles count: a step that another program has held up says nothing of messages.

    Args:
        message_s: bytes -> seconds of an all-reduce over all ranks, back to back with others of its kind.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        (cut, calls), (whole, _) = _compiled(_Pairs(world.get_group_size())), _compiled(_Pairs(1))
        batch = torch.randn(ROWS, WIDTH)
    steps = [(_step_s(cut, batch), _step_s(whole, batch)) for _ in range(ROUNDS)]
    with_messages, without = (statistics.quantiles(each, n=4)[0] for each in zip(*steps, strict=True))
    return max(0.0, (with_messages - without) / calls - message_s(batch.nbytes))


Run = Callable[[Tensor], Tensor]


def _compiled(network: nn.Module) -> tuple[Run, int]:
    """Return what runs a network, and how many messages its step has."""
    rank, mesh = world.get_rank(), build_mesh(world.get_group_size())
    settings = ParallelSettings(dataset_strategy="full_batch")
    compilation = Compilation(
        Target(network, network), settings, mesh, rank, ParameterStorage(network, mesh, rank, settings.hsdp)
    )
    _, call, plan = compile_call(compilation, [torch.empty(ROWS, WIDTH)], {})
    assert plan.traffic is not None
    return lambda batch: call.run([batch])[0], sum(plan.traffic.calls.values())


def _step_s(run: Run, batch: Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run(batch).backward()
    dist.barrier()
    return time.perf_counter() - begin
