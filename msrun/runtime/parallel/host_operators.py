"""set_target: modules and functions whose operators run on the host beside those of the device.

MindSpore's `primitive_target`. Captured networks are cut at the borders (`partition.borders`). In one process nothing
is captured: there, on an accelerator, modules and functions are moved at their own borders, one after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.capture import marked_calls
from msrun.runtime.capture.marked_calls import (
    TARGET,
    HostOrDevice,
    TargetedFunction,
    call_targeted,
)
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.partition.borders import find_readers
from msrun.runtime.partition.events import LocalValues, tell
from msrun.runtime.partition.program import MODULE_PATH, ORIGIN, LocalProgram
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.rule import apply_collective, find_module
from msrun.runtime.tensors.plain_tensors import put_value

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
    """Refuse targets where a network runs on several ranks without capture."""
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


MB = 2**20
Names = frozenset[str]
"""Of captured operators."""


@dataclass(frozen=True)
class DeviceLimit:
    """What `AutoParallel.device_memory_limit` asks for."""

    limit_mb: float
    optimizer_states: int = 2

    def __post_init__(self) -> None:
        is_number = isinstance(self.limit_mb, int | float) and not isinstance(self.limit_mb, bool)
        if not is_number or not self.limit_mb > 0:
            raise StrategyError(f"device_memory_limit({self.limit_mb!r}): must be a number of MB above 0")
        if not isinstance(self.optimizer_states, int) or self.optimizer_states < 0:
            raise StrategyError(
                f"device_memory_limit(optimizer_states={self.optimizer_states!r}): must be a whole number, 0 or more"
            )

    def bytes_of(self, item: PlacedParameter, mesh: Mesh) -> int:
        """Return what a parameter takes on this rank: its part, what is gathered of it, gradient, optimizer state."""
        size = item.parameter.element_size()
        placed = item.placement
        part = math.prod(placed.stored.local_shape(mesh, placed.shape)) * size
        used = math.prod(placed.used.local_shape(mesh, placed.shape)) * size
        gathered = used if placed.shard_axes else 0
        return part + gathered + (used + part * self.optimizer_states if item.parameter.requires_grad else 0)


@dataclass(frozen=True)
class _Candidate:
    """Operators that move together, for they share parameters."""

    operators: Names
    saved: int
    """Bytes of the device."""
    copied: int
    """Bytes that a step copies in both directions when these operators alone are moved."""

    @property
    def worth(self) -> float:
        return self.saved / self.copied if self.copied else math.inf


def keep_host_operators(program: LocalProgram, stored: Mapping[str, bool]) -> tuple[Names, str]:
    """Return the operators that read parameters which an earlier call has moved, and one line about them."""
    found = [find_readers(use.node) for name, use in program.parameters.items() if stored.get(name)]
    moved = frozenset(node.meta[ORIGIN].name for nodes in found for node in nodes if ORIGIN in node.meta)
    return moved, f"device_memory_limit: as in the first call, on the host: {_modules(program, moved) or 'nothing'}"


def choose_host_operators(
    program: LocalProgram,
    limit: DeviceLimit,
    sizes: Mapping[str, int],
    device_bytes: Callable[[Names], int],
) -> tuple[Names, str]:
    """Return the fewest operators, the cheapest first, that make a step fit, and one line about them.

    Args:
        program: before its operators are placed.
        sizes: parameter -> bytes that it takes on the device, with its gradient and optimizer state.
        device_bytes: bytes on the device with these operators on the host besides those of the user.
    """
    most, whole = limit.limit_mb * MB, device_bytes(frozenset())
    if whole <= most:
        return frozenset(), f"device_memory_limit: {_size(whole)} of {_size(most)}; nothing is moved"
    ranked = sorted(_candidates(program, sizes), key=lambda candidate: -candidate.worth)

    def chosen(count: int) -> Names:
        return frozenset(name for candidate in ranked[:count] for name in candidate.operators)

    too_few, enough = 0, len(ranked)
    least = device_bytes(chosen(enough))
    if least > most:
        raise StrategyError(
            f"device_memory_limit({limit.limit_mb:g}): a step needs {_size(whole)} of the device, and {_size(least)} "
            f"with every operator that has parameters on the host: {_size(least - most)} are missing; give more, cut "
            "parameters with hsdp(), or recompute modules"
        )
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if device_bytes(chosen(middle)) <= most:
            enough = middle
        else:
            too_few = middle
    moved = chosen(enough)
    sizes_text = f"{_size(device_bytes(moved))} instead of {_size(whole)}"
    return moved, f"device_memory_limit: {sizes_text} of the device; on the host: {_modules(program, moved)}"


def _size(size: float) -> str:
    return f"{size / MB:.2f} MB" if size >= MB else f"{size / 1024:.1f} KB"


def _modules(program: LocalProgram, operators: Names) -> str:
    nodes = [n for n in program.graph.nodes if ORIGIN in n.meta and n.meta[ORIGIN].name in operators]
    return ", ".join(dict.fromkeys(user_name(n.meta.get(MODULE_PATH, "")) or str(n.target) for n in nodes))


def _candidates(program: LocalProgram, sizes: Mapping[str, int]) -> list[_Candidate]:
    """Return what can be moved; operators with a target of the user's stay."""
    groups: list[tuple[set[str], int]] = []
    for name, use in program.parameters.items():
        readers = find_readers(use.node)
        if not readers or any(ORIGIN not in node.meta or TARGET in node.meta[ORIGIN].meta for node in readers):
            continue
        operators, saved = {node.meta[ORIGIN].name for node in readers}, sizes[name]
        for other in [group for group in groups if group[0] & operators]:
            groups.remove(other)
            operators, saved = operators | other[0], saved + other[1]
        groups.append((operators, saved))
    values = tell(program).values
    given = {use.node for use in program.parameters.values()}
    return [
        _Candidate(frozenset(operators), saved, _copied(program, operators, values, given))
        for operators, saved in groups
    ]


def _copied(program: LocalProgram, operators: Collection[str], values: LocalValues, given: Collection[fx.Node]) -> int:
    """Return the bytes that cross the borders around operators in a step."""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and node.target is not apply_collective]
    inside = {node for node in calls if ORIGIN in node.meta and node.meta[ORIGIN].name in operators}
    read = {value for node in inside for value in node.all_input_nodes if _source(value) not in inside | {*given}}
    results: Sequence[Any] = program.outputs
    outside = {n for node in calls if node not in inside for n in node.all_input_nodes}
    outside |= {n for n in results if isinstance(n, fx.Node)}
    written = {_source(value) for value in outside} & inside
    crossing = [values[value] for value in (*read, *written) if value in values]
    return sum(value.nbytes * (2 if value.requires_grad else 1) for value in crossing)


def _source(value: fx.Node) -> fx.Node:
    """Return what collectives were made of."""
    while value.target is apply_collective:
        value = value.all_input_nodes[0]
    return value
