"""Networks whose strategies are searched for, trained beside one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
import transformer_scenarios
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, Degrees, WithLoss, search_degrees, shard
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.execute.transfers import traffic

Found = dict[str, Any]
STEPS = 3
MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation", "auto_parallel", "auto")


class Mlp(nn.Module):
    """A wide layer between small ones: what cuts its weights moves less than what sums their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 512), nn.Linear(512, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(x))).tanh())


class Convolutions(nn.Module):
    """Convolution, batch norm and pooling before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(16 * 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head(torch.relu(self.second(x)).flatten(1))


def _mlp() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return WithLoss(Mlp(), F.cross_entropy), (torch.randn(16, 16), torch.randint(0, 8, (16,)))


def _conv() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return WithLoss(Convolutions(), F.cross_entropy), (torch.randn(8, 3, 8, 8), torch.randint(0, 8, (8,)))


def _transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    size = transformer_scenarios.BATCH, transformer_scenarios.TOKENS
    text = torch.randint(0, transformer_scenarios.VOCABULARY, size)
    return transformer_scenarios.Gpt(0.1, "layer"), (text, text.roll(1, 1))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "mlp": _mlp,
    "conv": _conv,
    "transformer": _transformer,
}


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a network in float64 and a batch, the same in every process."""
    torch.manual_seed(3)
    network, batch = NETWORKS[name]()
    return network.double(), tuple(each.double() if each.is_floating_point() else each for each in batch)


def train(step: nn.Module, batch: tuple[Tensor, ...]) -> list[float]:
    optimizer = torch.optim.Adam(step.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        traffic.reset()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def serial(name: str) -> list[float]:
    """Return the losses of one process: the wrapper draws dropout as the ranks do."""
    network, batch = build(name)
    return train(AutoParallel(network, "stand_alone"), batch)


def searched(name: str, mode: str) -> Found:
    """Train with strategies that are searched for; tell the price beside what was counted."""
    network, batch = build(name)
    step = AutoParallel(network, mode).dataset_strategy("full_batch")
    losses = train(step, batch)
    counted, plan = dict(traffic.bytes), step.plan
    assert plan.traffic is not None and plan.price is not None
    return {
        "losses": losses,
        "right": serial(name),
        "strategies": plan.strategies()["operators"],
        "notes": list(plan.notes),
        "explain": plan.explain(),
        "counted": counted,
        "planned": plan.traffic.bytes,
        "priced": plan.price.traffic_bytes,
        "mode": plan.mode,
    }


def file() -> Found:
    """Save what was searched, load it in another AutoParallel, and give it to a network that it is not of."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    path = Path(folder[0]) / "strategies.json"
    network, batch = build("mlp")
    first = AutoParallel(network, "dynamic_programming").dataset_strategy("full_batch").search("h100")
    losses = train(first.save_operator_strategy_file(path), batch)
    dist.barrier()
    network, batch = build("mlp")
    second = AutoParallel(network).dataset_strategy("full_batch").load_operator_strategy_file(path)
    again = train(second, batch)
    network, batch = build("conv")
    other = AutoParallel(network).dataset_strategy("full_batch").load_operator_strategy_file(path)
    try:
        train(other, batch)
        refused = ""
    except StrategyError as error:
        refused = str(error)
    return {
        "losses": [losses, again],
        "saved": json.loads(path.read_text()),
        "plans": [first.plan.strategies(), second.plan.strategies()],
        "refused": refused,
    }


def honoured(mode: str) -> Found:
    """A strategy of the user's stays, whatever is searched around it."""
    network, batch = build("mlp")
    shard(network.get_submodule("network.down"), ((1, dist.get_world_size()), (1, dist.get_world_size())))
    step = AutoParallel(network, mode).dataset_strategy("full_batch")
    losses = train(step, batch)
    down = next(each for each in step.plan.operators if each.module_path == "down")
    return {"losses": losses, "right": serial("mlp"), "down": [down.strategy, down.origin]}


def fits(limit_mb: float) -> Found:
    """Search within a limit of memory; tell what was done, or the error."""
    network, batch = build("mlp")
    step = (
        AutoParallel(network, "auto").dataset_strategy("full_batch").search(PROFILES["h100"], memory_limit_mb=limit_mb)
    )
    try:
        losses = train(step, batch)
    except StrategyError as error:
        return {"refused": str(error)}
    assert step.plan.price is not None
    return {"losses": losses, "right": serial("mlp"), "memory": step.plan.price.memory_bytes}


def cut_short() -> Found:
    """The last rank has no time to search, the others have enough."""
    network, batch = build("mlp")
    limit_s = 1e-9 if dist.get_rank() == dist.get_world_size() - 1 else 1000.0
    step = AutoParallel(network, "auto").dataset_strategy("full_batch").search(time_limit_s=limit_s)
    losses = train(step, batch)
    return {
        "losses": losses,
        "right": serial("mlp"),
        "operators": step.plan.strategies()["operators"],
        "notes": list(step.plan.notes),
    }


def captured_by_some() -> Found:
    """The last rank's network cannot be captured while the others wait to compare how far they have searched."""
    network, batch = build("mlp")
    if dist.get_rank() == dist.get_world_size() - 1:
        network.get_submodule("network").forward = _reads_values
    try:
        train(AutoParallel(network, "auto").dataset_strategy("full_batch"), batch)
    except CaptureError as error:
        return {"refused": str(error)}
    return {}


def _reads_values(x: Tensor) -> Tensor:
    return x * float(x.sum())


DIVISIONS: dict[str, Callable[[Degrees], bool]] = {
    "fastest": lambda _: True,
    "stages": lambda degrees: degrees.stages > 1,
    "copies": lambda degrees: degrees.copies > 1 and degrees.stages == 1,
    "all": lambda degrees: degrees.stages == 2 and degrees.copies > 1 and degrees.recomputes,
    "optimizer": lambda degrees: degrees.shards_optimizer and degrees.recomputes and degrees.micro_batches > 1,
}
"""Name -> which of the priced divisions of a step are meant."""


def divided(which: str) -> Found:
    """Train with the fastest priced division of a kind."""
    network, batch = build("transformer")
    found = search_degrees(network, *batch, device="h100", time_limit_s=1000.0)
    degrees = next(each.degrees for each in found.priced if DIVISIONS[which](each.degrees))
    step = found.apply(network, degrees)
    return {"losses": train(step, batch), "right": serial("transformer"), "degrees": str(degrees)}


def cases(ranks: int) -> dict[str, Callable[[], Found]]:
    """Return the cases by name."""
    found: dict[str, Callable[[], Found]] = {
        f"{name}/{mode}": (lambda name=name, mode=mode: searched(name, mode)) for name in NETWORKS for mode in MODES
    }
    found |= {"file": file, "cut_short": cut_short, "captured_by_some": captured_by_some}
    found |= {f"divided/{which}": (lambda which=which: divided(which)) for which in DIVISIONS}
    found["honoured"] = lambda: honoured("dynamic_programming")
    return found | {f"limit/{limit}": (lambda limit=limit: fits(limit)) for limit in (1000.0, 0.45, 0.3, 0.01)}
