"""Train a few steps of a dry run's rank and print every value of a step that Python has read: a device would stop.

Nothing is sent in a dry run, and the values of the other ranks are this one's: only the calls count here.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.runtime import AutoParallel, GradAccumulation, MicroBatchInterleaved, clip_grad_norm_, init, shard
from msrun.runtime.parallel import auto_parallel

_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero", "equal"}
_OPERATORS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select"}
_OWN = "msrun/runtime/"


@contextlib.contextmanager
def watched(found: list[str]) -> Iterator[None]:
    """Note what reads a value, by methods of tensors too: dynamo takes no mode for those."""

    def noting(name: str, method: Any) -> Any:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            _note(found, name, _READS, (self,))
            return method(self, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(_Operators(found))
        for name in _READS:
            stack.enter_context(mock.patch.object(Tensor, name, noting(name, getattr(Tensor, name))))
        yield


class _Operators(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _note(self._found, func.overloadpacket.__name__, _OPERATORS, args)
        return func(*args, **(kwargs or {}))


def _note(found: list[str], name: str, names: set[str], args: Any) -> None:
    if name in names and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        frame = next((f for f in reversed(traceback.extract_stack()) if _OWN in f.filename), None)
        found.append(f"{name} in {frame.filename.partition(_OWN)[2]}:{frame.lineno}" if frame else f"{name} of torch")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.25)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.drop(self.norm(self.first(x)).relu())) - y).square().mean()


def cut() -> nn.Module:
    network = Network()
    shard(network.first, ((2, 1), (2, 1)))
    return network


def hsdp(level: str) -> AutoParallel:
    return AutoParallel(Network()).hsdp(threshold=0, optimizer_level=level)


MAKERS: dict[str, Any] = {
    "data parallel": lambda: AutoParallel(Network()),
    **{f"hsdp level{level}": partial(hsdp, f"level{level}") for level in (1, 2, 3)},
    "tensor parallel": lambda: AutoParallel(cut()).hsdp(threshold=0),
    "copies": lambda: AutoParallel(MicroBatchInterleaved(cut(), 2)),
    "accumulation": lambda: AutoParallel(GradAccumulation(Network(), 2)).hsdp(threshold=0, optimizer_level="level2"),
    "bfloat16": lambda: AutoParallel(Network()).mixed_precision("bfloat16"),
}


def reads_of_a_step(parallel: AutoParallel, *, logs: bool = False) -> list[str]:
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, 0.9)  # Adam counts its steps in tensors on the host
    x, y = torch.rand(8, 16), torch.rand(8, 8)
    found: list[str] = []
    for number in range(4):
        # The first ones capture, and compare the ranks' batches.
        with watched(found) if number == 3 else contextlib.nullcontext():
            loss = parallel(x, y)
            loss.backward()
            clip_grad_norm_(parallel.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if logs:
                loss.item()
    return found


def main() -> None:
    init()
    auto_parallel.look_at_dry_run = lambda *_: None  # which would end the process after its steps
    found = {}
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        found[name] = reads_of_a_step(make())
    found["a loss that is logged"] = reads_of_a_step(AutoParallel(Network()), logs=True)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
