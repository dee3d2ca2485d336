"""Parameters that others stand in for while a context lasts, and the optimizers of this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

from msrun.runtime.nn.random_stream import hand_on_stream

T = TypeVar("T")

_for_now: ContextVar[Mapping[int, nn.Parameter]] = ContextVar("_for_now", default={})  # noqa: B039 - never written
"""id of a parameter -> the one in its place inside `replaced_for_now`"""


def current(parameter: Any) -> Any:
    """Return the object in the place of a parameter: mostly itself."""
    return _for_now.get().get(id(parameter), parameter)


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


def living(kind: type[T]) -> list[T]:
    """Return the objects of a class that there are in this process; it takes a look at every object."""
    objects = gc.get_objects()
    kinds = {id(each) for each in {id(each): each for each in map(type, objects)}.values() if issubclass(each, kind)}
    return [found for found in objects if id(type(found)) in kinds] if kinds else []


def living_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process; it takes a look at every object."""
    # one that stands in for another during a step has a generator of groups, which must not be read here
    return [found for found in living(torch.optim.Optimizer) if isinstance(getattr(found, "param_groups", None), list)]
