"""The step of a script's optimizer on tensors without values: its time, and what it keeps on device and host."""

from __future__ import annotations

import gc
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime.optim.host_steps import find_offload
from msrun.runtime.optim.host_weights import is_narrow, wide_type
from msrun.runtime.simulate.recording import OPTIMIZER, Recording


@dataclass(frozen=True)
class StateBytes:
    """What an optimizer keeps from step to step."""

    total: int
    """Its state; of one that works on the host (`optim.offload`) with wide copies of weights of 16 bits."""
    on_host: int
    """Of these, those in the host's memory."""
    host_copies: int
    """Beside its state: copies that the host has of weights that are wide enough."""


def find_optimizers(root: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the script has made for parameters of a network."""
    own = {id(parameter) for parameter in root.parameters()}
    alive = [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]
    return [
        optimizer
        for optimizer in alive
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    ]


def step_optimizer(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, Tensor],
    root: nn.Module,
    recording: Recording,
    on_host: frozenset[str],
) -> StateBytes:
    """Step a stand-in of an optimizer, recorded, and return what it keeps.

    Args:
        trained: this rank's parts by name.
        on_host: names of those that lie on the host.

    Raises:
        StrategyError: its step needs values.
    """
    name_of = {id(parameter): name for name, parameter in root.named_parameters()}
    offload = find_offload(optimizer)
    chosen = offload.chosen(optimizer) if offload is not None else set()
    moved = on_host | {name for key, name in name_of.items() if key in chosen}
    stand_ins = {}
    for name, parameter in trained.items():
        dtype = wide_type(parameter) if offload is not None else parameter.dtype
        stand_in = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"))
        stand_in.grad = torch.empty_like(stand_in)
        stand_ins[name] = stand_in
    some: torch.optim.Optimizer = object.__new__(type(optimizer))
    groups = []
    for group in optimizer.param_groups:
        names = [name_of.get(id(parameter)) for parameter in group["params"]]
        groups.append({**group, "params": [stand_ins[name] for name in names if name in stand_ins]})
    vars(some).update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
    step = inspect.unwrap(type(optimizer).step)
    try:
        with torch.no_grad():
            step(some)  # makes the state
            with recording.during(OPTIMIZER), recording.recording():
                step(some)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise StrategyError(
            f"{type(optimizer).__name__}: its step needs values or a closure, which a dry run does not have "
            f"({str(error).splitlines()[0][:120]}); use --sim_level 0"
        ) from error
    total = of_host = copies = 0
    for name, stand_in in stand_ins.items():
        if stand_in not in some.state:
            continue
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(some.state.get(stand_in)))
        wide = stand_in.numel() * stand_in.element_size() if offload is not None and offload.weights.keeps else 0
        if is_narrow(trained[name]):
            nbytes += wide
        elif name in moved:
            copies += wide
        total += nbytes
        of_host += nbytes if name in moved else 0
    return StateBytes(total, of_host, copies)


def _tensors(state: Any) -> Iterable[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, dict) else []
