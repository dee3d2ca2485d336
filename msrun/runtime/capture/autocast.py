"""Autocast in a captured graph: every cast that torch.autocast would make is an operator of the graph.

A captured graph holds operators, not the casts that autocast makes inside the dispatcher; operators that the network
itself has put under `torch.autocast` hold a note. Each operator is asked, on fake tensors, what torch's own autocast
does with it: compute in the lower precision, in float32, or as the inputs come. So the rules are torch's, for every
device and version. What torch makes of several operators (`gru`), with casts between them, runs under autocast itself.
A parameter that operators read in the lower precision alone is gathered in it (`ParameterUse.dtype`); the parameter
itself stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.runtime.sharding.operators.rule import IS_CAST

_KEYS = {"npu": "AutocastPrivateUse1"}
"""torch's dispatch key of autocast, where it is not called like the device"""
AUTOCAST_REGION = "autocast_region"
"""node.meta key: dtype of the network's own autocast around an operator, None where it is switched off."""
Policy = Literal["lower", "float32", "widest", "inside", "as it comes"]


def apply_autocast(graph: fx.Graph, parameters: Mapping[str, str], device: str, dtype: torch.dtype | None) -> None:
    """Write the casts of autocast into a captured graph.

    Args:
        parameters: placeholder name -> parameter name.
        device: kind of device that computes; autocast has rules for each.
        dtype: the lower precision of the whole network; None: only where the network says so itself.
    """
    if dtype is None and not any(AUTOCAST_REGION in node.meta for node in graph.nodes):
        return
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        lower = node.meta.get(AUTOCAST_REGION, dtype)
        if lower is not None and isinstance(node.target, torch._ops.OpOverload):
            policy = _policy(node, device, lower)
            if policy == "inside":
                node.target = _under_autocast(node.target, device, lower)
            _cast_inputs(graph, node, _wanted(node, policy, lower), casts)
        node.meta["val"] = _run(node.target, node)
    _fold(graph, parameters)


@functools.cache
def _under_autocast(target: Callable[..., Any], device: str, lower: torch.dtype) -> Callable[..., Any]:
    """Return the operator with the casts that autocast makes between the operators that torch makes of it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, lower):
            return target(*args, **kwargs)

    call.__name__ = call.__qualname__ = str(target).replace(".", "_")
    return call


def _wanted(node: fx.Node, policy: Policy, lower: torch.dtype) -> torch.dtype | None:
    """Return the type in which autocast hands an operator its inputs; None where it leaves them alone."""
    if policy == "lower":
        return lower
    if policy == "float32":
        return torch.float32
    types = {n.meta["val"].dtype for n in node.all_input_nodes if _is_float(n.meta.get("val"))}
    return torch.float32 if policy == "widest" and len(types) > 1 and torch.float64 not in types else None


def _policy(node: fx.Node, device: str, lower: torch.dtype) -> Policy:
    args = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)

    def result(given: torch.dtype, is_on: bool) -> torch.dtype | None:
        of_type = pytree.tree_map_only(Tensor, lambda x: x.to(given) if _is_float(x) else x, args)
        with torch.autocast(device, lower, enabled=is_on):
            return _float_type(_try(target, of_type))

    with torch.no_grad():
        if result(torch.float32, is_on=True) == lower != result(torch.float32, is_on=False):
            return "lower"
        if result(lower, is_on=True) == torch.float32 != result(lower, is_on=False):
            return "float32"
        has_rule = torch._C._dispatch_has_kernel_for_dispatch_key(
            target.name(), _KEYS.get(device, f"Autocast{device.upper()}")
        )
        if not has_rule and _casts_inside(target, args, device, lower):
            return "inside"
        with torch.autocast(device, enabled=False):
            return "widest" if has_rule or _try(target, args) is None else "as it comes"


class _Casts(TorchDispatchMode):
    """Notices whether something is cast to a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.seen = False
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= func is torch.ops.aten._to_copy.default and result.dtype == self._dtype
        return result


def _casts_inside(target: torch._ops.OpOverload, args: Any, device: str, lower: torch.dtype) -> bool:
    """Return whether an operator is made of others, of which autocast casts some."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        return False
    of_float32 = pytree.tree_map_only(Tensor, lambda x: x.float() if _is_float(x) else x, args)
    with torch.autocast(device, lower), _Casts(lower) as casts:
        _try(target, of_float32)
    return casts.seen


def _try(target: Callable[..., Any], args: Any) -> Any:
    try:
        return target(*args[0], **args[1])
    except RuntimeError:  # it does not take inputs of such types
        return None


def _float_type(value: Any) -> torch.dtype | None:
    return next((x.dtype for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()), None)


def _is_float(value: Any) -> bool:
    """Return whether autocast looks at a value: it leaves integers and float64 alone."""
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _cast_inputs(
    graph: fx.Graph,
    node: fx.Node,
    wanted: torch.dtype | None,
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> None:
    if wanted is None:
        return

    def cast(given: fx.Node) -> fx.Node:
        value = given.meta.get("val")
        if not isinstance(value, Tensor) or not _is_float(value) or value.dtype == wanted:
            return given
        if (given, wanted) not in casts:
            with graph.inserting_after(given if given.op != "placeholder" else _last_placeholder(graph)):
                made = graph.call_function(torch.ops.aten.to.dtype, (given, wanted))
            made.meta |= {"val": value.to(wanted), IS_CAST: True}
            casts[given, wanted] = made
        return casts[given, wanted]

    node.args = fx.node.map_arg(node.args, cast)
    node.kwargs = fx.node.map_arg(node.kwargs, cast)


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "placeholder")


def _run(target: Any, node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        return target(*args, **kwargs)


def _fold(graph: fx.Graph, parameters: Mapping[str, str]) -> None:
    """Let a parameter that is only read through casts to one type arrive in it; a tied one has several placeholders."""
    placeholders: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in parameters:
            placeholders.setdefault(parameters[node.name], []).append(node)
    for tied in placeholders.values():
        casts = [reader for node in tied for reader in node.users]
        types = {_type_of_cast(reader) for reader in casts}
        if len(types) != 1 or None in types:
            continue
        for node in tied:
            node.meta["val"] = casts[0].meta["val"]
        for cast in casts:
            cast.replace_all_uses_with(cast.all_input_nodes[0])
            graph.erase_node(cast)


def _type_of_cast(node: fx.Node) -> torch.dtype | None:
    """Return the type that an operator casts to; None when it does anything else."""
    is_cast = node.target is torch.ops.aten.to.dtype and len(node.args) == 2 and not node.kwargs
    return node.meta["val"].dtype if is_cast else None
