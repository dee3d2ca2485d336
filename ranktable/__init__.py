"""Rank tables: the JSON files that list servers, devices and ranks of a training job for MindSpore and HCCL.

    from ranktable import build_table, encode_table, read_table, validate_table, write_table

    table = build_table([("10.0.0.1", 8), ("10.0.0.2", 8)])
    problems = validate_table(table, device_target="cpu")
    write_table("rank_table_16pcs.json", table)

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it for True; importing typing would be most of the cost of this package

if TYPE_CHECKING:
    from ranktable.codec import encode_table
    from ranktable.errors import (
        AmbiguousRankError,
        BuildError,
        GroupNotFoundError,
        HostListError,
        InvalidTableError,
        JsonTextError,
        NotReadyError,
        ProfileError,
        RankNotFoundError,
        RankTableError,
        ReadError,
        UnknownDialectError,
        UnsupportedDialectError,
        WriteError,
    )
    from ranktable.generate import build_table, default_file_name
    from ranktable.model import Cluster, Device, Group, RankTable, Server, SuperPod
    from ranktable.problem import Position, Problem
    from ranktable.reading.read import parse_table, read_table
    from ranktable.sources.hosts import Host, HostList
    from ranktable.validate import Report, validate_file, validate_table
    from ranktable.write import write_table

_HOMES = {
    "codec": ("encode_table",),
    "errors": (
        "AmbiguousRankError",
        "BuildError",
        "GroupNotFoundError",
        "HostListError",
        "InvalidTableError",
        "JsonTextError",
        "NotReadyError",
        "ProfileError",
        "RankNotFoundError",
        "RankTableError",
        "ReadError",
        "UnknownDialectError",
        "UnsupportedDialectError",
        "WriteError",
    ),
    "generate": ("build_table", "default_file_name"),
    "sources.hosts": ("Host", "HostList"),
    "model": ("Cluster", "Device", "Group", "RankTable", "Server", "SuperPod"),
    "problem": ("Position", "Problem"),
    "reading.read": ("parse_table", "read_table"),
    "validate": ("Report", "validate_file", "validate_table"),
    "write": ("write_table",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AmbiguousRankError",
    "BuildError",
    "Cluster",
    "Device",
    "Group",
    "GroupNotFoundError",
    "Host",
    "HostList",
    "HostListError",
    "InvalidTableError",
    "JsonTextError",
    "NotReadyError",
    "Position",
    "Problem",
    "ProfileError",
    "RankNotFoundError",
    "RankTable",
    "RankTableError",
    "ReadError",
    "Report",
    "Server",
    "SuperPod",
    "UnknownDialectError",
    "UnsupportedDialectError",
    "WriteError",
    "build_table",
    "default_file_name",
    "encode_table",
    "parse_table",
    "read_table",
    "validate_file",
    "validate_table",
    "write_table",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ranktable' has no attribute {name!r}")
    value: object = getattr(import_module(f"ranktable.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
