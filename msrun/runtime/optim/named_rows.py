"""Which optimizers change the rows of a sparse gradient alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from msrun.runtime.execute.gradients import coalesced


def changed_rows(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Tensor | None:
    """Return the rows of a parameter that a step with its gradient changes, ascending; None: it may change all.

    A user's own optimizer has `changes_named_rows = True` if it changes the rows of a sparse gradient alone.
    """
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse or not _changes_named_rows(optimizer, group):
        return None
    return coalesced(gradient).indices()[0]


def _changes_named_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    known: tuple[type[Optimizer], ...] = (torch.optim.SparseAdam, torch.optim.Adagrad)
    if not group.get("momentum"):  # its momentum goes on in rows without a gradient
        known = (*known, torch.optim.SGD)
    step = inspect.unwrap(type(optimizer).step)
    return getattr(optimizer, "changes_named_rows", False) or any(step is inspect.unwrap(one.step) for one in known)
