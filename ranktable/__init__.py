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
    from ranktable.convert import Converted, ConvertWishes, convert_table
    from ranktable.errors import (
        BuildError,
        EditError,
        HostListError,
        InvalidTableError,
        JsonTextError,
        MergeError,
        NotReadyError,
        ProfileError,
        RankNotFoundError,
        RankTableError,
        ReadError,
        SourceError,
        UnknownDialectError,
        UnsupportedDialectError,
        WriteError,
    )
    from ranktable.fix import Fixed, Repair, fix_table
    from ranktable.generate import HostInventory, build_table, default_file_name
    from ranktable.hosts.host_list import ListedHost, parse_hosts, select_hosts
    from ranktable.hosts.hostfile import parse_hostfile
    from ranktable.hosts.slurm import read_slurm_hosts
    from ranktable.local import LocalReport, check_file
    from ranktable.merge import Edited, merge_tables
    from ranktable.model import Device, RankTable, Server, SuperPod
    from ranktable.problem import Position, Problem
    from ranktable.sources.collect import CollectedHosts, SourceRequest, collect_hosts
    from ranktable.sources.local_host import Probe
    from ranktable.sources.pods import read_pods
    from ranktable.tables import encode_table, parse_table, read_table, write_table
    from ranktable.validate import Report, validate_file, validate_table

_HOMES = {
    "convert": "ConvertWishes Converted convert_table",
    "errors": (
        "BuildError EditError HostListError InvalidTableError "
        "JsonTextError MergeError NotReadyError ProfileError RankNotFoundError RankTableError ReadError "
        "SourceError UnknownDialectError UnsupportedDialectError WriteError"
    ),
    "fix": "Fixed Repair fix_table",
    "generate": "HostInventory build_table default_file_name",
    "hosts.host_list": "ListedHost parse_hosts select_hosts",
    "hosts.hostfile": "parse_hostfile",
    "hosts.slurm": "read_slurm_hosts",
    "local": "LocalReport check_file",
    "merge": "Edited merge_tables",
    "model": "Device RankTable Server SuperPod",
    "problem": "Position Problem",
    "sources.collect": "CollectedHosts SourceRequest collect_hosts",
    "sources.local_host": "Probe",
    "sources.pods": "read_pods",
    "tables": "encode_table parse_table read_table write_table",
    "validate": "Report validate_file validate_table",
}
"""The module of each exported name."""
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "BuildError",
    "CollectedHosts",
    "ConvertWishes",
    "Converted",
    "Device",
    "EditError",
    "Edited",
    "Fixed",
    "HostInventory",
    "HostListError",
    "InvalidTableError",
    "JsonTextError",
    "ListedHost",
    "LocalReport",
    "MergeError",
    "NotReadyError",
    "Position",
    "Probe",
    "Problem",
    "ProfileError",
    "RankNotFoundError",
    "RankTable",
    "RankTableError",
    "ReadError",
    "Repair",
    "Report",
    "Server",
    "SourceError",
    "SourceRequest",
    "SuperPod",
    "UnknownDialectError",
    "UnsupportedDialectError",
    "WriteError",
    "build_table",
    "check_file",
    "collect_hosts",
    "convert_table",
    "default_file_name",
    "encode_table",
    "fix_table",
    "merge_tables",
    "parse_hostfile",
    "parse_hosts",
    "parse_table",
    "read_pods",
    "read_slurm_hosts",
    "read_table",
    "select_hosts",
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
