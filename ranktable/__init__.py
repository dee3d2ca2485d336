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
    from ranktable.assembly.generate import build_table, default_file_name
    from ranktable.assembly.inventory import FoundDevice, HostInventory
    from ranktable.codec import encode_table
    from ranktable.compare import Change, FileDigest, diff_tables, digest_file, digest_table
    from ranktable.detection import FileKind, detect_file
    from ranktable.edit.convert import Converted, ConvertWishes, convert_table
    from ranktable.edit.fix import Fixed, fix_table
    from ranktable.edit.global_table import ClusterPart, merge_clusters
    from ranktable.edit.merge import merge_tables
    from ranktable.edit.ordering import renumber_ranks
    from ranktable.edit.repair import Repair
    from ranktable.edit.result import Edited
    from ranktable.edit.select import select_devices, select_ranks
    from ranktable.edit.split import Split, TablePart, split_table
    from ranktable.edit.super_pods import SuperPodWishes
    from ranktable.errors import (
        AmbiguousRankError,
        BuildError,
        EditError,
        GroupNotFoundError,
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
    from ranktable.export.exporter import Export, export_table
    from ranktable.hostlist.host_list import Host, HostList
    from ranktable.local import LocalReport, check_file
    from ranktable.model import Cluster, Device, Group, RankTable, Server, SuperPod
    from ranktable.problem import Position, Problem
    from ranktable.read import parse_table, read_table
    from ranktable.report.picture import draw_table
    from ranktable.sources.gather import Gathered, SourceRequest, gather_hosts
    from ranktable.sources.hostfile import read_hostfile
    from ranktable.sources.pods import read_pods
    from ranktable.sources.probe import Probe
    from ranktable.sources.slurm import read_slurm_hosts
    from ranktable.validate import Report, validate_file, validate_table
    from ranktable.write import write_table

_HOMES = {
    "assembly.generate": (
        "build_table",
        "default_file_name",
    ),
    "assembly.inventory": (
        "FoundDevice",
        "HostInventory",
    ),
    "codec": ("encode_table",),
    "compare": (
        "Change",
        "FileDigest",
        "diff_tables",
        "digest_file",
        "digest_table",
    ),
    "detection": (
        "FileKind",
        "detect_file",
    ),
    "edit.convert": (
        "ConvertWishes",
        "Converted",
        "convert_table",
    ),
    "edit.fix": (
        "Fixed",
        "fix_table",
    ),
    "edit.global_table": (
        "ClusterPart",
        "merge_clusters",
    ),
    "edit.merge": ("merge_tables",),
    "edit.ordering": ("renumber_ranks",),
    "edit.repair": ("Repair",),
    "edit.result": ("Edited",),
    "edit.select": (
        "select_devices",
        "select_ranks",
    ),
    "edit.split": (
        "Split",
        "TablePart",
        "split_table",
    ),
    "edit.super_pods": ("SuperPodWishes",),
    "errors": (
        "AmbiguousRankError",
        "BuildError",
        "EditError",
        "GroupNotFoundError",
        "HostListError",
        "InvalidTableError",
        "JsonTextError",
        "MergeError",
        "NotReadyError",
        "ProfileError",
        "RankNotFoundError",
        "RankTableError",
        "ReadError",
        "SourceError",
        "UnknownDialectError",
        "UnsupportedDialectError",
        "WriteError",
    ),
    "export.exporter": (
        "Export",
        "export_table",
    ),
    "hostlist.host_list": (
        "Host",
        "HostList",
    ),
    "local": (
        "LocalReport",
        "check_file",
    ),
    "model": (
        "Cluster",
        "Device",
        "Group",
        "RankTable",
        "Server",
        "SuperPod",
    ),
    "problem": (
        "Position",
        "Problem",
    ),
    "read": (
        "parse_table",
        "read_table",
    ),
    "report.picture": ("draw_table",),
    "sources.gather": (
        "Gathered",
        "SourceRequest",
        "gather_hosts",
    ),
    "sources.hostfile": ("read_hostfile",),
    "sources.pods": ("read_pods",),
    "sources.probe": ("Probe",),
    "sources.slurm": ("read_slurm_hosts",),
    "validate": (
        "Report",
        "validate_file",
        "validate_table",
    ),
    "write": ("write_table",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AmbiguousRankError",
    "BuildError",
    "Change",
    "Cluster",
    "ClusterPart",
    "ConvertWishes",
    "Converted",
    "Device",
    "EditError",
    "Edited",
    "Export",
    "FileDigest",
    "FileKind",
    "Fixed",
    "FoundDevice",
    "Gathered",
    "Group",
    "GroupNotFoundError",
    "Host",
    "HostInventory",
    "HostList",
    "HostListError",
    "InvalidTableError",
    "JsonTextError",
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
    "Split",
    "SuperPod",
    "SuperPodWishes",
    "TablePart",
    "UnknownDialectError",
    "UnsupportedDialectError",
    "WriteError",
    "build_table",
    "check_file",
    "convert_table",
    "default_file_name",
    "detect_file",
    "diff_tables",
    "digest_file",
    "digest_table",
    "draw_table",
    "encode_table",
    "export_table",
    "fix_table",
    "gather_hosts",
    "merge_clusters",
    "merge_tables",
    "parse_table",
    "read_hostfile",
    "read_pods",
    "read_slurm_hosts",
    "read_table",
    "renumber_ranks",
    "select_devices",
    "select_ranks",
    "split_table",
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
