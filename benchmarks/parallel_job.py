"""The ranks of `parallel.py`: train one network in several ways that take turns, and time every turn.

    parallel_job.py OUT PART '{"sizes": ..., "rounds": ..., ...}'

Every way trains its own copy of the network on the same data. In every round each way does the same number of steps
between two barriers; the order changes from round to round. Rank 0 writes the seconds per step of the slowest rank,
and the loss that every way has come to.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from parallel_networks import (
    Perceptron,
    Residual,
    Transformer,
    classification,
    parts_of,
    regression,
)
from torch import Tensor, nn

import msrun.runtime as ms
from msrun.runtime import AutoParallel, MicroBatchInterleaved, WithLoss, set_comm_fusion, shard

Step = Callable[[], Tensor]
"""One training step; returns the loss, this rank's or the global one."""
WARM_UP_STEPS = 3
OVERLAP = "grad_matmul_communication_overlap"
CLOCKS = (time.perf_counter, time.thread_time, time.process_time)


def torch_group(way: str) -> Any:
    """Return the process group of a way of torch's: msrun's own backend is the world's, gloo has a group beside it."""
    if not way.endswith("gloo"):
        return dist.group.WORLD
    if "gloo" not in _groups:
        _groups["gloo"] = dist.new_group(backend="gloo")
    return _groups["gloo"]


_groups: dict[str, Any] = {}


def torch_mesh(way: str) -> Any:
    """Return the same as a mesh. It is named: DTensor remembers meshes of equal ranks and names as one."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(torch_group(way), "cpu", mesh_dim_names=(way,))


# -- data parallel --------------------------------------------------------------------------------------------------


def train(call: Callable[..., Tensor], data: tuple[Tensor, ...], optimizer: Any) -> Step:
    """Return an ordinary training step."""

    def step() -> Tensor:
        loss = call(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def dp(sizes: list[int], way: str) -> Step:
    """Momentum SGD; sizes: width, depth, samples per rank."""
    width, depth, batch = sizes
    network = WithLoss(parts_of(Perceptron, width, depth), F.cross_entropy)
    data = classification(batch, width, dist.get_rank())
    if way == "msrun":
        call: Any = AutoParallel(network)
    else:
        call = nn.parallel.DistributedDataParallel(network, process_group=torch_group(way))
    return train(call, data, torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9))


def zero1(sizes: list[int], way: str) -> Step:
    """Adam whose state is cut over the ranks; sizes: width, depth, samples per rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    width, depth, batch = sizes
    network = WithLoss(parts_of(Perceptron, width, depth), F.cross_entropy)
    data = classification(batch, width, dist.get_rank())
    if way == "msrun":
        call: Any = AutoParallel(network).hsdp(optimizer_level="level1")
        optimizer: Any = torch.optim.Adam(network.parameters(), lr=1e-4)
    else:
        group = torch_group(way)
        call = nn.parallel.DistributedDataParallel(network, process_group=group)
        optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.Adam, process_group=group, lr=1e-4)
    return train(call, data, optimizer)


def fsdp(sizes: list[int], way: str) -> Step:
    """AdamW, everything cut over the ranks, one message per block; sizes: width, depth, samples per rank."""
    from torch.distributed.fsdp import fully_shard

    width, depth, batch = sizes
    network = parts_of(Residual, width, depth)
    whole: Any = WithLoss(network, F.cross_entropy)
    data = classification(batch, width, dist.get_rank())
    if way == "msrun":
        for number, block in enumerate(network.blocks):
            set_comm_fusion(block, number + 1)
        call: Any = AutoParallel(whole).hsdp(threshold=0, optimizer_level="level3")
    else:
        mesh = torch_mesh(way)
        for block in network.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        call = fully_shard(whole, mesh=mesh, reshard_after_forward=True)
    return train(call, data, torch.optim.AdamW(network.parameters(), lr=1e-4))


def steps(sizes: list[int], way: str) -> Step:
    """Data parallel with AdamW, which steps after the backward pass or in it; sizes: width, depth, samples per rank."""
    width, depth, batch = sizes
    network = WithLoss(parts_of(Perceptron, width, depth), F.cross_entropy)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    call = AutoParallel(network)
    if way == "in backward":
        call.step_in_backward(optimizer)
    return train(call, classification(batch, width, dist.get_rank()), optimizer)


# -- tensor parallel ------------------------------------------------------------------------------------------------


def shard_transformer(network: Transformer, size: int) -> None:
    """Cut every block as Megatron does: heads and hidden units over the ranks; what lies between stays whole."""
    whole = (1, 1, 1)
    columns, rows, heads = ((1, 1), (size, 1), (size,)), ((1, size), (1, size)), (1, size, 1, 1)
    for block in network.blocks:
        for layer in (block.query, block.key, block.value, block.up):
            shard(layer, columns)
        for layer in (block.out, block.down):
            shard(layer, rows)
        for add in (block.add1, block.add2):
            shard(add, (whole, whole))
        for norm in (block.norm1, block.norm2):
            shard(norm, (whole, (1,), (1,)))
        shard(block.attend, (heads, heads, heads), out_strategy=(heads,))


def parallel_transformer(network: Transformer, size: int, copies: int = 1, *, overlap: bool = False) -> AutoParallel:
    """Return the transformer with its loss, cut as Megatron does; `overlap` as Megatron, too, does by default."""
    shard_transformer(network, size)
    whole: nn.Module = WithLoss(network, shard(nn.MSELoss(), ((1, 1, 1), (1, 1, 1))))
    whole = MicroBatchInterleaved(whole, copies) if copies > 1 else whole
    return AutoParallel(whole).dataset_strategy("full_batch").transformer_opt({OVERLAP: overlap})


