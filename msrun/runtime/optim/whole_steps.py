"""Steps of optimizers that look at whole tensors: Adafactor's means of rows and columns, Muon's orthogonal updates.

Before such a step every cut parameter is made whole, one at a time, with its gradient and its state; the optimizer's
own code does its work, and each rank keeps its part of what came of it. All ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from msrun.runtime.nn.replaced import follow
from msrun.runtime.parts.part import Part
from msrun.runtime.parts.part_functions import as_part
from msrun.runtime.tensors.plain_tensors import local_part

LOOK_AT_WHOLES = tuple(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
"""Optimizers of torch whose steps are run so; those that look at all parameters at once, such as LBFGS, cannot be."""


def stand_in_with_wholes(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer whose groups hold one whole parameter each; to be stepped once, by all ranks together."""
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer), param_groups=_one_at_a_time(optimizer, stand_in))
    return stand_in


def _one_at_a_time(optimizer: torch.optim.Optimizer, stand_in: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    follow(optimizer)  # a closure may have put other parameters in place
    stand_in.state = optimizer.state  # and a hook of the optimizer's own may have loaded other state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or (isinstance(parameter, Part) and not parameter.placement.is_held):
                continue
            if not isinstance(parameter, Part | DTensor):
                yield {**group, "params": [parameter]}
                continue
            whole = nn.Parameter(_whole(parameter).clone(), requires_grad=False)
            whole.grad = _whole(parameter.grad)
            state = {key: _whole(value) for key, value in optimizer.state.get(parameter, {}).items()}
            try:
                optimizer.state[whole] = state
                yield {**group, "params": [whole]}
                local_part(parameter).copy_(local_part(_cut(whole.detach(), parameter)))
                optimizer.state[parameter] = {key: _cut(value, parameter) for key, value in state.items()}
            finally:
                optimizer.state.pop(whole, None)


def _whole(value: Any) -> Any:
    if isinstance(value, Part):
        return value.gather_in_stage()
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _cut(value: Any, parameter: Tensor) -> Any:
    """Return this rank's part of what has the parameter's shape; everything else as it is."""
    if not (isinstance(value, Tensor) and value.dim()):
        return value
    if isinstance(parameter, Part):
        placed = parameter.placement
        return as_part(placed.cut(value).clone(), placed) if tuple(value.shape) == placed.shape else value
    assert isinstance(parameter, DTensor)
    if value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
