"""CapturedGraph: a network and one call of it as operators on global shapes; and the target that is captured, also in a
function that closes over modules.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from msrun.errors import CaptureError
from msrun.runtime.capture.assignment import Assignment
from msrun.runtime.capture.dynamo import TracedCall
from msrun.runtime.capture.marked_calls import MarkedCall
from msrun.runtime.sharding.sizes import Sizes


@dataclass(frozen=True)
class Target:
    """What is captured: something to call, and the modules whose parameters it uses."""

    call: Callable[..., Any]
    root: nn.Module
    """Holds the modules; its parameter names are the user's."""


def find_target(function: Callable[..., Any]) -> Target:
    """Return what to capture for a module or for a function that closes over modules."""
    if isinstance(function, nn.Module):
        return Target(function, function)
    modules = _closed_over_modules(function)
    if not modules:
        name = getattr(function, "__qualname__", repr(function))
        raise CaptureError(
            f"{name} uses no torch module by name: give value_and_grad a function that calls the network it trains"
        )
    with_parameters = {name: module for name, module in modules.items() if next(module.parameters(), None) is not None}
    if len(with_parameters) == 1:
        return Target(function, next(iter(with_parameters.values())))
    root = nn.Module()
    for name, module in with_parameters.items():
        root.add_module(name, module)
    return Target(function, root)


def _closed_over_modules(function: Callable[..., Any], depth: int = 3) -> dict[str, nn.Module]:
    """Return the modules that a function's names lead to, through functions it calls as well."""
    found: dict[str, nn.Module] = {}
    owner = getattr(function, "__self__", None)
    values: dict[str, Any] = {}
    if owner is not None and not isinstance(owner, nn.Module):
        values.update(vars(owner) if hasattr(owner, "__dict__") else {})
    elif isinstance(owner, nn.Module):
        values[type(owner).__name__] = owner
    with contextlib.suppress(TypeError):
        names = inspect.getclosurevars(inspect.unwrap(function))
        values.update(names.globals)
        values.update(names.nonlocals)
    for name, value in values.items():
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, nn.Module):
            found.setdefault(name, value)
        elif depth and inspect.isroutine(value) and getattr(value, "__module__", "").partition(".")[0] != "torch":
            for inner, module in _closed_over_modules(value, depth - 1).items():
                found.setdefault(inner, module)
    unique: dict[int, str] = {}
    for name, module in found.items():
        unique.setdefault(id(module), name)
    return {name: found[name] for name in unique.values()}


@dataclass(frozen=True)
class CapturedGraph:
    """One network as operators."""

    graph: fx.Graph
    """aten operators; every node has `meta["val"]` with its global shape and dtype."""
    parameters: dict[str, str]
    """placeholder name -> parameter name"""
    buffers: dict[str, str]
    """placeholder name -> buffer name"""
    constants: dict[str, Tensor]
    """placeholder name -> tensor that the network holds without registering it"""
    inputs: list[str]
    """placeholder names of the user's tensors, in order"""
    outputs: list[fx.Node | Any]
    """what the graph gives back to the call"""
    traced: TracedCall
    """when the graph holds, and the user's Python code around it"""
    placeholders: list[str | None]
    """names of the placeholders in the order in which the call gives their values; None: a value that has none here"""
    stored: frozenset[int] = frozenset()
    """indexes of outputs that the call does not return but stores: whole on every rank"""
    buffer_updates: dict[str, fx.Node] = field(default_factory=dict)
    """buffer name -> its value after the forward pass, of every buffer that the network changes"""
    assigned: dict[int, str] = field(default_factory=dict)
    """index of an output that the call assigns to a buffer -> the buffer's name"""
    assignment: Assignment = field(default_factory=Assignment)
    """what the user's strategies mean, beside what is written on the operators"""
    sizes: list[Sizes] = field(default_factory=list)
    """what has to be true of other sizes than those of the captured call; empty: it is for these alone"""
    regions: list[MarkedCall] = field(default_factory=list)
    """calls that have a strategy of the user"""
