"""Custom functions: `torch.autograd.Function` and tensor hooks of the network, as operators of the captured graph.

Their backward pass is the user's, so they are not taken apart: the operator runs the forward graph, and its backward
pass the backward graph, both as dynamo traced them.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

HOOK = "tensor hook"
"""Name of what stands for one."""
_numbers = itertools.count()
_functions: weakref.WeakValueDictionary[int, CustomFunction] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class CustomFunction:
    """One call of a function with a backward pass of its own."""

    name: str
    forward: fx.GraphModule
    """inputs -> (results, what the backward pass reads)"""
    backward: fx.GraphModule
    """gradients of the results, then what it reads -> gradients of the inputs, or None"""
    fixed: frozenset[int] = frozenset()
    """results that have no gradient"""
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _functions[self.number] = self

    def __call__(self, *inputs: Any) -> list[Tensor]:
        """Return the results; gradients flow as the function says."""
        return list(_Apply.apply(self, *inputs))

    def __repr__(self) -> str:
        return self.name


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: CustomFunction, *inputs: Any) -> tuple[Tensor, ...]:
        results, kept = function.forward(*inputs)
        results = tuple(r.view_as(r) if any(r is given for given in inputs) else r for r in results)
        ctx.function = function
        ctx.is_tensor = [isinstance(value, Tensor) for value in kept]
        ctx.others = [value for value in kept if not isinstance(value, Tensor)]
        ctx.save_for_backward(*(value for value in kept if isinstance(value, Tensor)))
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i in function.fixed))
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        kept = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        wanted = ctx.function.backward(*gradients, *kept)
        of_inputs = wanted if isinstance(wanted, tuple | list) else (wanted,)
        return (None, *of_inputs)


@torch.library.custom_op("msrun::custom_function", mutates_args=())
def custom_function(inputs: list[Tensor], number: int) -> list[Tensor]:
    """Stand for a custom function in a captured graph."""
    return [result.clone() for result in _functions[number].forward(*inputs)[0]]


@custom_function.register_fake
def _(inputs: list[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(result) for result in _functions[number].forward(*inputs)[0]]


def _no_backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG001
    raise RuntimeError("a captured graph is not run")


custom_function.register_autograd(_no_backward)
OPERATOR = torch.ops.msrun.custom_function.default


def find_function(number: int) -> CustomFunction:
    """Return a function by the number that its operator holds."""
    return _functions[number]


def without_gradient_modes(module: fx.GraphModule) -> fx.GraphModule:
    """Take the switches of the gradient mode out of a body: it runs where no gradients are recorded."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            module.graph.erase_node(node)
    module.recompile()
    return module


def hook_as_function(body: fx.GraphModule, count: int) -> CustomFunction:
    """Return the function whose result is its input and whose gradient passes a tensor hook.

    Args:
        body: gradient, then `count` values that the hook reads -> gradient.
    """
    identity = fx.Graph()
    given = [identity.placeholder(f"given_{index}") for index in range(1 + count)]
    result = identity.call_function(torch.ops.aten.alias.default, (given[0],))
    identity.output(((result,), tuple(given[1:])))
    after = fx.Graph()
    gradient, *read = [after.placeholder(f"given_{index}") for index in range(1 + count)]
    hooked = after.call_module("body", (gradient, *read))
    after.output((hooked, *(None for _ in read)))
    holder = torch.nn.Module()
    holder.body = without_gradient_modes(body)
    return CustomFunction(HOOK, fx.GraphModule(torch.nn.Module(), identity), fx.GraphModule(holder, after))
