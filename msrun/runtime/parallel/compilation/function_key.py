"""FunctionKey: which functions compute the same, so that a closure made anew in every step is captured once.

A step function that defines its forward function inside makes a new function object per step. Two of them are the same
when they have the same code and see the same things: the modules, tensors and other objects by identity, numbers and
words by value. A number that has changed since the capture makes another function, instead of an old value that stays.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from torch import nn

_DEPTH = 3
"""Functions that the function calls, and those that they call, are looked into as far as this."""
_VALUES = (str, bytes, int, float, complex, bool, type(None))


class FunctionKey:
    """What a function computes, as something to look up.

    Keys keep the objects that they were made of, so that no other object can come to have the same identity.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._kept: list[Any] = []
        self._parts = self._describe(function, _DEPTH)
        self._hash = hash(self._parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionKey) and self._parts == other._parts

    def __hash__(self) -> int:
        return self._hash

    def _describe(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _VALUES):
            return (type(value).__name__, value)
        if isinstance(value, types.FunctionType) and depth:
            return self._describe_function(value, depth - 1)
        if isinstance(value, types.MethodType) and depth and not isinstance(value.__self__, nn.Module):
            return (self._describe(value.__self__, 0), self._describe(value.__func__, depth))
        if isinstance(value, partial) and depth:
            given = tuple(self._describe(v, depth - 1) for v in (*value.args, *value.keywords.values()))
            return (self._describe(value.func, depth - 1), given, tuple(value.keywords))
        self._kept.append(value)
        return id(value)

    def _describe_function(self, function: types.FunctionType, depth: int) -> Hashable:
        code = function.__code__
        self._kept.append(code)
        seen: list[Hashable] = [id(code)]
        for cell in function.__closure__ or ():
            try:
                seen.append(self._describe(cell.cell_contents, depth))
            except ValueError:  # a name that has no value yet
                seen.append(None)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            seen.append(self._describe(default, depth))
        # a function of an installed library does not change; the user's own names may
        if "site-packages" not in code.co_filename:
            values = function.__globals__
            seen += [self._describe(values[name], depth) for name in code.co_names if name in values]
        return tuple(seen)
