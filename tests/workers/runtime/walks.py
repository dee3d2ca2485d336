"""Follow a weight and a batch through a training step of a dry run's rank: print the rooms of the runtime they enter.

A room is entered by a call of its code that is given the tensor, or a record or group of the weight.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from msrun.runtime import AutoParallel, init, no_init_parameters, optim
from msrun.runtime.execute.gradients import GradientGroup
from msrun.runtime.execute.parameters import GatheredGroup, ParameterGroup
from msrun.runtime.execute.placement import PlacedParameter, Placement
from msrun.runtime.parallel import auto_parallel

_ROOT = "msrun/runtime/"
_RECORDS = (PlacedParameter, Placement, ParameterGroup, GatheredGroup, GradientGroup)
ROWS, WIDTH, RANKS = 24, 13, 4
WEIGHT = {WIDTH * 32, WIDTH * 32 // RANKS}
"""Elements of the weight that is followed, of its part, and of their gradients; nothing else has as many."""
BATCH = {ROWS * WIDTH}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


def rooms_of(work: Callable[[], None], follows: Callable[[Any], bool]) -> list[str]:
    """Return the rooms whose code is given what is followed while something is done."""
    rooms: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        place = frame.f_code.co_filename.rpartition(_ROOT)[2]
        if event == "call" and _ROOT in frame.f_code.co_filename:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            with torch._C.DisableTorchFunctionSubclass():
                if any(follows(value) for name in names for value in _within(frame.f_locals.get(name))):
                    rooms.add(place.partition("/")[0])

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(rooms)


def _within(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def is_weight(value: Any) -> bool:
    return isinstance(value, _RECORDS) or (isinstance(value, Tensor) and value.numel() in WEIGHT)


def is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() in BATCH


def train() -> None:
    with no_init_parameters():
        network = Network()
    parallel = AutoParallel(network).hsdp(threshold=0, optimizer_level="level3")
    optimizer = optim.AdamW(network.parameters())
    for _ in range(2):
        parallel(torch.rand(ROWS, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    init()
    auto_parallel.look_at_dry_run = lambda *_: None  # which would end the process after its steps
    json.dump({"weight": rooms_of(train, is_weight), "batch": rooms_of(train, is_batch)}, sys.stdout)


if __name__ == "__main__":
    main()
