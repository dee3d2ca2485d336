"""Two ranks train; rank 1 does not compute its (last) loss before rank 0's call has returned.

usage: late_rank.py RESULT.json
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import AutoParallel, MicroBatchInterleaved, WithLoss, get_rank, init, release
from msrun.runtime.execute.executor import Executor

DEADLINE_S = 60.0
result = Path(sys.argv[1])
LOSSES = {
    "mean squares": (nn.MSELoss(), lambda rows: torch.randn(rows, 4)),
    "cross-entropy": (F.cross_entropy, lambda rows: torch.randint(0, 4, (rows,))),
}
WRAPPERS = {
    "alone": lambda network: network,
    "copies": lambda network: MicroBatchInterleaved(network, 2),
}


def wait_for(path):
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"rank 0's call waits for rank 1: no {path.name}")
        time.sleep(0.01)


class Waiting(Executor):
    """Sends the numbers of labels off, then computes no more of the last copy before a file is there."""

    path = None

    def _run(self, step, copy, index, segment, needs_grad):
        if segment.groups and copy is step.copies[-1] and self.path is not None:
            wait_for(self.path)
        super()._run(step, copy, index, segment, needs_grad)


def train(name, wrap, loss_fn, labels):
    """Return the losses of two steps; before the backward pass of the second one rank 0 alone looks at it."""
    torch.manual_seed(1)
    network = nn.Linear(8, 4)
    data = torch.randn(8, 8), labels(8)
    step = AutoParallel(wrap(WithLoss(network, loss_fn))).dataset_strategy("full_batch")
    step(*data).backward()
    network.zero_grad()
    compiled = step._captured[0].compiled
    returned = result.with_name(f"{name} returned")
    if get_rank() == 1:
        compiled.executor.__class__ = Waiting
        compiled.executor.path = returned
    late = step(*data)
    kind = type(late).__name__
    if get_rank() == 0:
        returned.touch()
    late.backward()
    looked = step(*data)
    early = float(looked.detach()) if get_rank() == 0 else None
    looked.backward()
    return {
        "kinds": [kind, type(late).__name__],
        "losses": [late.item(), looked.item(), *([early] if early is not None else [])],
        "right": loss_fn(network(data[0]), data[1]).item(),
    }


init(timeout_s=DEADLINE_S)
found = {}
for what, (loss_fn, labels) in LOSSES.items():
    for name, wrap in WRAPPERS.items():
        found[f"{what}, {name}"] = train(f"{what} {name}", wrap, loss_fn, labels)
everything = [None, None]
dist.all_gather_object(everything, found)
if get_rank() == 0:
    result.write_text(json.dumps(everything))
release()
