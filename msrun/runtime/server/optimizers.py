"""Optimizers as they travel: a name and settings from the worker, built for one piece of a parameter on a server.

Only optimizers that treat every row by itself can step a piece as they would step the whole.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from msrun.errors import ParallelError
from msrun.runtime import optim

BUILDERS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "LazyAdam": optim.LazyAdam,
    "FTRL": optim.FTRL,
}
"""Name -> the class that steps on a server. Momentum is torch's SGD, too."""


def name_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the name under which servers know an optimizer.

    Raises:
        ParallelError: its step is not one of those that servers do.
    """
    step = inspect.unwrap(type(optimizer).step)
    for name, known in reversed(BUILDERS.items()):  # AdamW is an Adam
        if isinstance(optimizer, known) and step is inspect.unwrap(known.step):
            return name
    raise ParallelError(
        f"{type(optimizer).__name__} cannot step parameters on servers: use Momentum, {', '.join(BUILDERS)} of "
        "msrun.runtime.optim or torch.optim, or keep its parameters on the workers"
    )


def describe_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of an optimizer as JSON has them.

    Raises:
        ParallelError: a setting that is no number, word or tuple of them.
    """
    described = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not _is_plain(value):
            raise ParallelError(
                f"the optimizer's setting {key} is a {type(value).__name__}, which cannot be sent to servers: give a "
                "number"
            )
        described[key] = value
    return described


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def build_optimizer(name: str, piece: Tensor, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of one piece with the worker's settings.

    Raises:
        ParallelError: an unknown name.
    """
    if name not in BUILDERS:
        raise ParallelError(f"optimizer {name!r}: servers know {', '.join(BUILDERS)}")
    build: Any = optim.Adam if name == "Adam" else BUILDERS[name]  # ours knows torch's formula and MindSpore's
    optimizer: torch.optim.Optimizer = build([{**group, "params": [piece]}])
    return optimizer


def steps_rows_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether rows without gradient stay as they are also after a step with a dense gradient."""
    group = optimizer.param_groups[0]
    return isinstance(optimizer, torch.optim.SGD) and not group["momentum"] and not group["weight_decay"]


@torch.no_grad()
def step_rows(optimizer: torch.optim.Optimizer, rows: Tensor, values: Tensor, *, share: float) -> None:
    """Step rows of the piece of an optimizer that `steps_rows_alone`: w = w - lr share g, as torch's SGD.

    torch's sum of a sparse tensor takes five times as long. Afterwards `values` are others.
    """
    group = optimizer.param_groups[0]
    rate = group["lr"] * share * (1 if group["maximize"] else -1)
    group["params"][0].index_add_(0, rows, values.mul_(rate))
