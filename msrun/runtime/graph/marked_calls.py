"""Regions: calls of modules and functions that the user gave a strategy, marked while a network is captured.

Every tensor that enters such a call, and every tensor that leaves it, passes a mark: an operator that computes
nothing. What stands between the marks is the region. torch.export keeps no annotation of plain function calls, but it
keeps operators and their order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from msrun.runtime.graph.strategies import OperatorStrategy

TOP = "(top)"
"""Name of the module that is captured."""


@dataclass
class Region:
    """One call that has a strategy."""

    name: str
    """What the user calls it: the module's path, or the function's name."""
    strategy: OperatorStrategy
    inputs: int = 0
    """Tensors that enter."""
    outputs: int = 0
    """Tensors that leave."""


@dataclass(frozen=True)
class Mark:
    """A mark of the captured graph: tensor `index` of those that enter or leave a region."""

    region: int
    index: int
    leaves: bool


@torch.library.custom_op("msrun::mark", mutates_args=())
def _mark_operator(x: Tensor, region: int, index: int, leaves: bool) -> Tensor:  # noqa: ARG001 - its schema
    return x.clone()


@_mark_operator.register_fake
def _(x: Tensor, region: int, index: int, leaves: bool) -> Tensor:  # noqa: ARG001 - its schema
    return torch.empty_like(x)


_MARK = torch.ops.msrun.mark.default
_regions: ContextVar[list[Region] | None] = ContextVar("regions", default=None)
"""The regions of the capture that runs now, in order of their calls."""


def read_mark(node: fx.Node) -> Mark | None:
    """Return the mark that a captured node is, if it is one."""
    if node.target is not _MARK:
        return None
    _, region, index, leaves = node.args
    return Mark(region, index, leaves)  # type: ignore[arg-type]


@contextlib.contextmanager
def recording_regions(root: nn.Module, strategies: Mapping[str, OperatorStrategy]) -> Iterator[list[Region]]:
    """Record the calls of functions, and of the modules of `root` at these paths, that have a strategy."""
    regions: list[Region] = []
    called: list[Region] = []

    def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        called.append(Region(name or TOP, strategies[name]))
        regions.append(called[-1])
        marked: tuple[tuple[Any, ...], dict[str, Any]] = _enter(regions, called[-1], args, kwargs)
        return marked

    def hooks(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return (
            lambda _, args, kwargs: enter(name, args, kwargs),
            lambda _module, _args, result: _leave(regions, called.pop(), result),
        )

    handles = []
    for name in strategies:
        before, after = hooks(name)
        module = root.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    token = _regions.set(regions)
    try:
        yield regions
    finally:
        _regions.reset(token)
        for handle in handles:
            handle.remove()


def call_region(
    name: str, strategy: OperatorStrategy, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a function; while a network is captured, mark what enters and what leaves."""
    regions = _regions.get()
    if regions is None:
        return function(*args, **kwargs)
    region = Region(name, strategy)
    regions.append(region)
    args, kwargs = _enter(regions, region, tuple(args), kwargs)
    return _leave(regions, region, function(*args, **kwargs))


def _enter(regions: list[Region], region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    marked, region.inputs = _marked((args, kwargs), _number(regions, region), leaves=False)
    return marked


def _leave(regions: list[Region], region: Region, result: Any) -> Any:
    marked, region.outputs = _marked(result, _number(regions, region), leaves=True)
    return marked


def _number(regions: list[Region], region: Region) -> int:
    return next(number for number, other in enumerate(regions) if other is region)


def _marked(values: Any, region: int, *, leaves: bool) -> tuple[Any, int]:
    """Return the same structure with every tensor marked, in order, and the number of tensors."""
    flat, spec = pytree.tree_flatten(values)
    index = 0
    for place, value in enumerate(flat):
        if isinstance(value, Tensor):
            flat[place] = _MARK(value, region, index, leaves)
            index += 1
    return pytree.tree_unflatten(flat, spec), index
