"""Operators under MindSpore's names: classes that are made first and called later, and functions."""

from __future__ import annotations

from typing import Any

from msrun.mindspore.jit import constexpr
from msrun.mindspore.missing import missing_name
from msrun.mindspore.ops import collectives, elementwise, higher_order, neural, shapes, state
from msrun.mindspore.ops.collectives import *  # noqa: F403
from msrun.mindspore.ops.higher_order import *  # noqa: F403
from msrun.mindspore.ops.table import Primitive

_tables = (elementwise, shapes, neural, state)
OPERATORS = {name: made for table in _tables for name, made in table.OPERATORS.items()}
"""Name -> class or function, of all tables."""
globals().update(OPERATORS)

__all__ = [*OPERATORS, *collectives.__all__, *higher_order.__all__, "Primitive", "constexpr"]
_primexpr = constexpr


def _get_cache_prim(kind: type[Primitive]) -> type[Primitive]:
    """Return the class: an operator is made in no time here."""
    return kind


def __getattr__(name: str) -> Any:
    raise missing_name("ops", name, __all__)
