"""What a step waits for its messages beside their own seconds, measured here with programs of this runtime."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.capture.target import Target
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.compile_call import compile_call
from msrun.runtime.parallel.given_strategies import shard
from msrun.runtime.parallel.parameters.storage import ParameterStorage
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.sharding.layout import build_mesh

WIDTH, ROWS, PAIRS = 256, 64, 6
ROUNDS = 24
StepTime = tuple[float, float]
"""Seconds of a step, and seconds of this rank's processor time in it."""


class _Pairs(nn.Module):
    """Pairs of linear layers beside a value that lives across their messages, as in most networks; by columns and rows
    over `parts` ranks, each computes as much as one rank alone of layers that are whole."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(PAIRS):
            up, down = nn.Linear(WIDTH, WIDTH * parts, bias=False), nn.Linear(WIDTH * parts, WIDTH, bias=False)
            self.layers += [shard(up, ((1, 1), (parts, 1))), shard(down, ((1, parts), (1, parts)))]
        self.relu, self.add = shard(torch.relu, ((1, parts),)), shard(torch.add, ((1, 1), (1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) -> a loss."""
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = self.add(x, down(self.relu(up(x))))
        return x.mean()


def measure_wait_s(message_s: Callable[[int], float]) -> float:
    """Return what one message adds to a step beside its own seconds, from steps with and without messages by turns.

    All ranks call it together. Lower quartiles count: a step that another program has held up says nothing of messages.
    It is at the least the processor time that a message takes of all ranks, on the cores that they share: that is the
    same whatever else the machine does.

    Args:
        message_s: bytes -> seconds of an all-reduce over all ranks, back to back with others of its kind.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        (cut, calls), (whole, own_calls) = _compiled(_Pairs(world.get_group_size())), _compiled(_Pairs(1))
        batch = torch.randn(ROWS, WIDTH)
    steps = [(_step_s(cut, batch), _step_s(whole, batch)) for _ in range(ROUNDS)]
    cores = len(set[int]().union(*gather(os.sched_getaffinity(0))))
    with_messages, without = zip(*steps, strict=True)
    added = added_s(with_messages, without, world.get_group_size() / cores)
    return max(0.0, added / (calls - own_calls) - message_s(batch.nbytes))


def added_s(more: Sequence[StepTime], fewer: Sequence[StepTime], ranks_per_core: float) -> float:
    """Return how much longer one kind of steps takes than another one."""
    elapsed_s, processor_s = (
        statistics.quantiles(longer, n=4)[0] - statistics.quantiles(shorter, n=4)[0]
        for longer, shorter in zip(zip(*more, strict=True), zip(*fewer, strict=True), strict=True)
    )
    return max(elapsed_s, processor_s * max(1.0, ranks_per_core))


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


def _step_s(run: Run, batch: Tensor) -> StepTime:
    dist.barrier()
    begin_s, processor_begin_s = time.perf_counter(), time.process_time()
    run(batch).backward()
    processor_s = time.process_time() - processor_begin_s
    dist.barrier()
    return time.perf_counter() - begin_s, processor_s
