"""One rank of benchmarks/heterogeneous.py.

usage: heterogeneous_job.py RESULT.json ROUNDS LAYERS WIDTH ROWS
       heterogeneous_job.py RESULT.json ROUNDS sparse TABLE_ROWS TABLE_WIDTH

Ways take turns in every round; a round gives one time of each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from msrun.runtime import AutoParallel, WithLoss, get_group_size, get_rank, init, optim, release

Way = Callable[[], object]
LR = 1e-4
TOUCHED = 0.01


def layers_of(count: int, width: int, dtype: torch.dtype) -> nn.Sequential:
    """Return a network whose layers are of this width."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(dtype)


def naive_step(network: nn.Module) -> Way:
    """Copy every gradient to the host, step there as torch does by default, copy every weight back."""
    weights = list(network.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LR)

    @torch.no_grad()
    def step() -> None:
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)

    return step


def ways_to_step(count: int, width: int) -> dict[str, Way]:
    """The optimizer's step alone, of bfloat16 weights with gradients on the device."""
    networks = [layers_of(count, width, torch.bfloat16) for _ in range(2)]
    for network in networks:
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
    ours = optim.offload(torch.optim.AdamW(networks[0].parameters(), lr=LR))
    return {"step": ours.step, "naive": naive_step(networks[1])}


def ways_to_train(count: int, width: int, rows: int) -> dict[str, Way]:
    """A whole training step: layers in bfloat16, a fused AdamW in float32 on the host, weights cut over the ranks."""
    mine = layers_of(count, width, torch.bfloat16)
    ours = optim.offload(torch.optim.AdamW(mine.parameters(), lr=LR))
    call = AutoParallel(WithLoss(mine, nn.MSELoss()))
    if get_group_size() > 1:
        call.hsdp(threshold=0, optimizer_level="level3")
    call.offload_gradients(ours)
    x = torch.randn(rows, width)

    def train() -> None:
        call(x.bfloat16(), x.bfloat16()).backward()
        ours.step()
        ours.zero_grad()

    theirs = layers_of(count, width, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*theirs, theirs):
        fully_shard(module, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    adam = torch.optim.AdamW(theirs.parameters(), lr=LR, fused=True)

    def train_fsdp() -> None:
        nn.functional.mse_loss(theirs(x), x.bfloat16()).backward()
        adam.step()
        adam.zero_grad()

    return {"train": train, "fsdp": train_fsdp}


def ways_to_update_rows(rows: int, width: int) -> dict[str, Way]:
    """A table of which a hundredth of the rows has gradients, beside one of which all have; both on the host."""
    touched = int(rows * TOUCHED)
    sparse, dense, fused = (nn.Parameter(torch.zeros(rows, width)) for _ in range(3))
    numbers = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:touched].sort().values
    sparse.grad = torch.sparse_coo_tensor(numbers[None], torch.randn(touched, width), (rows, width)).coalesce()
    dense.grad = fused.grad = torch.zeros(rows, width).index_copy_(0, numbers, sparse.grad.values())
    return {
        "lazy": optim.LazyAdam([sparse], LR, target="cpu").step,
        "dense": optim.Adam([dense], lr=LR, target="cpu", fused=False).step,
        "fused": optim.Adam([fused], lr=LR, target="cpu").step,
    }


def take_turns(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every way in every round, until all ranks have done it; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            way()
            dist.barrier()
            found[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in found.items()}


def main() -> None:
    """Measure every way once a round."""
    result, rounds, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    init()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if words[0] == "sparse":
        found |= take_turns(ways_to_update_rows(*map(int, words[1:])), rounds)
    else:
        count, width, rows = map(int, words)
        for ways in (ways_to_step(count, width), ways_to_train(count, width, rows)):
            found |= take_turns(ways, rounds)
    if get_rank() == 0:
        result.write_text(json.dumps(found))
    release()


main()
