"""Optimizers of cut parameters: their state is cut too, and those that look at all of them as one get wholes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.optimizer import _foreach_supported_types as _types_of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _types_of_foreach

from msrun.errors import StrategyError
from msrun.runtime.optim import FTRL, AdamWeightDecay
from msrun.runtime.optim.host_steps import LOOK_AT_WHOLES, find_offload, stand_in_with_wholes
from msrun.runtime.parts.part import Part, PartParameter, ShardedParameter, as_dtensor, lying_as, part_of
from msrun.runtime.tensors.plain_tensors import plain, plain_tensors

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
    AdamWeightDecay,
    torch.optim.SparseAdam,
    FTRL,
)
"""Their steps are right on parts, so they run without asking `Part` about every operation."""
_settled: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""optimizer -> how many parts it trained when its state was last looked at; _LOADED: its state came in since"""
_LOADED = -1


@functools.cache
def watch_optimizers() -> None:
    """Look at every optimizer before its steps from now on; once in a process."""
    register_optimizer_step_pre_hook(_before_step)
    for known in (_types_of_optimizers, _types_of_foreach):
        known += [Part, PartParameter, ShardedParameter]  # else torch leaves its fast ways for many tensors at once


def step_parameters(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Step some of an optimizer's parameters, past the hooks that users and schedulers have put around its step."""
    settle(optimizer)
    chosen = {id(parameter) for parameter in parameters}
    groups = (
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in chosen]}
        for group in optimizer.param_groups
    )
    some: Optimizer = object.__new__(type(optimizer))
    vars(some).update(vars(optimizer), param_groups=[group for group in groups if group["params"]])
    step = inspect.unwrap(type(optimizer).step)
    host = find_offload(optimizer)
    if host is not None:
        some, chosen_ones = host.stand_in(some, optimizer), some
    elif isinstance(optimizer, LOOK_AT_WHOLES):
        some = stand_in_with_wholes(some)
    with plain_tensors() if step in _elementwise_steps() else contextlib.nullcontext():
        step(some)
    if host is not None:
        host.finish(chosen_ones, some)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    settle(optimizer)
    may_be_cut = len(args) > 1 or kwargs  # by a closure whose call is AutoParallel's first
    if isinstance(optimizer, LOOK_AT_WHOLES) and (may_be_cut or _parts_of(optimizer)):
        return (stand_in_with_wholes(optimizer), *args[1:]), kwargs
    return None


_OF_STEPS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that is one number, whatever the parameter's shape."""


def settle(optimizer: Optimizer) -> None:
    """Cut what an optimizer keeps of parameters that were whole when it was made, loaded or stepped first."""
    parts = _parts_of(optimizer)
    before = _settled.get(optimizer)
    if before == len(parts) and (not parts or inspect.unwrap(type(optimizer).step) in _elementwise_steps()):
        return
    _refuse_deferred(optimizer)
    if not parts:
        _settled[optimizer] = 0
        return
    for part in parts:
        state = optimizer.state.get(part, {})
        placed = part.placement
        for key, value in state.items():
            is_whole = type(value) is Tensor and tuple(value.shape) == placed.shape
            is_number = is_whole and value.dim() == 0
            if isinstance(value, DTensor):
                state[key] = lying_as(part, part_of(value, placed))
            elif is_whole and key not in _OF_STEPS and (is_number or placed.is_cut):
                state[key] = lying_as(part, part_of(value, placed).clone())
    if not before:  # its first parts
        optimizer.register_state_dict_pre_hook(settle)
        optimizer.register_state_dict_post_hook(_hand_out)
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


def _hand_out(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Put DTensors in the place of parts in an optimizer's state dict, whose values are the live state's own.

    Of a parameter that other stages of a pipeline hold, this rank has no state.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[Any, Any] = {}
    for number, values in state_dict["state"].items():
        placed = parameters[number].placement if isinstance(parameters[number], Part) else None
        if placed is None:
            state[number] = values
        elif placed.is_held:
            state[number] = {
                key: as_dtensor(value, placed, is_everywhere=False)
                if isinstance(value, Tensor) and value.dim() and tuple(plain(value).shape) == placed.local_shape
                else value
                for key, value in values.items()
            }
    return {**state_dict, "state": state}


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
