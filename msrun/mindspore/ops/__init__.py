"""Operators under MindSpore's names: classes that are made first and called later, and functions."""

from __future__ import annotations

from typing import Any

from msrun.mindspore.missing import missing_names
from msrun.mindspore.ops import elementwise, higher_order, neural, shapes, state
from msrun.mindspore.ops.higher_order import *  # noqa: F403
from msrun.mindspore.ops.higher_order import constexpr
from msrun.mindspore.ops.table import Primitive

_tables = (elementwise, shapes, neural, state, higher_order)
OPERATORS = {name: made for table in _tables for name, made in table.OPERATORS.items()}
"""Name -> class or function, of all tables."""
globals().update(OPERATORS)

__all__ = [*OPERATORS, *higher_order.__all__, "Primitive"]
__getattr__ = missing_names("ops", __all__)
_primexpr = constexpr


def _get_cache_prim(kind: type[Primitive]) -> type[Primitive]:
    """Return the class: an operator is made in no time here."""
    return kind
