"""One rank of benchmarks/checkpoint.py: saves and loads one network in turns with torch's own ways.

usage: checkpoint_job.py RESULT.json FOLDER ROUNDS LAYERS WIDTH ROWS

The stall of a save beside the training is the time of the call, which copies what is to be written.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from msrun.runtime import AutoParallel, WithLoss, get_rank, init, load_checkpoint, release, save_checkpoint
from msrun.runtime.checkpoint.save import background


def barrier_and_sync() -> None:
    """Have the disk finish what others left to it, and begin together."""
    if get_rank() == 0:
        os.sync()
    dist.barrier()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done it."""
    barrier_and_sync()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def durable_torch_save(value: object, path: Path) -> None:
    """Save as msrun does: through to the disk, and then by its name."""
    with path.with_name(path.name + ".part").open("wb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    path.with_name(path.name + ".part").rename(path)


def main() -> None:
    """Measure every way once a round."""
    result, folder, rounds, layers, width, rows = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:7])
    init()
    torch.set_num_threads(1)
    network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    step = AutoParallel(WithLoss(network, nn.MSELoss())).hsdp(threshold=0)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)
    images = torch.randn(rows, width)
    times: dict[str, list[float]] = {}

    def train(begin: float) -> float:
        """Train one step; return the seconds since `begin`."""
        step(images, images).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    train(0.0)

    def note(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(timed(work))

    def fresh(name: str) -> Path:
        if get_rank() == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
        dist.barrier()
        return folder / name

    def save_by_torch(path: Path) -> None:
        whole = {name: value.full_tensor() for name, value in network.state_dict().items()}  # type: ignore[attr-defined]
        if get_rank() == 0:
            durable_torch_save(whole, path)

    def load_by_torch(path: Path) -> None:
        network.load_state_dict(torch.load(path, weights_only=True))

    for _ in range(rounds + 1):  # the first one warms up
        path = fresh("directory") / "a.ckpt"
        note("save directory", lambda p=path: save_checkpoint(network, p, integrated_save=False))
        note("load directory", lambda p=path: load_checkpoint(p, network))
        path = fresh("dcp")
        note("save dcp", lambda p=path: dcp.save({"model": network.state_dict()}, checkpoint_id=p))
        note("load dcp", lambda p=path: dcp.load({"model": network.state_dict()}, checkpoint_id=p))
        path = fresh("file") / "a.ckpt"
        note("save file", lambda p=path: save_checkpoint(network, p))
        note("load file", lambda p=path: load_checkpoint(p, network))
        path = fresh("torch") / "a.pt"
        note("save torch", lambda p=path: save_by_torch(p))
        note("load torch", lambda p=path: load_by_torch(p))
        for form, is_integrated in (("directory", False), ("file", True)):
            path = fresh("beside") / "a.ckpt"
            barrier_and_sync()
            times.setdefault("step", []).append(train(time.perf_counter()))
            dist.barrier()
            begin = time.perf_counter()
            save_checkpoint(network, path, integrated_save=is_integrated, async_save=True)
            times.setdefault(f"stall {form}", []).append(time.perf_counter() - begin)
            times.setdefault(f"step with {form}", []).append(train(begin))
            background.wait()
    if get_rank() == 0:
        result.write_text(json.dumps({name: found[1:] for name, found in times.items()}))
        shutil.rmtree(folder)
    dist.barrier()
    release()


main()