def forward_backward(call: Callable[..., Tensor], data: tuple[Tensor, ...], network: nn.Module) -> Step:
    """Return a step without an optimizer."""

    def step() -> Tensor:
        loss = call(*data)
        loss.backward()
        network.zero_grad()
        return loss.detach()

    return step


def tp(sizes: list[int], way: str) -> Step:
    """Forward and backward of a transformer; sizes: width, depth, heads, samples, sequence."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    width, depth, heads, batch, sequence = sizes
    network = parts_of(Transformer, width, depth, max(heads, dist.get_world_size()))
    data = regression(batch, sequence, width)
    if way == "msrun":
        return forward_backward(parallel_transformer(network, dist.get_world_size(), overlap=True), data, network)
    mesh = torch_mesh(way)
    plan = {
        **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel()),
        **dict.fromkeys(("out", "down"), RowwiseParallel()),
    }
    for block in network.blocks:
        parallelize_module(block, mesh, dict(plan))
    return forward_backward(WithLoss(network, F.mse_loss), data, network)


def copies(sizes: list[int], way: str) -> Step:
    """Forward and backward of a transformer in so many copies as the way says; sizes as for `tp`.

    The way `communicate` only moves what one copy does: four all-reduces of activations per block. Behind a number,
    `+` computes weights' gradients while others travel.
    """
    width, depth, heads, batch, sequence = sizes
    if way == "communicate":
        return only_all_reduces(4 * depth, torch.zeros(batch, sequence, width))
    network = parts_of(Transformer, width, depth, heads)
    call = parallel_transformer(network, dist.get_world_size(), int(way.rstrip("+")), overlap=way.endswith("+"))
    return forward_backward(call, regression(batch, sequence, width), network)


def only_all_reduces(count: int, value: Tensor) -> Step:
    """Return a step of nothing but all-reduces, one after the other."""

    def step() -> Tensor:
        for _ in range(count):
            dist.all_reduce(value)
        return value.sum()

    return step


def pipeline(sizes: list[int], way: str) -> Step:
    """Forward and backward of blocks in as many stages as ranks; sizes: width, depth, samples, micro batches."""
    width, depth, batch, micro_size = sizes
    size = dist.get_world_size()
    network = parts_of(Residual, width, depth)
    stages = {f"network.blocks.{index}": index * size // depth for index in range(depth)}
    stages["network.last"] = size - 1
    whole = ms.Pipeline(WithLoss(network, F.cross_entropy), micro_size, stages)
    call = AutoParallel(whole).pipeline(stages=size, scheduler=way).dataset_strategy("full_batch")
    return forward_backward(call, classification(batch, width, 0), network)


# -- measuring ------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[list[int], str], Step]] = {
    "dp": dp,
    "zero1": zero1,
    "fsdp": fsdp,
    "steps": steps,
    "tp": tp,
    "copies": copies,
    "pipeline": pipeline,
}


def take_turns(steps: dict[str, Step], rounds: int, count: int) -> dict[str, list[list[float]]]:
    """Return for every way and round, per step: seconds, the main thread's processor seconds, and the process's."""
    found: dict[str, list[list[float]]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            dist.barrier()
            begin = [clock() for clock in CLOCKS]
            for _ in range(count):
                steps[name]()
            found[name].append([(clock() - at) / count for clock, at in zip(CLOCKS, begin, strict=True)])
    return found


def peak_bytes(make: Callable[[], Step], count: int) -> int:
    """Return how far the memory of this process rose above what it was before the network was made.

    Source: VmHWM of /proc/self/status after a reset by /proc/self/clear_refs.
    """
    before = _status_kb("VmRSS")
    step = make()
    for _ in range(count):
        step()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(count):
        step()
    return (_status_kb("VmHWM") - before) * 1024


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def everyone(value: Any) -> list[Any]:
    """Return the value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure_memory(make: Callable[[list[int], str], Step], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the peak of one way on the worst rank, after a small network has brought in all code."""
    (way,) = asked["ways"]
    small = make(asked["small"], way)
    small()
    small()
    return {way: {"peak_bytes": max(everyone(peak_bytes(lambda: make(asked["sizes"], way), WARM_UP_STEPS)))}}


def measure_time(make: Callable[[list[int], str], Step], asked: dict[str, Any]) -> dict[str, Any]:
    """Return for every way its times per step in every round, and the loss that it has come to.

    Seconds are those of the slowest rank; processor seconds, of the main thread and of the whole process, means; those
    of the main thread also of the rank that has most to do.
    """
    steps = {way: make(asked["sizes"], way) for way in asked["ways"]}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    taken = everyone(take_turns(steps, asked["rounds"], asked["steps"]))
    losses = everyone({way: float(step()) for way, step in steps.items()})
    return {
        way: {
            "seconds": [max(rank[way][i][0] for rank in taken) for i in range(asked["rounds"])],
            "computing": [mean(rank[way][i][1] for rank in taken) for i in range(asked["rounds"])],
            "busiest": [max(rank[way][i][1] for rank in taken) for i in range(asked["rounds"])],
            "processor": [mean(rank[way][i][2] for rank in taken) for i in range(asked["rounds"])],
            "loss": sum(rank[way] for rank in losses) / len(losses),
        }
        for way in asked["ways"]
    }


def main() -> None:
    """Do what the arguments say."""
    out, part, asked = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    ms.init(timeout_s=120)
    measure = measure_memory if asked.get("small") else measure_time
    result = measure(PARTS[part], asked)
    if ms.get_rank() == 0:
        out.write_text(json.dumps(result))
    ms.release()


if __name__ == "__main__":
    main()
