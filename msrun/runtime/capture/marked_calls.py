"""Marks: where calls of interest begin and end in a captured graph.

Every tensor that enters such a call, and every tensor that leaves it, passes a mark: an operator that computes
nothing. Calls of modules and functions that the user gave a strategy are marked (regions), and calls of wrappers that
divide the batch. A graph keeps no note of plain function calls, but it keeps operators and their order.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from msrun.runtime.capture import marked_calls
from msrun.runtime.sharding.operators.rule import find_module, operator_call
from msrun.runtime.sharding.strategies import OperatorStrategy

TOP = "(top)"
"""Name of the module that is captured."""
MSRUN_CAPTURING = False
"""True while a network is captured."""


class NotWhileCapturing(RuntimeError):
    """Something is called in a captured network that is for outside; a CaptureError with the user's line tells of it.

    Dynamo traces the code that raises it, which an exception with a constructor of its own would end.
    """


@dataclass
class MarkedCall:
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
    """A mark of the captured graph: tensor `index` of the `count` that enter or leave a call."""

    number: int
    """While capturing, that of the marked module or function; afterwards of the call."""
    index: int
    count: int
    leaves: bool


@torch.library.custom_op("msrun::mark", mutates_args=())
def _mark_operator(x: Tensor, number: int, index: int, count: int, leaves: bool) -> Tensor:  # noqa: ARG001
    return x.clone()


@_mark_operator.register_fake
def _(x: Tensor, number: int, index: int, count: int, leaves: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: ARG001
    return gradient, None, None, None, None


_mark_operator.register_autograd(_backward)
MARK = torch.ops.msrun.mark.default
"""In the captured graph, a view of all of what it marks."""
_numbers = itertools.count()
_functions: weakref.WeakValueDictionary[int, MarkedFunction] = weakref.WeakValueDictionary()


def new_number() -> int:
    """Return a number for a module or function whose calls are marked."""
    return next(_numbers)


def read_mark(node: fx.Node) -> Mark | None:
    """Return the mark that a captured node is, if it is one."""
    if node.target is not MARK:
        return None
    return Mark(*node.args[1:])  # type: ignore[arg-type]


def mark(values: Any, number: int, *, leaves: bool) -> Any:
    """Return the same structure with every tensor marked, in order."""
    if isinstance(values, Tensor):  # as most are: dynamo follows every line of tree_flatten
        return MARK(values, number, 0, 1, leaves)
    if type(values) is tuple and not [value for value in values if not isinstance(value, Tensor)]:
        count = len(values)
        return tuple([MARK(values[index], number, index, count, leaves) for index in range(count)])
    flat, spec = pytree.tree_flatten(values)
    count = sum(isinstance(value, Tensor) for value in flat)
    index = 0
    for place, value in enumerate(flat):
        if isinstance(value, Tensor):
            flat[place] = MARK(value, number, index, count, leaves)
            index += 1
    return pytree.tree_unflatten(flat, spec)


def _mark_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> tuple[Any, dict[str, Any]]:
    if not kwargs:
        return mark(args, number, leaves=False), kwargs
    marked: tuple[Any, dict[str, Any]] = mark((args, kwargs), number, leaves=False)
    return marked


class MarkedFunction:
    """A function that the user gave a strategy."""

    def __init__(self, name: str, strategy: OperatorStrategy, function: Callable[..., Any]) -> None:
        self.name, self.strategy, self.function = name, strategy, function
        self.number = new_number()
        _functions[self.number] = self


def call_marked(marked: MarkedFunction, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function; while a network is captured, mark what enters and what leaves."""
    if not MSRUN_CAPTURING:
        return marked.function(*args, **kwargs)
    return mark_call(marked.function, number, args, kwargs)


