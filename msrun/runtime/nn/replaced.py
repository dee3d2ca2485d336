"""Parameters that other objects have taken the place of: optimizers made before follow by themselves.

torch's FSDP2 gives a module new parameter objects (DTensors). An optimizer that holds the old ones would train nobody:
it gets the new ones, at once or at its next step, and its state, if it has any, is cut like them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.runtime.nn.random_stream import hand_on_stream

T = TypeVar("T")

_new_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""old parameter -> the one in its place"""
_for_now: ContextVar[Mapping[int, nn.Parameter]] = ContextVar("_for_now", default={})  # noqa: B039 - never written
"""id of a parameter -> the one in its place inside `replaced_for_now`"""


def stand_for(shown: nn.Parameter, meant: nn.Parameter) -> None:
    """Let optimizers that hold `shown` train `meant`."""
    _follow_at_steps()
    _new_of[shown] = meant


def replace_parameter(old: nn.Parameter, new: nn.Parameter) -> None:
    """Note that `new` has taken the place of `old`, and give the memory of `old` back."""
    stand_for(old, new)
    hand_on_stream(old, new)
    old.data = old.data.new_empty(0)  # nobody must read, or keep in memory, what is trained no more


@functools.cache
def _follow_at_steps() -> None:
    """Let every optimizer follow from now on; once in a process."""
    register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: follow(optimizer))


def current(parameter: Any) -> Any:
    """Return the object in the place of a parameter: mostly itself."""
    found = _new_of.get(parameter) if len(_new_of) else None
    found = parameter if found is None else found
    return _for_now.get().get(id(found), found)


@contextmanager
def replaced_for_now(root: nn.Module, values: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Put other parameter objects into the modules of a network for as long as the context lasts.

    Args:
        values: id of a parameter -> the one in its place.
    """
    named = ((module, name, old) for module in root.modules() for name, old in module._parameters.items())
    slots = [(module, name, old) for module, name, old in named if old is not None and id(old) in values]
    token = _for_now.set(values)
    try:
        for module, name, old in slots:
            module._parameters[name] = values[id(old)]
            hand_on_stream(old, values[id(old)])
        yield
    finally:
        for module, name, old in slots:
            module._parameters[name] = old
        _for_now.reset(token)


def follow_now() -> None:
    """Let the optimizers that are there follow, so that their `zero_grad` and groups are right before a first step."""
    for found in living_optimizers():
        follow(found)


def living(kind: type[T]) -> list[T]:
    """Return the objects of a class that there are in this process; it takes a look at every object."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def living_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process; it takes a look at every object."""
    # one that stands in for another during a step has a generator of groups, which must not be read here
    return [found for found in living(torch.optim.Optimizer) if isinstance(getattr(found, "param_groups", None), list)]


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Put the new parameters in the place of the old ones."""
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            new = current(old)
            if new is not old:
                group["params"][index] = new
                if old in optimizer.state:
                    state = optimizer.state.pop(old)  # stays the same object: a step that is running may hold it
                    state.update({key: _cut_like(value, new) for key, value in state.items()})
                    optimizer.state[new] = state


def _cut_like(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value
