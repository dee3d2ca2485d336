"""Rule for custom functions of the network: autograd Functions and tensor hooks.

A function that works value by value, forward and backward, is cut like any such operator. What another one does with
its dimensions nobody knows: every rank runs all of it, unless the user gives it a strategy, which is the promise that
it works on parts as it does on the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from msrun.errors import StrategyError
from msrun.runtime.sharding.operators.custom_function import OPERATOR, CustomFunction, find_function
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
)

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
        """Add the function on local inputs.

        Raises:
            StrategyError: it does not run on parts of the sizes that the strategy gives.
        """
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
