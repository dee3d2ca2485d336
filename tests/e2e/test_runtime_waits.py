"""Who waits for whom: a step for no loss of other ranks and, on a device, no value; a lone rank for no other one."""

import contextlib
import re
import time
import traceback
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.errors import ParallelError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    WithLoss,
    clip_grad_norm_,
    save_checkpoint,
    shard,
    whole_parameters,
)
from msrun.runtime.execute.executor import Executor

pytestmark = pytest.mark.slow
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


@on_ranks(2)
@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: MicroBatchInterleaved(net, 2)], ids=["alone", "copies"])
@pytest.mark.parametrize("loss", LOSSES)
def test_call_returns_before_the_other_rank_has_computed_its_loss_and_its_number_is_the_global_one(
    ranks, tmp_path, loss, wrap
):
    """That the test ends says that no call of rank 0 has waited for rank 1."""
    loss_fn, labels = LOSSES[loss]
    torch.manual_seed(1)
    network = nn.Linear(8, 4)
    data = torch.randn(8, 8), labels(8)
    step = AutoParallel(wrap(WithLoss(network, loss_fn))).dataset_strategy("full_batch")
    step(*data).backward()
    network.zero_grad()
    compiled, returned = step.engine.calls[0].compiled, tmp_path / "returned"
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


# -- values read in Python ---------------------------------------------------------------------------------------------

_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero", "equal"}
_OPERATORS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select"}
_OWN = "msrun/runtime/"


@contextlib.contextmanager
def watched(found):
    """Note what reads a value, by methods of tensors too: dynamo takes no mode for those."""

    def noting(name, method):
        def call(self, *args, **kwargs):
            _note(found, name, _READS, (self,))
            return method(self, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(_Operators(found))
        for name in _READS:
            stack.enter_context(mock.patch.object(Tensor, name, noting(name, getattr(Tensor, name))))
        yield


class _Operators(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _note(self._found, func.overloadpacket.__name__, _OPERATORS, args)
        return func(*args, **(kwargs or {}))


def _note(found, name, names, args):
    if name in names and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        frame = next((f for f in reversed(traceback.extract_stack()) if _OWN in f.filename), None)
        found.append(f"{name} in {frame.filename.partition(_OWN)[2]}:{frame.lineno}" if frame else f"{name} of torch")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.25)

    def forward(self, x, y):
        return (self.second(self.drop(self.norm(self.first(x)).relu())) - y).square().mean()


def cut():
    network = Network()
    shard(network.first, ((2, 1), (2, 1)))
    return network


def hsdp(level):
    return AutoParallel(Network()).hsdp(threshold=0, optimizer_level=level)


MAKERS = {
    "data parallel": lambda: AutoParallel(Network()),
    **{f"hsdp level{level}": partial(hsdp, f"level{level}") for level in (1, 2, 3)},
    "tensor parallel": lambda: AutoParallel(cut()).hsdp(threshold=0),
    "copies": lambda: AutoParallel(MicroBatchInterleaved(cut(), 2)),
    "accumulation": lambda: AutoParallel(GradAccumulation(Network(), 2)).hsdp(threshold=0, optimizer_level="level2"),
    "bfloat16": lambda: AutoParallel(Network()).mixed_precision("bfloat16"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", [*MAKERS, "logged"])
def test_no_value_of_a_step_is_read_in_python_in_any_layout(name):
    parallel = MAKERS.get(name, MAKERS["data parallel"])()
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, 0.9)  # Adam counts its steps in tensors on the host
    x, y = torch.rand(8, 16), torch.rand(8, 8)
    found = []
    for number in range(4):
        # The first ones capture, and compare the ranks' batches.
        with watched(found) if number == 3 else contextlib.nullcontext():
            loss = parallel(x, y)
            loss.backward()
            clip_grad_norm_(parallel.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if name == "logged":
                loss.item()
    assert found == (["item of torch", "_local_scalar_dense of torch"] if name == "logged" else [])


class Saved(nn.Linear):
    def save_pretrained(self, is_main_process):
        return self.weight.detach().clone()


@on_ranks(2, 3, 4, 5, env={"MSRUN_CPU_BACKEND": "gloo"})  # after a refusal the ranks of a world do no more
def test_parts_that_one_rank_alone_gathers_are_refused_on_all_and_wholes_are_read(ranks, tmp_path):
    gathering = {
        2: ("state_dict()", lambda step: step.state_dict()["weight"]),
        3: ("save_pretrained()", lambda step: step.save_pretrained()),
        4: ("whole_parameters()", lambda step: whole_parameters(step).__enter__()),
        5: ("save_checkpoint()", lambda step: save_checkpoint(step, tmp_path / "saved")),
    }
    x, y = torch.ones(60, 8), torch.zeros(60, dtype=torch.long)
    for is_cut in (False, True):
        network = Saved(8, 60)
        step = AutoParallel(WithLoss(network, F.cross_entropy)).dataset_strategy("full_batch")
        if is_cut:
            shard(network, ((1, 1), (ranks.size, 1)))
        for _ in range(2):  # all ranks together may, before and after calls
            assert step.save_pretrained().shape == step.state_dict()["weight"].shape == (60, 8)
            step(x, y).backward()
        if not is_cut:
            assert ranks.rank or (step.save_pretrained() == step.state_dict()["weight"]).all()
            continue
        way, gather = gathering[ranks.size]
        with pytest.raises(ParallelError, match=rf"^{re.escape(way)} was called on rank 0 while other ranks went on"):
            gather(step) if not ranks.rank else step(x, y).backward()
