"""The job that `ssh.py` times: join, one all_reduce, leave. The same file runs under msrun, torchrun and mpirun.

    ssh_job.py FOLDER

Every rank writes FOLDER/<rank>.json when its first all_reduce has given the right sum: when its program began, when it
had imported torch, joined and reduced, each with the processor seconds of its process so far. Moments are seconds of
CLOCK_MONOTONIC, which all hosts of the benchmark share.
"""

import os
import time

BEGIN = {"at": time.monotonic(), "cpu_s": time.process_time()}

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def moment() -> dict[str, float]:
    """Return the time and the processor seconds of this process so far."""
    return {"at": time.monotonic(), "cpu_s": time.process_time()}


def join() -> None:
    """Join the world as a plain torch script does; mpirun's variables get torch's names."""
    for ours, theirs in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
        if theirs in os.environ:
            os.environ.setdefault(ours, os.environ[theirs])
    dist.init_process_group("gloo")


if __name__ == "__main__":
    imported = moment()
    join()
    joined = moment()
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1], dtype=torch.float64)
    dist.all_reduce(total)
    if total.item() != size * (size + 1) / 2:
        sys.exit(f"rank {rank}: all_reduce gave {total.item()}, not {size * (size + 1) / 2}")
    record = {"begin": BEGIN, "imported": imported, "joined": joined, "reduced": moment()}
    path = Path(sys.argv[1], f"{rank}.part")
    path.write_text(json.dumps(record))
    path.rename(path.with_suffix(".json"))
    dist.destroy_process_group()
