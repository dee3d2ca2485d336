"""A training step does not stop between its forward and its backward pass for the loss of the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from on_ranks import Ranks, on_ranks
from torch import nn

from msrun.runtime import AutoParallel, MicroBatchInterleaved, WithLoss
from msrun.runtime.execute.executor import Executor

DEADLINE_S = 60.0
LOSSES = {
    "mean squares": (nn.MSELoss(), lambda rows: torch.randn(rows, 4)),
    "cross-entropy": (F.cross_entropy, lambda rows: torch.randint(0, 4, (rows,))),
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


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: MicroBatchInterleaved(net, 2)], ids=["alone", "copies"])
@pytest.mark.parametrize("loss", LOSSES)
def test_call_returns_before_the_other_rank_has_computed_its_loss_and_its_number_is_the_global_one(
    ranks: Ranks, tmp_path: Path, loss: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """That the test ends says that no call of rank 0 has waited for rank 1."""
    loss_fn, labels = LOSSES[loss]
    torch.manual_seed(1)
    network = nn.Linear(8, 4)
    data = torch.randn(8, 8), labels(8)
    step = AutoParallel(wrap(WithLoss(network, loss_fn))).dataset_strategy("full_batch")
    step(*data).backward()
    network.zero_grad()
    compiled, returned = step._captured[0].compiled, tmp_path / "returned"
    if ranks.rank == 1:
        compiled.executor.__class__ = Waiting
        compiled.executor.path = returned
    late = step(*data)
    kind = type(late).__name__
    if ranks.rank == 0:
        returned.touch()
    late.backward()
    looked = step(*data)
    losses = [float(looked.detach())] if ranks.rank == 0 else []  # before the backward pass
    looked.backward()
    assert [kind, type(late).__name__] == ["LateLoss", "Tensor"], "a plain tensor after the backward pass"
    right = loss_fn(network(data[0]), data[1]).item()
    assert [late.item(), looked.item(), *losses] == pytest.approx([right] * (2 + len(losses)), rel=1e-6)
