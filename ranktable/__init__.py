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
    from ranktable.convert import convert_table as convert_table
    from ranktable.errors import RankTableError as RankTableError
    from ranktable.fix import fix_table as fix_table
    from ranktable.generate import build_table as build_table
    from ranktable.local import check_file as check_file
    from ranktable.merge import merge_tables as merge_tables
    from ranktable.model import Device as Device
    from ranktable.model import RankTable as RankTable
    from ranktable.model import Server as Server
    from ranktable.model import SuperPod as SuperPod
    from ranktable.tables import encode_table as encode_table
    from ranktable.tables import parse_table as parse_table
    from ranktable.tables import read_table as read_table
    from ranktable.tables import write_table as write_table
    from ranktable.validate import validate_file as validate_file
    from ranktable.validate import validate_table as validate_table

_HOMES = {
    "convert": "convert_table",
    "errors": "RankTableError",
    "fix": "fix_table",
    "generate": "build_table",
    "local": "check_file",
    "merge": "merge_tables",
    "model": "Device RankTable Server SuperPod",
    "tables": "encode_table parse_table read_table write_table",
    "validate": "validate_file validate_table",
}
"""The module of each exported name."""
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ranktable' has no attribute {name!r}")
    value: object = getattr(import_module(f"ranktable.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
