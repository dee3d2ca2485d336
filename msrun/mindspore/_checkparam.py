"""mindspore._checkparam: the checks of arguments that layers in MindSpore's documents call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from msrun.mindspore.ops.table import taking


class Rel:
    """How two numbers stand to each other."""

    EQ, NE, LT, LE, GT, GE = "==", "!=", "<", "<=", ">", ">="
    INC_NEITHER, INC_LEFT, INC_RIGHT, INC_BOTH = "()", "[)", "(]", "[]"


INC_NEITHER, INC_LEFT, INC_RIGHT, INC_BOTH = Rel.INC_NEITHER, Rel.INC_LEFT, Rel.INC_RIGHT, Rel.INC_BOTH


def _named(arg_name: str | None, prim_name: str | None) -> str:
    return (f"For '{prim_name}', " if prim_name else "") + f"'{arg_name or 'the input'}' must be"


def check_value_type(
    arg_name: str, arg_value: Any, valid_types: type | Iterable[type], prim_name: str | None = None
) -> Any:
    """Return a value of one of several types; True is no int.

    Raises:
        TypeError: another type.
    """
    kinds = (valid_types,) if isinstance(valid_types, type) else tuple(valid_types)
    if not isinstance(arg_value, kinds) or (isinstance(arg_value, bool) and bool not in kinds):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{_named(arg_name, prim_name)} of type {names}, not {type(arg_value).__name__}")
    return arg_value


def _checker(name: str, kind: type, rel: str, least: float, what: str) -> Callable[..., Any]:
    """Return a check that a number is of a type, and above a least one, or with `rel` "[)" that one too."""

    def check(arg_value: Any, arg_name: str | None = None, prim_name: str | None = None) -> Any:
        if isinstance(arg_value, bool) or not isinstance(arg_value, (int, kind)):
            raise TypeError(f"{_named(arg_name, prim_name)} a {what}, not {arg_value!r}")
        return check_float_range(arg_value, least, math.inf, rel, arg_name, prim_name)

    check.__name__, check.__doc__ = name, f"Return a {what}."
    return check


check_positive_int = _checker("check_positive_int", int, "()", 0, "whole number above 0")
check_non_negative_int = _checker("check_non_negative_int", int, "[)", 0, "whole number, 0 or more")
check_positive_float = _checker("check_positive_float", float, "()", 0, "number above 0")
check_non_negative_float = _checker("check_non_negative_float", float, "[)", 0, "number, 0 or more")
check_is_int = _checker("check_is_int", int, "()", -math.inf, "whole number")


def check_bool(arg_value: Any, arg_name: str | None = None, prim_name: str | None = None) -> bool:
    """Return True or False."""
    return check_value_type(arg_name or "", arg_value, [bool], prim_name)


def check_string(
    arg_value: Any, valid_values: Iterable[str], arg_name: str | None = None, prim_name: str | None = None
) -> str:
    """Return one of several words."""
    if arg_value not in list(valid_values):
        raise ValueError(f"{_named(arg_name, prim_name)} one of {', '.join(valid_values)}, not {arg_value!r}")
    return arg_value


@partial(taking, "arg_value lower_limit upper_limit rel arg_name=None prim_name=None")
def check_float_range(arg_value: Any, lower_limit: float, upper_limit: float, rel: str, **names: Any) -> float:
    """Return a number between two others; `rel` says which of them it may be."""
    above = lower_limit <= arg_value if rel[0] == "[" else lower_limit < arg_value
    below = arg_value <= upper_limit if rel[1] == "]" else arg_value < upper_limit
    if above and below:
        return arg_value
    limits = f"{rel[0]}{lower_limit}, {upper_limit}{rel[1]}"
    raise ValueError(f"{_named(**names)} in {limits}, not {arg_value!r}")


check_int_range = check_float_range


class Validator:
    """The same as methods, as older scripts call them."""


for _name, _check in list(globals().items()):
    if _name.startswith("check_"):
        setattr(Validator, _name, staticmethod(_check))
