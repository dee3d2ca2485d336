"""Rule for custom functions of the network: autograd Functions and tensor hooks.

A function that works value by value, forward and backward, is cut like any such operator. What another one does with
its dimensions nobody knows: every rank runs all of it, unless the user gives it a strategy, which is the promise that
it works on parts as it does on the whole.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from msrun.errors import StrategyError
from msrun.runtime.sharding.operators.elementwise import is_elementwise
from msrun.runtime.sharding.operators.rule import (
    STRATEGY,
    Form,
    Labels,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    sizes_of,
    stand_in,
)

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


def _shape(inputs: list[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(result) for result in _functions[number].forward(*inputs)[0]]


OPERATOR = stand_in("msrun::custom_function", _shape)


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


_KINDS = "value_by_value"


def apply_function(*inputs: Tensor, number: int) -> list[Tensor]:
    """Run a custom function, as an operator of a local graph."""
    return find_function(number)(*inputs)


class Custom(Rule):
    """A custom function: value by value, whole, or cut as the user says."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return aligned labels for what may be cut; else none."""
        given, made = call.shapes, call.output_shapes
        may_cut = STRATEGY in call.node.meta or _works_value_by_value(call)
        if not may_cut:
            return Form(
                tuple((None,) * len(shape) for shape in given),
                (None,) * len(made[0]),
                {},
                others=tuple((None,) * len(shape) for shape in made[1:]),
            )
        shape = made[0]
        labels = dimension_labels("d", len(shape))

        def aligned(other: tuple[int, ...]) -> Labels:
            offset = len(shape) - len(other)
            return tuple(
                labels[offset + i] if offset + i >= 0 and size == shape[offset + i] else None
                for i, size in enumerate(other)
            )

        return Form(tuple(map(aligned, given)), labels, sizes_of((labels, shape)), others=tuple(map(aligned, made[1:])))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Add the function on local inputs."""
        number = call.node.args[1]
        if STRATEGY in call.node.meta and any(split.values()):
            shapes = [
                form.layout(labels, split).local_shape(build.mesh, shape)
                for labels, shape in zip(form.inputs, call.shapes, strict=True)
            ]
            wanted = form.layout(form.output, split).local_shape(build.mesh, call.output_shape)
            _check_parts(find_function(number), call, shapes, wanted)  # type: ignore[arg-type]
        return build.call(apply_function, *inputs, number=number)


def _works_value_by_value(call: OperatorCall) -> bool:
    """Return whether all operators of both bodies work value by value on tensors of one shape."""
    if _KINDS not in call.node.meta:
        call.node.meta[_KINDS] = _find_out(call)
    found: bool = call.node.meta[_KINDS]
    return found


def _find_out(call: OperatorCall) -> bool:
    shapes = {*call.shapes, *call.output_shapes}
    if len(shapes) != 1:
        return False
    function = find_function(call.node.args[1])  # type: ignore[arg-type]
    given = [tensor.meta["val"] for tensor in call.tensors]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        fakes = [mode.from_tensor(value.detach(), static_shapes=True) for value in given]
        with mode:
            results, kept = function.forward(*fakes)
            gradients = [torch.empty_like(result) for result in results]
            bodies = [(function.forward, fakes), (function.backward, [*gradients, *kept])]
            return all(_is_value_by_value(body, inputs, *shapes) for body, inputs in bodies)


def _is_value_by_value(body: fx.GraphModule, inputs: Sequence[Any], shape: tuple[int, ...]) -> bool:
    if not all(isinstance(value, Tensor) and tuple(value.shape) == shape for value in inputs):
        return False
    graph = make_fx(lambda *values: torch.utils._pytree.tree_leaves(body(*values)))(*inputs).graph
    return all(
        node.op in ("placeholder", "output")
        or (node.op == "call_function" and is_elementwise(node.target) and tuple(node.meta["val"].shape) == shape)
        for node in graph.nodes
    )


def _check_parts(
    function: CustomFunction, call: OperatorCall, shapes: Sequence[tuple[int, ...]], wanted: tuple[int, ...]
) -> None:
    given = [tensor.meta["val"] for tensor in call.tensors]
    try:
        with FakeTensorMode(), torch.enable_grad():
            parts = [
                torch.empty(shape, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)
                for value, shape in zip(given, shapes, strict=True)
            ]
            results = function(*parts)
            made = tuple(results[0].shape)
            if any(result.requires_grad for result in results):
                sum(result.sum() for result in results if result.requires_grad).backward()  # type: ignore[union-attr]
    except Exception as error:
        raise StrategyError(
            f"{function} does not run on parts of shapes {list(map(list, shapes))}: {str(error).splitlines()[0]}; "
            "leave it whole, or write it without fixed sizes"
        ) from error
    if made != wanted:
        raise StrategyError(
            f"{function} makes {list(made)} of parts of shapes {list(map(list, shapes))}, not {list(wanted)} as its "
            "strategy says: leave it whole"
        )


RULES = [(Custom(), [OPERATOR])]
