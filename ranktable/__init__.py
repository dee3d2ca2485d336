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
    from ranktable.convert import Converted as Converted
    from ranktable.convert import convert_table as convert_table
    from ranktable.errors import BuildError as BuildError
    from ranktable.errors import HostListError as HostListError
    from ranktable.errors import InvalidTableError as InvalidTableError
    from ranktable.errors import JsonTextError as JsonTextError
    from ranktable.errors import MergeError as MergeError
    from ranktable.errors import NotReadyError as NotReadyError
    from ranktable.errors import ProfileError as ProfileError
    from ranktable.errors import RankNotFoundError as RankNotFoundError
    from ranktable.errors import RankTableError as RankTableError
    from ranktable.errors import ReadError as ReadError
    from ranktable.errors import SourceError as SourceError
    from ranktable.errors import UnknownDialectError as UnknownDialectError
    from ranktable.errors import UnsupportedDialectError as UnsupportedDialectError
    from ranktable.errors import WriteError as WriteError
    from ranktable.fix import Fixed as Fixed
    from ranktable.fix import fix_table as fix_table
    from ranktable.generate import build_table as build_table
    from ranktable.generate import default_file_name as default_file_name
    from ranktable.local import check_file as check_file
    from ranktable.merge import Edited as Edited
    from ranktable.merge import merge_tables as merge_tables
    from ranktable.model import Device as Device
    from ranktable.model import RankTable as RankTable
    from ranktable.model import Server as Server
    from ranktable.model import SuperPod as SuperPod
    from ranktable.problem import Problem as Problem
    from ranktable.tables import encode_table as encode_table
    from ranktable.tables import parse_table as parse_table
    from ranktable.tables import read_table as read_table
    from ranktable.tables import write_table as write_table
    from ranktable.validate import Report as Report
    from ranktable.validate import validate_file as validate_file
    from ranktable.validate import validate_table as validate_table

_HOMES = {
    "convert": "Converted convert_table",
    "errors": (
        "BuildError HostListError InvalidTableError JsonTextError MergeError NotReadyError ProfileError "
        "RankNotFoundError RankTableError ReadError SourceError UnknownDialectError UnsupportedDialectError WriteError"
    ),
    "fix": "Fixed fix_table",
    "generate": "build_table default_file_name",
    "local": "check_file",
    "merge": "Edited merge_tables",
    "model": "Device RankTable Server SuperPod",
    "problem": "Problem",
    "tables": "encode_table parse_table read_table write_table",
    "validate": "Report validate_file validate_table",
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
