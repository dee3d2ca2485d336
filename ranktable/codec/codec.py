"""What a dialect can do, and where each dialect's module is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from ranktable.model import RankTable
from ranktable.problem import Problem
from ranktable.survey import Survey

_MODULES = {
    "1.0": "v1_0",
    "1.2": "v1_2",
    "volcano-job": "volcano_job",
    "volcano-global": "volcano_global",
    "cross-cluster": "cross_cluster",
    "mindie-global": "mindie_global",
}
"""Module of each dialect that can be read and written; it holds a `CODEC`. Loaded when it is first asked for."""


@dataclass(frozen=True, slots=True)
class Codec:
    """The four functions of a dialect; `ranktable.codec.server_list` documents each."""

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
    codec: Codec = import_module(f"ranktable.codec.{_MODULES[dialect]}").CODEC
    return codec
