"""What tells one call of a parallel network from another: a call of a new kind is captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from msrun.runtime.graph.plain_tensors import plain_tensors
from msrun.runtime.parallel.batch.parts import find_tensors


def describe_batch(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the shapes of a call's tensors in words, for messages."""
    shapes = ["x".join(map(str, tensor.shape)) or "scalar" for tensor in find_tensors(args, kwargs)]
    return f"a batch of {', '.join(shapes) or 'nothing'}"


def flags_of(root: nn.Module) -> tuple[bool, ...]:
    """Return what may change between calls: training of every module, requires_grad of every parameter.

    Walks the tables itself: it runs in every step, and `named_parameters` builds names and looks for doubles.
    """
    flags: list[bool] = []
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = [root]
    for module in waiting:  # which grows meanwhile
        if module is None or module in seen:
            continue
        seen.add(module)
        flags.append(module.training)
        if module._parameters:
            with plain_tensors():
                flags += [parameter.requires_grad for parameter in module._parameters.values() if parameter is not None]
        if module._modules:
            waiting += module._modules.values()
    return tuple(flags)


def describe_leaf(leaf: Any) -> Any:
    """Return what of an argument belongs to the kind of a call."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, str | int | float | bool | type(None)) else id(leaf)
