"""What a dialect can do, and where each dialect's module is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from ranktable.codec.schema import Schema
from ranktable.model import RankTable
from ranktable.problem import Problem
from ranktable.survey import Survey

_MODULES = {
    **dict.fromkeys(("1.0", "1.2", "volcano-job", "volcano-global", "cross-cluster"), "server_list"),
    "mindie-global": "mindie_global",
    "template2-cloud": "template2_cloud",
    "template2-lab": "template2_lab",
    **dict.fromkeys(("1.1", "1.1-offline"), "server_list"),
    "2.0": "v2_0",
}
"""Module of each dialect that can be read and written; its `CODECS` has it. Loaded when it is first asked for."""


@dataclass(frozen=True, slots=True)
class Codec:
    """The schema of a dialect and its four functions."""

    schema: Schema
    """What its top consists of, and everything below it."""
    check_structure: Callable[[Mapping[str, object]], list[Problem]]
    """Every fault that keeps the object from being decoded (errors), and what is odd about its keys (warnings)."""
    survey: Callable[[Mapping[str, object]], Survey]
    """What can be read of the object, however faulty it is."""
    decode: Callable[[Mapping[str, object]], RankTable]
    """The table of an object that `check_structure` finds no error in."""
    encode: Callable[[RankTable], dict[str, object]]
    """The object of a table; decoding it gives an equal table."""


def codec_names() -> tuple[str, ...]:
    """Return the short names of the dialects that have a codec."""
    return tuple(_MODULES)


def codec_of(dialect: str) -> Codec | None:
    """Return the codec of a dialect by its short name, None when it has none."""
    if dialect not in _MODULES:
        return None
    codec: Codec = import_module(f"ranktable.codec.{_MODULES[dialect]}").CODECS[dialect]
    return codec
