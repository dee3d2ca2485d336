"""One way to train a table that no worker holds: pull rows, push their gradients, step. Started by server.py.

usage: server_job.py WAY RESULT.json STEPS ROWS WIDTH NAMED SERVERS, with WAY servers, stale, rpc, rpc_in_step or
all_to_all. Every worker names NAMED different rows a step. rpc: the first two ranks are the workers, the others hold
the table; rpc_in_step: workers wait for each other after every step.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORKERS = 2
RATE = 0.01
WARM_UP = 3
STALENESS = 8
"""Steps that a worker may be ahead: it practically does not wait."""
Step = Callable[[Tensor], None]

_part = torch.empty(0)
"""Of the table, where this process holds one."""


def measure(step: Step, steps: int, rows: int, named: int, rank: int) -> list[float]:
    """Return the seconds of each step."""
    times = []
    for number in range(WARM_UP + steps):
        generator = torch.Generator().manual_seed(number * WORKERS + rank)
        names = torch.randperm(rows, generator=generator)[:named]
        begin = time.perf_counter()
        step(names)
        times.append(time.perf_counter() - begin)
    return times[WARM_UP:]


def with_servers(steps: int, rows: int, width: int, named: int, _servers: int, staleness: int = 0) -> list[float]:
    """Measure msrun's parameter servers."""
    from msrun.runtime import get_rank, init, release, set_param_ps, set_ps_context

    init("gloo")
    set_ps_context(enable_ps=True, staleness=staleness)
    table = nn.Embedding(rows, width)
    set_param_ps(table)
    optimizer = torch.optim.SGD(table.parameters(), lr=RATE)

    def step(names: Tensor) -> None:
        table(names).sum().backward()
        optimizer.step()

    times = measure(step, steps, rows, named, get_rank())
    release()
    return times


def make_part(rows: int, width: int) -> None:
    """Make this process' part of the table."""
    global _part
    _part = torch.randn(rows, width)


def read_part(names: Tensor) -> Tensor:
    """Return rows of this process' part."""
    return _part.index_select(0, names)


def change_part(names: Tensor, gradient: Tensor) -> None:
    """Step rows of this process' part."""
    _part.index_add_(0, names, gradient * (-RATE / WORKERS))  # with `alpha` it takes ten times as long


def with_rpc(steps: int, rows: int, width: int, named: int, servers: int, *, in_step: bool = False) -> list[float]:
    """Measure torch's RPC: a call to every server for the rows, one for their gradients."""
    from torch.distributed import rpc

    rank = int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, _transports=["uv"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORKERS + servers, rpc_backend_options=options)
    times: list[float] = []
    if rank < WORKERS:
        homes = [f"rank{WORKERS + server}" for server in range(servers)]
        if rank == 0:
            for server, home in enumerate(homes):
                rpc.rpc_sync(home, make_part, (len(range(server, rows, servers)), width))
        workers = {f"rank{other}" for other in range(WORKERS)}
        rpc.api._all_gather(None, workers)

        def step(names: Tensor) -> None:
            owner, own = names % servers, names // servers
            places = [(owner == server).nonzero().flatten() for server in range(servers)]
            calls = [rpc.rpc_async(home, read_part, (own[places[n]],)) for n, home in enumerate(homes)]
            found = torch.empty(names.numel(), width)
            for place, call in zip(places, calls, strict=True):
                found[place] = call.wait()
            found.requires_grad_().sum().backward()
            gradient = found.grad
            calls = [
                rpc.rpc_async(home, change_part, (own[places[n]], gradient[places[n]])) for n, home in enumerate(homes)
            ]
            for call in calls:
                call.wait()
            if in_step:
                rpc.api._all_gather(None, workers)

        times = measure(step, steps, rows, named, rank)
    rpc.shutdown()
    return times


def with_all_to_all(steps: int, rows: int, width: int, named: int, _servers: int) -> list[float]:
    """Measure gloo's all_to_all between workers that hold the table themselves; no server takes part."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    make_part(len(range(rank, rows, WORKERS)), width)

    def step(names: Tensor) -> None:
        order = torch.argsort(names % WORKERS, stable=True)
        sent = [int((names % WORKERS == owner).sum()) for owner in range(WORKERS)]
        taken = torch.empty(WORKERS, dtype=torch.int64)
        dist.all_to_all_single(taken, torch.tensor(sent))
        got = taken.tolist()
        wanted = torch.empty(sum(got), dtype=torch.int64)
        dist.all_to_all_single(wanted, (names // WORKERS)[order], got, sent)
        found = torch.empty(names.numel(), width)
        dist.all_to_all_single(found, read_part(wanted), sent, got)
        found.requires_grad_().sum().backward()
        gradient = torch.empty(wanted.numel(), width)
        dist.all_to_all_single(gradient, found.grad, got, sent)
        change_part(wanted, gradient)

    times = measure(step, steps, rows, named, rank)
    dist.destroy_process_group()
    return times


WAYS = {
    "servers": with_servers,
    "stale": functools.partial(with_servers, staleness=STALENESS),
    "rpc": with_rpc,
    "rpc_in_step": functools.partial(with_rpc, in_step=True),
    "all_to_all": with_all_to_all,
}


def main() -> None:
    """Measure, and let the first rank write the times."""
    way, result, *numbers = sys.argv[1:]
    times = WAYS[way](*map(int, numbers))
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(times))


main()
