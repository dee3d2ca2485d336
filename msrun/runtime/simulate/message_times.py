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
from msrun.runtime.parallel.modes.fsdp import LEAVES_WHOLE, ShardedNetwork
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec
from msrun.runtime.parallel.parameters.storage import ParameterStorage
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.sharding.layout import build_mesh
from msrun.runtime.simulate.operator_times import OperatorTimes
from msrun.runtime.tensors.plain_tensors import local_part

WIDTH, ROWS, PAIRS = 256, 64, 6
FSDP_WIDTH, FSDP_THRESHOLD_KB = 512, 16
FSDP_COPIES = ("fsdp.", "aten._foreach_copy_")
ROUNDS = 24
StepTime = tuple[float, float]
"""Seconds of a step, and seconds of this rank's processor time in it."""
MessageSeconds = Callable[[str, int], float]
"""A collective's name and its bytes on a rank -> its seconds over all ranks."""


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


def measure_wait_s(message_s: MessageSeconds) -> float:
    """Return what one message adds to a step beside its own seconds, from steps with and without messages by turns.

    All ranks call it together. Lower quartiles count: a step that another program has held up says nothing of messages.
    It is at the least the processor time that a message takes of all ranks, on the cores that they share: that is the
    same whatever else the machine does.

    Args:
        message_s: of messages that come back to back with others of their kind.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        (cut, calls), (whole, own_calls) = _compiled(_Pairs(world.get_group_size())), _compiled(_Pairs(1))
        batch = torch.randn(ROWS, WIDTH)
    steps = [(_step_s(cut, batch), _step_s(whole, batch)) for _ in range(ROUNDS)]
    with_messages, without = zip(*steps, strict=True)
    added = added_s(with_messages, without, _ranks_per_core())
    return max(0.0, added / (calls - own_calls) - message_s("all_reduce", batch.nbytes))


def measure_fsdp_s(message_s: MessageSeconds) -> tuple[float, float]:
    """Return what a collective of torch's FSDP2 adds to a step beside its own seconds and the copies around it, and
    what an operator of the optimizer takes longer on FSDP2's DTensors than on this rank's parts of them.

    All ranks call it together. It is measured as `measure_wait_s` does it, with layers whose weights are cut and whose
    biases are whole.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        whole, cut = _layers(), _layers()
        batch = torch.randn(ROWS, _fsdp_width())
    messages = _messages_of(cut)
    ShardedNetwork(Target(cut, cut), HsdpSpec(threshold=FSDP_THRESHOLD_KB, optimizer_level="level3"), sums_wide=False)

    def run(x: Tensor) -> Tensor:
        return cut(x).mean()

    def run_whole(x: Tensor) -> Tensor:
        return whole(x).mean()

    for _ in range(2):  # FSDP2 makes its plan in the first step
        _step_s(run, batch), _step_s(run_whole, batch)
    with OperatorTimes() as times:
        run(batch).backward()
    copies_s = sum(total.seconds for (name, _, _), total in times.found.items() if name.startswith(FSDP_COPIES))
    of_cut, of_whole = zip(*((_step_s(run, batch), _step_s(run_whole, batch)) for _ in range(ROUNDS)), strict=True)
    sent_s = sum(message_s(operation, nbytes) for operation, nbytes in messages)
    around_s = (added_s(of_cut, of_whole, _ranks_per_core()) - copies_s - sent_s) / len(messages)
    return max(0.0, around_s), max(0.0, _dtensor_s(list(cut.parameters())))


def _dtensor_s(parameters: Sequence[nn.Parameter]) -> float:
    """Return how much longer an operator of AdamW takes on DTensors that have gradients."""
    parts = [nn.Parameter(torch.zeros_like(local_part(parameter))) for parameter in parameters]
    for part in parts:
        part.grad = torch.zeros_like(part)
    optimizers = [torch.optim.AdamW(values, lr=0.0) for values in (parameters, parts)]
    for optimizer in optimizers:
        optimizer.step()
    with OperatorTimes() as times:
        optimizers[1].step()
    operators = sum(total.count for total in times.found.values())
    took = [[_call_s(optimizer.step) for optimizer in optimizers] for _ in range(ROUNDS)]
    longer, shorter = map(statistics.median, zip(*took, strict=True))
    return (longer - shorter) / operators


def _call_s(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def _ranks_per_core() -> float:
    return world.get_group_size() / len(set[int]().union(*gather(os.sched_getaffinity(0))))


def _fsdp_width() -> int:
    """Return a width of layers that all ranks can cut into equal parts: others would stay whole."""
    ranks = world.get_group_size()
    return -(-FSDP_WIDTH // ranks) * ranks


def _layers() -> nn.Sequential:
    layers = (nn.Linear(_fsdp_width(), _fsdp_width(), bias=LEAVES_WHOLE) for _ in range(PAIRS))
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))


def _messages_of(network: nn.Module) -> list[tuple[str, int]]:
    """Return the collectives of a step of a network under FSDP2, and their bytes on a rank."""
    found: list[tuple[str, int]] = []
    for value in network.parameters():
        if value.nbytes < FSDP_THRESHOLD_KB << 10:
            found.append(("all_reduce", value.nbytes))
        else:
            found += [("all_gather", value.nbytes // world.get_group_size())] * 2 + [("reduce_scatter", value.nbytes)]
    return found


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
