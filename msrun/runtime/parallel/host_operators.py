"""set_target: modules and functions whose operators run on the host beside those of the device.

MindSpore's `primitive_target`. Captured networks are cut at the borders (`partition.borders`). In one process nothing
is captured: there, on an accelerator, modules and functions are moved at their own borders, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.capture import marked_calls
from msrun.runtime.capture.host_calls import HostOrDevice, TargetedFunction, call_targeted
from msrun.runtime.sharding.operators.rule import find_module
from msrun.runtime.tensors.put_value import put_value

_ATTRIBUTE = "_msrun_target"
_TARGETS: tuple[HostOrDevice, ...] = ("cpu", "device")
_HOST = torch.device("cpu")
Targeted = TypeVar("Targeted", bound=Callable[..., Any])

_device: ContextVar[torch.device | None] = ContextVar("device", default=None)
"""The accelerator of a network that runs without capture; None: everything runs where it is called."""
_refusing: ContextVar[str | None] = ContextVar("refusing", default=None)
"""The mode without capture that is running on several ranks."""


def set_target(module_or_function: Targeted, target: str) -> Targeted:
    """Let the operators of a module or function, and of what it calls, run on the host or on the rank's device.

    Takes effect when AutoParallel captures the network. Values that go from the one to the other are copied once per
    step and direction, and so are their gradients; `plan.explain()` lists them. Parameters that only operators of the
    host read lie in the host's memory, with their gradients and optimizer state. The backward pass of an operator runs
    where its forward pass does. Numbers do not change.

    Args:
        target: "cpu" for the host, "device" for the device inside something on the host; the innermost counts.

    Returns:
        The module itself; for a function one that is called in its place.

    Raises:
        StrategyError: another word, neither module nor function, or (at the first call) a mode without capture.
    """
    if marked_calls.MSRUN_CAPTURING:
        raise marked_calls.NotWhileCapturing(
            "set_target is called while the network runs: call it once, before the first step"
        )
    word = target.lower() if isinstance(target, str) else target
    found = next((known for known in _TARGETS if known == word), None)
    if found is None:
        raise StrategyError(f'set_target(target={target!r}){near_miss(str(word), _TARGETS)}: must be "cpu" or "device"')
    if not callable(module_or_function) or isinstance(module_or_function, type):
        raise StrategyError(f"set_target({module_or_function!r}): a torch module is expected, or a function")
    if isinstance(module_or_function, nn.Module):
        vars(module_or_function)[_ATTRIBUTE] = found
        return module_or_function
    if isinstance(getattr(module_or_function, _ATTRIBUTE, None), TargetedFunction):  # the last target counts
        module_or_function = getattr(module_or_function, _ATTRIBUTE).function
    function = TargetedFunction(found, module_or_function)
    number = function.number

    @functools.wraps(module_or_function)
    def targeted(*args: Any, **kwargs: Any) -> Any:
        return call_targeted(function, number, args, kwargs, _call_uncaptured)

    vars(targeted)[_ATTRIBUTE] = function
    return targeted  # type: ignore[return-value]


def targets_in(root: nn.Module) -> dict[str, HostOrDevice]:
    """Return module path -> target, for every module of a network that has one."""
    return {path: vars(module)[_ATTRIBUTE] for path, module in root.named_modules() if _ATTRIBUTE in vars(module)}


@contextmanager
def refusing_targets(root: nn.Module, mode: str) -> Iterator[None]:
    """Refuse targets where a network runs on several ranks without capture.

    Raises:
        StrategyError: a module has one; inside, a function with one is called.
    """
    for path in targets_in(root):
        _refuse(path or "the network", mode)
    token = _refusing.set(mode)
    try:
        yield
    finally:
        _refusing.reset(token)


def _refuse(what: str, mode: str) -> None:
    raise StrategyError(
        f'set_target of {what} with parallel_mode="{mode}", which cuts no graph: use parallel_mode="semi_auto"'
    )


@contextmanager
def moved_at_borders(root: nn.Module) -> Iterator[None]:
    """Let modules and functions with a target run there for as long as the context lasts: without capture."""
    device = world.device()
    if device.type == "cpu":
        yield
        return
    targets = targets_in(root)
    _move_parameters(root, targets, device)
    own = [(module, vars(module).get("forward")) for module in map(root.get_submodule, targets)]
    for (module, _), target in zip(own, targets.values(), strict=True):
        vars(module)["forward"] = partial(_call_on, _memory(target, device), module.forward)
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)
        for module, forward in own:
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


def _move_parameters(root: nn.Module, targets: dict[str, HostOrDevice], device: torch.device) -> None:
    for path, module in root.named_modules():
        found = find_module(path, targets)
        if found is None:
            continue
        memory = _memory(targets[found], device)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.device.type != memory.type:
                put_value(tensor, tensor.detach().to(memory))


def _call_uncaptured(function: TargetedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device, mode = _device.get(), _refusing.get()
    if mode is not None:
        _refuse(getattr(function.function, "__name__", "a function"), mode)
    if device is None:
        return function.function(*args, **kwargs)
    return _call_on(_memory(function.target, device), function.function, *args, **kwargs)


def _memory(target: HostOrDevice, device: torch.device) -> torch.device:
    return _HOST if target == "cpu" else device


def _call_on(memory: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function on tensors in one memory; its results go back to where its arguments came from."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    around = given[0].device if given else _device.get()
    args, kwargs = _moved((args, kwargs), memory)
    return _moved(function(*args, **kwargs), around)


def _moved(values: Any, memory: torch.device | None) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(memory), values)