def mark_call(function: Callable[..., Any], number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, with marks on what enters and what leaves."""
    args, kwargs = _mark_arguments(args, kwargs, number)
    return mark(function(*args, **kwargs), number, leaves=True)


@dataclass
class Marking:
    """A capture that marks calls."""

    names: dict[str, tuple[str, OperatorStrategy]]
    """path -> name and strategy of every marked module"""
    hooks: list[tuple[Mapping[int, Any], Mapping[int, Any]]]
    """the tables of hooks of these modules that marks stand in, and the user's hooks there"""


_OF_MODULE = -1
"""Number of the marks of all modules, and key of their hooks: equal modules differ in nothing."""


def _enter_module(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return _mark_arguments(args, kwargs, _OF_MODULE)


def _leave_module(_module: nn.Module, _args: tuple[Any, ...], result: Any) -> Any:
    return mark(result, _OF_MODULE, leaves=True)


_HOOKS = {"_forward_pre_hooks": _enter_module, "_forward_pre_hooks_with_kwargs": True, "_forward_hooks": _leave_module}
"""Attribute of a module that holds its marks while it is captured -> what stands there."""


@contextlib.contextmanager
def marking(root: nn.Module, strategies: Mapping[str, OperatorStrategy]) -> Iterator[Marking]:
    """Mark the calls of functions, and of the modules of `root` at these paths, that have a strategy."""
    global MSRUN_CAPTURING

    found = find_marked(root, strategies)
    for name in strategies:
        for attribute, hook in _HOOKS.items():
            table = vars(root.get_submodule(name))[attribute]
            table[_OF_MODULE] = hook
            if attribute != "_forward_hooks":  # around those of the user: as its callers see the module
                table.move_to_end(_OF_MODULE, last=False)
    MSRUN_CAPTURING = True
    try:
        yield found
    finally:
        MSRUN_CAPTURING = False
        for table, _ in found.hooks:
            cast("dict[int, Any]", table).pop(_OF_MODULE, None)


def find_marked(root: nn.Module, strategies: Mapping[str, OperatorStrategy]) -> Marking:
    """Return what is marked of the modules of `root` at these paths."""
    paths = {module: path for path, module in root.named_modules()}
    modules = {name: root.get_submodule(name) for name in strategies}
    tables = [vars(module)[attribute] for module in modules.values() for attribute in _HOOKS]
    names = {paths[module]: (name or TOP, strategies[name]) for name, module in modules.items()}
    return Marking(names, [(table, dict(table)) for table in tables])


def number_calls(graph: fx.Graph, names: Mapping[str, tuple[str, OperatorStrategy]]) -> list[MarkedCall]:
    """Return the calls that have a strategy, in order, and write the number of its call on every mark of one.

    Args:
        names: path -> name and strategy of every marked module; functions are known.
    """
    regions: list[MarkedCall] = []
    open_: dict[int | str, tuple[int, bool]] = {}
    """function or module -> its newest call, and whether something has left it"""
    for node in graph.nodes:
        found = read_mark(node)
        if found is None:
            continue
        function = _functions.get(found.number)
        if function is None and found.number != _OF_MODULE:
            continue
        path = operator_call(node).module_path
        key = path if function is None else found.number
        call, has_left = open_.get(key, (-1, True))
        if call < 0 or (has_left and not found.leaves):
            call = len(regions)
            regions.append(MarkedCall(*names[path] if function is None else (function.name, function.strategy)))
        open_[key] = call, found.leaves
        if found.leaves:
            regions[call].outputs = found.count
        else:
            regions[call].inputs = found.count
        node.args = (node.args[0], call, *node.args[2:])
        node.meta[IS_REGION] = True
    return regions


IS_REGION = "msrun_region"
"""Key of a mark's meta: it belongs to a region."""


def read_region_mark(node: fx.Node) -> Mark | None:
    """Return the mark of a region that a captured node is, if it is one."""
    return read_mark(node) if IS_REGION in node.meta else None


def skip_marks(node: fx.Node) -> fx.Node:
    """Return what a value is apart from marks."""
    while node.target is MARK:
        node = node.args[0]  # type: ignore[assignment]
    return node


def calls_of(graph: fx.Graph, number: int) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Return the marks that enter and that leave every call with this number, in order: of calls without a strategy."""
    calls: list[tuple[list[fx.Node], list[fx.Node]]] = []
    for node in graph.nodes:
        found = read_mark(node)
        if found is None or IS_REGION in node.meta or found.number != number:
            continue
        if not calls or (calls[-1][1] and not found.leaves):
            calls.append(([], []))
        calls[-1][found.leaves].append(node)
    return calls


def erase_marks(nodes: Sequence[fx.Node]) -> None:
    """Take marks out of a graph."""
    for node in nodes:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)


HostOrDevice = Literal["cpu", "device"]
TARGET = "msrun_target"
"""Key of a captured node's meta: the target that the user gave it."""
_FUNCTION = "msrun_target_of_function"
"""Key of a captured node's meta: that of the innermost function, and the module that calls it."""
_targeted: weakref.WeakValueDictionary[int, TargetedFunction] = weakref.WeakValueDictionary()


class TargetedFunction:
    """A function that the user gave a target."""

    def __init__(self, target: HostOrDevice, function: Callable[..., Any]) -> None:
        self.target, self.function = target, function
        self.number = new_number()
        _targeted[self.number] = self


def call_targeted(
    function: TargetedFunction, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
) -> Any:
    """Call a function; while a network is captured, mark what enters and what leaves.

    Args:
        run: what to call instead where nothing is captured, with the function's arguments after it.
    """
    if not marked_calls.MSRUN_CAPTURING:
        return run(function, args, kwargs)
    return mark_call(function.function, number, args, kwargs)


def note_functions(graph: fx.Graph) -> None:
    """Write on every operator the target of the function that it stands in, and take the marks out."""
    numbers = dict.fromkeys(
        mark.number for node in graph.nodes if (mark := marked_calls.read_mark(node)) and mark.number in _targeted
    )
    place = {node: index for index, node in enumerate(graph.nodes)}
    calls = [(number, *call) for number in numbers for call in calls_of(graph, number) if call[0]]
    nodes = list(graph.nodes)
    for number, entering, leaving in sorted(calls, key=lambda call: place[call[1][0]]):  # inner ones later
        around = operator_call(entering[0]).module_path
        for node in nodes[place[entering[0]] : place[leaving[-1]] if leaving else place[entering[-1]]]:
            if node.op == "call_function":
                node.meta[_FUNCTION] = _targeted[number].target, around
    for _, entering, leaving in calls:
        erase_marks([*entering, *leaving])


def assign_targets(graph: fx.Graph, modules: Mapping[str, HostOrDevice]) -> set[str]:
    """Write its target on every operator that has one; returns the modules of which the graph calls something.

    Args:
        modules: module path -> its target.
    """
    called = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        own = operator_call(node).module_path
        called |= {path for path in modules if find_module(own, {path}) is not None}
        path = find_module(own, modules)
        target = None if path is None else modules[path]
        if _FUNCTION in node.meta:
            of_function, around = node.meta[_FUNCTION]
            if path is None or find_module(around, {path}) is not None:  # the module is around the function
                target = of_function
        if target is not None:
            node.meta[TARGET] = target
    return called
