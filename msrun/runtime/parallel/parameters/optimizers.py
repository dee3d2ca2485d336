"""Optimizers of cut parameters: their state is cut too, and those that look at whole tensors are refused."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.optimizer import _foreach_supported_types as _types_of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _types_of_foreach

from msrun.errors import StrategyError
from msrun.runtime.graph.plain_tensors import plain_tensors
from msrun.runtime.parallel.parameters.part import Part, PartParameter, as_part, describe

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)
"""Their steps are right on parts, so they run without asking `Part` about every operation."""
_OF_WHOLES = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon", "LBFGS", "SparseAdam") if hasattr(torch.optim, name)
)
_settled: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""optimizer -> how many parts it trained when its state was last looked at; _LOADED: its state came in since"""
_LOADED = -1


@functools.cache
def watch_optimizers() -> None:
    """Look at every optimizer before its steps from now on; once in a process."""
    register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: settle(optimizer))
    for known in (_types_of_optimizers, _types_of_foreach):
        known += [Part, PartParameter]  # else torch leaves its fast ways for many tensors at once


def settle(optimizer: Optimizer) -> None:
    """Cut what an optimizer keeps of parameters that were whole when it was made or loaded.

    Raises:
        StrategyError: an optimizer whose step looks at whole tensors.
    """
    parts = _parts_of(optimizer)
    before = _settled.get(optimizer)
    if before == len(parts):
        return
    _refuse_deferred(optimizer)
    if not parts:
        _settled[optimizer] = 0
        return
    if isinstance(optimizer, _OF_WHOLES):
        raise StrategyError(
            f"torch.optim.{type(optimizer).__name__} looks at whole tensors, and of {describe(parts[0].placement)}: "
            "use an element-wise optimizer such as AdamW, or keep its parameters whole (parallel_optimizer = False)"
        )
    for part in parts:
        state = optimizer.state.get(part, {})
        placed = part.placement
        for key, value in state.items():
            is_whole = isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == placed.shape
            if is_whole and not isinstance(value, Part) and placed.shape != placed.local_shape:
                state[key] = as_part(placed.cut(value).clone(), placed)
    if not before:  # its first parts
        optimizer.register_state_dict_pre_hook(_know_parts)
        optimizer.register_load_state_dict_post_hook(_forget)
        if inspect.unwrap(type(optimizer).step) in _elementwise_steps():
            _step_plainly(optimizer)
    _settled[optimizer] = len(parts)


def _refuse_deferred(optimizer: Optimizer) -> None:
    """Refuse state that has no values, because its parameter had none when it was made."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_meta and not parameter.is_meta:
                name = f" of {parameter.placement.name}" if isinstance(parameter, Part) else ""
                raise StrategyError(
                    f"{type(optimizer).__name__} made its state {key}{name} before the parameter had values: make it "
                    "after AutoParallel's first call, or after init_parameters(net)"
                )


def _parts_of(optimizer: Optimizer) -> list[Part]:
    return [value for group in optimizer.param_groups for value in group["params"] if isinstance(value, Part)]


def _know_parts(optimizer: Optimizer) -> None:
    """Let the state know that it is a part, before it leaves in a state dict."""
    settle(optimizer)
    for part in _parts_of(optimizer):
        for value in optimizer.state.get(part, {}).values():
            if type(value) is Tensor and value.dim() > 0 and tuple(value.shape) == part.placement.local_shape:
                as_part(value, part.placement)


def _forget(optimizer: Optimizer) -> None:
    """Look at the state again: what was loaded may be whole."""
    _settled[optimizer] = _LOADED


@functools.cache
def _elementwise_steps() -> frozenset[Callable[..., Any]]:
    return frozenset(inspect.unwrap(kind.step) for kind in _ELEMENTWISE)


def _step_plainly(optimizer: Optimizer) -> None:
    """Let the steps after this one run on plain tensors; a closure, which is the user's code, does not."""
    step = optimizer.step

    @functools.wraps(step)
    def plainly(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return step(*args, **kwargs)
        with plain_tensors():
            return step()

    optimizer.step = types.MethodType(plainly, optimizer)  # type: ignore[method-assign]
