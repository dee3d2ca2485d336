"""Sizes that differ from call to call: torch's symbols while a graph is decided and lowered, and afterwards numbers of
one call that know how they follow from the sizes of any other.

What asks a symbol something (is it even? is it above 8?) gets the answer for the call that is captured, and torch notes
the question: the program is for all sizes with the same answers. What makes a number of it makes the program one for
this number alone. So code that knows nothing of symbols is right, and only costs another capture.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._dynamo.source import TensorPropertySource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

SizesOfCall = Mapping[sympy.Symbol, sympy.Integer]
Place = tuple[int, int]
"""A tensor of a call, and its dimension."""
_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Sizes:
    """The sizes of a call that torch's symbols stand for, and what has to be true of them."""

    def __init__(self, symbols: ShapeEnv | None = None, number_of: Callable[[Any], int] | None = None) -> None:
        """Args:
        number_of: where torch finds a tensor -> which one of the call it is; None: its name is the number.
        """
        self._symbols = symbols or ShapeEnv()
        self._symbol_of: dict[Any, sympy.Symbol] = {
            (number_of(source.base) if number_of else int(source.base.name), source.idx): symbol
            for symbol, sources in self._symbols.var_to_sources.items()
            for source in cast("list[TensorPropertySource]", sources)
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return it as it stays, without torch's own records."""
        symbols = SimpleNamespace(
            var_to_range={symbol: self._symbols.var_to_range[symbol] for symbol in self._symbol_of.values()},
            guards=[SimpleNamespace(expr=guard.expr) for guard in self._symbols.guards],
            replacements=dict(self._symbols.replacements),
        )
        return {"_symbols": symbols, "_symbol_of": self._symbol_of}

    def find(self, shapes: Sequence[Sequence[int]]) -> dict[sympy.Symbol, sympy.Integer]:
        """Return the symbols' values in a call whose tensors have these global shapes."""
        return {symbol: sympy.Integer(shapes[i][dimension]) for (i, dimension), symbol in self._symbol_of.items()}

    def why_not(self, shapes: Sequence[Sequence[int]]) -> str:
        """Return the first condition that a call with these global shapes does not meet; empty when it meets all."""
        found = self.find(shapes)
        least = (symbol >= self._symbols.var_to_range[symbol].lower for symbol in found)
        for condition in (*least, *(guard.expr for guard in self._symbols.guards)):
            if condition.xreplace(found) != sympy.true:
                names = {symbol: sympy.Symbol(f"size[{i}][{d}]") for (i, d), symbol in self._symbol_of.items()}
                return str(condition.xreplace(names))
        return ""

    @property
    def is_free(self) -> bool:
        """Whether some size is not that of one call alone."""
        settled = self._symbols.replacements
        return any(not isinstance(settled.get(s), sympy.Integer) for s in self._symbol_of.values())


def hint(number: Any) -> Any:
    """Return a number, of a symbol the one of the captured call; nothing is noted about it."""
    return number.node.hint if type(number) in (torch.SymInt, torch.SymFloat) else number


def hints(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of the captured call."""
    return tuple(map(hint, shape))


def common_divisor(a: int, b: int) -> int:
    """Return the greatest common divisor; of symbols one of both, where it divides the other."""
    if not type(a) is type(b) is int:
        if a % b == 0:
            return b
        if b % a == 0:
            return a
    return math.gcd(a, b)


class FreeNumber:
    """A number of a local program that is another one in calls of other sizes."""

    expression: sympy.Expr

    @classmethod
    def of(cls, symbol: torch.SymInt | torch.SymFloat) -> Any:
        """Return the number that a symbol has in the captured call; a plain one where it is that in every call."""
        if symbol.node.expr.is_number:
            return hint(symbol)
        made: Any = (FreeInt if isinstance(symbol, torch.SymInt) else FreeFloat)(hint(symbol))
        made.expression = symbol.node.expr
        return made

    def at(self, found: SizesOfCall) -> Any:
        """Return the number for these sizes."""
        value = self.expression.xreplace(found)
        return int(value) if isinstance(self, int) else float(value)


class FreeInt(FreeNumber, int):
    """A whole number."""


class FreeFloat(FreeNumber, float):
    """A number."""


def settle(graph: fx.Graph) -> None:
    """Put numbers of the captured call in the places of symbols, so that what comes later meets none."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    of_the_call = functools.cache(lambda value: _of_the_call(value, mode))  # equal blocks have theirs in common
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(Tensor, of_the_call, node.meta["val"])
        if node.op == "call_function":
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _number)


@contextmanager
def settled(graph: fx.Graph) -> Iterator[None]:
    """Let a graph have numbers of the captured call in the places of symbols for a while: to be priced."""
    before = [(node, node.meta.get("val"), node.args, node.kwargs) for node in graph.nodes]
    settle(graph)
    try:
        yield
    finally:
        for node, value, args, kwargs in before:
            node.args, node.kwargs = args, kwargs
            if "val" in node.meta:
                node.meta["val"] = value


def _of_the_call(value: Tensor, mode: FakeTensorMode) -> Tensor:
    if not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return value
    with mode:
        made = torch.empty_strided(hints(value.shape), hints(value.stride()), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def _number(value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return FreeNumber.of(value)
    if isinstance(value, (*_PLAIN, fx.Node)) or type(value).__module__.startswith("msrun.runtime.sharding"):
        return value
    raise TypeError(f"{type(value).__name__} in a local program")
