"""The job that `launch.py` times: join, one all_reduce, leave. The same file runs under msrun, torchrun and mpirun.

With `hold FOLDER` every rank says that it is there by a file of its name, then idles until FOLDER/go exists. With
`restart FOLDER` the last rank of the first attempt dies after the all_reduce, and writes FOLDER/died; the ranks of the
second one write when theirs is done. Moments are seconds of CLOCK_MONOTONIC.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def join() -> None:
    """Join the world as a script for that launcher does."""
    if "MSRUN_RENDEZVOUS" in os.environ:
        try:
            from msrun.runtime import init
        except ImportError:  # the runtime is not installed: what its init() does, by hand
            size = int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(os.environ["MSRUN_RENDEZVOUS"].removeprefix("file://"), size)
            dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size)
        else:
            init()
        return
    for ours, theirs in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
        if theirs in os.environ:
            os.environ.setdefault(ours, os.environ[theirs])
    dist.init_process_group("gloo")


def hold(folder: Path) -> None:
    """Idle until told to go."""
    (folder / str(dist.get_rank())).touch()
    while not (folder / "go").exists():
        time.sleep(0.2)


def die(folder: Path, total: torch.Tensor) -> None:
    """Die in the first attempt, or have the others wait for who does; say when the second one works."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        (folder / f"works_{rank}").write_text(repr(time.monotonic()))
    elif rank != size - 1:
        dist.all_reduce(total)
    else:
        (folder / "died").write_text(repr(time.monotonic()))
        os._exit(3)


if __name__ == "__main__":
    join()
    total = torch.ones(1)
    if dist.is_initialized():
        dist.all_reduce(total)
    if total.item() != int(os.environ["WORLD_SIZE"]):
        sys.exit(f"all_reduce gave {total.item()}, not {os.environ['WORLD_SIZE']}")
    if sys.argv[1:2] == ["hold"]:
        hold(Path(sys.argv[2]))
    if sys.argv[1:2] == ["restart"]:
        die(Path(sys.argv[2]), total)
    if dist.is_initialized():
        dist.destroy_process_group()
