"""Trains every habit of runtime_habits on all ranks and alone; RESULT.json holds the differences, or what was raised.

usage: habits.py RESULT.json [name ...]
"""

import copy
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from only_cases import is_asked
from runtime_habits import HABITS, STEPS, WORLD_SIZE, Habit
from torch import Tensor, nn

from msrun.runtime import AutoParallel, get_rank, init, release

init(timeout_s=120)
torch.set_default_dtype(torch.float64)
warnings.simplefilter("ignore")


def loss_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def parallel(network: nn.Module, settings: dict[str, Any]) -> AutoParallel:
    step = AutoParallel(network).dataset_strategy("full_batch")
    if "stages" in settings:
        return step.pipeline(settings["stages"])
    return step.hsdp(threshold=0, optimizer_level=settings.get("optimizer_level", "level1"))


def differences(habit: Habit) -> list[float]:
    torch.manual_seed(0)
    alone = habit.make()
    network = copy.deepcopy(alone)
    step = parallel(network, habit.settings)
    found = []
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.05) for n in (alone, network)]
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        for one in (alone, network):
            habit.between(getattr(one, "network", one), number)
        losses = [loss_of(step(x, y)), loss_of(alone(x, y))]
        for optimizer, loss in zip(optimizers, losses[::-1], strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(abs(losses[0].item() - losses[1].item()))
    for name, buffer in alone.named_buffers():
        found.append((dict(network.named_buffers())[name] - buffer).abs().max().item())
    last = getattr(alone, "last", None)
    if last is not None:
        found.append((network.last - last).abs().max().item())
    return found


results = {}
for name in sys.argv[2:] or filter(is_asked, HABITS):
    try:
        mine: Any = differences(HABITS[name])
    except Exception:
        mine = traceback.format_exc()
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, mine)
    results[name] = everyone
if get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(results))
release()
