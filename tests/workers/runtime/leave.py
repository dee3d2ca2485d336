"""Train a step in the mode of argv[2], then leave the world as argv[1] says, and print what is left of its threads."""

import atexit
import sys
from pathlib import Path

HOW = sys.argv[1]


def print_group_threads():
    names = [name_of(task) for task in Path("/proc/self/task").iterdir()]
    print("group threads:", sorted(name for name in names if "gloo" in name), flush=True)


def name_of(task):
    """Return a thread's name, or nothing for a thread that has ended since it was listed."""
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


if HOW != "releasing":
    atexit.register(print_group_threads)  # before init(), so it runs after the runtime's own

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from msrun.runtime import AutoParallel, get_rank, init, release  # noqa: E402

init()
torch.manual_seed(1)
MODE = sys.argv[2] if len(sys.argv) > 2 else "semi_auto hsdp"
net = AutoParallel(nn.Linear(8, 8), parallel_mode=MODE.split()[0])
if MODE.endswith("hsdp"):
    net.hsdp()
for _ in range(2):
    net(torch.ones(4, 8)).sum().backward()
net(torch.ones(4, 8)).sum().backward()

if HOW == "releasing":
    release()
    print_group_threads()
elif HOW == "failing" and get_rank() == 0:
    dist.all_reduce(torch.ones(1), async_op=True)  # the others never join
    raise RuntimeError("rank 0 fails with a collective under way")
elif HOW == "failing":
    import threading

    threading.Event().wait()
