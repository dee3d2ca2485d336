"""Which operators of a captured graph run on the host: those of modules and functions that the user gave a target.

The innermost target counts. A graph says in which modules an operator stands; calls of functions are marked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import fx

from msrun.runtime.capture import marked_calls
from msrun.runtime.capture.marked_calls import calls_of, erase_marks, mark_call, new_number
from msrun.runtime.sharding.operators.rule import find_module, operator_call

HostOrDevice = Literal["cpu", "device"]
TARGET = "msrun_target"
"""Key of a captured node's meta: the target that the user gave it."""
_FUNCTION = "msrun_target_of_function"
"""Key of a captured node's meta: that of the innermost function, and the module that calls it."""
_functions: weakref.WeakValueDictionary[int, TargetedFunction] = weakref.WeakValueDictionary()


class TargetedFunction:
    """A function that the user gave a target."""

    def __init__(self, target: HostOrDevice, function: Callable[..., Any]) -> None:
        self.target, self.function = target, function
        self.number = new_number()
        _functions[self.number] = self


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
        mark.number for node in graph.nodes if (mark := marked_calls.read_mark(node)) and mark.number in _functions
    )
    place = {node: index for index, node in enumerate(graph.nodes)}
    calls = [(number, *call) for number in numbers for call in calls_of(graph, number) if call[0]]
    nodes = list(graph.nodes)
    for number, entering, leaving in sorted(calls, key=lambda call: place[call[1][0]]):  # inner ones later
        around = operator_call(entering[0]).module_path
        for node in nodes[place[entering[0]] : place[leaving[-1]] if leaving else place[entering[-1]]]:
            if node.op == "call_function":
                node.meta[_FUNCTION] = _functions[number].target, around
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
