"""A table in another dialect, with a list of what the dialect cannot hold and of what had to be made up for it.

Ranks, device ids and addresses are carried over as they are; no address, device id or super device id is made up.
Sources: the keys of the dialects (see their codecs); super device ids are demanded by HCCL's parser together with
super_pod_list; what a version 2.0 table needs (EIDs, layers, ports) stands in no other table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ranktable.edit.convert_template2 import to_cloud, to_lab
from ranktable.edit.super_pods import SuperPodWishes, add_super_pods
from ranktable.errors import BuildError
from ranktable.export.losses import EXTRAS, list_losses
from ranktable.export.nodes import check_ranks, refuse_host_ranks
from ranktable.model import Device, RankTable, Server
from ranktable.rules.registry import CONCISE

_REFUSED = {
    "2.0": "the EIDs, ports and network layers of an Ascend 950 stand in no other table and cannot be made up; "
    "take the table that the cluster's own tools write",
    "1.1": "the collective_id and the ports of heterogeneous groups cannot be made up; take the table of their tools",
    "1.1-offline": "the item ids of offline compilation cannot be made up; take the table of its tools",
    "volcano-job": "Volcano writes this table itself; give it to HCCL as version 1.0 or 1.2",
    "volcano-global": "Volcano writes this table itself out of those of its jobs",
    "cross-cluster": "the clusters of the servers cannot be made up; write cluster_list into a version 1.0 table",
    "mindie-global": "the groups of an inference service cannot be made up; take the table of MindIE-Motor",
}
"""Dialects that nothing is converted to, and why."""

_KEPT_IN_FAMILY = frozenset({"device_id", "device_ip", "host_ip", "pod_ip", EXTRAS})
_KEPT_FROM_OTHERS = frozenset({"device_id", "device_ip", "pod_name"})
_SUPER_PODS = frozenset({"super_device_id", "super_pod_list"})
_OWN_EXTRAS = frozenset({"data_version"})
"""Keys at the top that belong to the dialect that is left."""


@dataclass(frozen=True, slots=True)
class ConvertWishes:
    """What only a person knows, for dialects that have a place for it."""

    renumber: bool = False
    """Number the ranks anew where the dialect counts them itself."""
    super_pods: SuperPodWishes = field(default_factory=SuperPodWishes)
    group_name: str | None = None
    """Name of the one group of a template 2 table."""
    board_id: str | None = None
    chip_info: str | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """A table in another dialect."""

    table: RankTable
    lost: tuple[str, ...] = ()
    """What the table said and the dialect cannot, in words."""
    invented: tuple[str, ...] = ()
    """What the dialect demands and the table did not say, in words."""
    is_renumbered: bool = False
    """True when the ranks are not those of the table."""


def dialect_names() -> tuple[str, ...]:
    """Return the dialects that a table can be converted to."""
    return tuple(_WRITERS)


def refused_names() -> tuple[str, ...]:
    """Return the dialects that exist and that nothing can be converted to."""
    return tuple(_REFUSED)


def convert_table(table: RankTable, to: str, wishes: ConvertWishes | None = None) -> Converted:
    """Return `table` in the dialect `to` (one of `dialect_names()`); in its own dialect it is returned as it is.

    Raises BuildError for dialects that cannot be written out of others, for ranks that are not 0 to n-1, and for
    what `to` demands and neither the table nor `wishes` say.
    """
    if to == table.dialect:
        return Converted(table)
    if to in _REFUSED:
        raise BuildError(f"nothing can be converted to {to}", _REFUSED[to])
    if to not in _WRITERS:
        raise BuildError(f"dialect {to!r} is not known", f"choose one of {', '.join(_WRITERS)}")
    check_ranks(table)
    refuse_host_ranks(table)
    return _WRITERS[to](table, wishes or ConvertWishes())


def _to_1_0(table: RankTable, _wishes: ConvertWishes) -> Converted:
    return Converted(*_to_server_list(table, "1.0", frozenset()))


def _to_1_2(table: RankTable, wishes: ConvertWishes) -> Converted:
    with_pods = add_super_pods(_read_raw_super_pods(table), wishes.super_pods)
    return Converted(*_to_server_list(with_pods, "1.2", _SUPER_PODS))


def _to_server_list(table: RankTable, dialect: str, keeps: frozenset[str]) -> tuple[RankTable, tuple[str, ...]]:
    """Return the table in a dialect of `server_list[].device[]`, and what is lost."""
    is_family = table.dialect in CONCISE
    keeps = keeps | (_KEPT_IN_FAMILY if is_family else _KEPT_FROM_OTHERS)
    own = {key: value for key, value in table.extra.items() if key in _OWN_EXTRAS}
    lost = list_losses(replace(table, status="completed"), keeps)
    lost += tuple(f"{key} of the table" for key in own if is_family)
    extra = {key: value for key, value in table.extra.items() if is_family and key not in own}
    servers = tuple(_plain_server(server, keeps, is_family=is_family) for server in join_servers(table.servers))
    pods = table.super_pods if "super_pod_list" in keeps else ()
    return RankTable(dialect, servers, table.status, len(servers), pods, extra=extra), lost


def join_servers(servers: tuple[Server, ...]) -> tuple[Server, ...]:
    """Put the entries of one server_id together, as HCCL does with the instances of template 2; groups are left out."""
    joined: dict[str, Server] = {}
    for server in servers:
        first = joined.get(server.server_id)
        devices = (*first.devices, *server.devices) if first else server.devices
        joined[server.server_id] = replace(first or server, devices=devices, group=None)
    return tuple(joined.values())


def _plain_server(server: Server, keeps: frozenset[str], *, is_family: bool) -> Server:
    devices = tuple(_plain_device(device, keeps, is_family=is_family) for device in server.devices)
    return replace(server, devices=devices, extra=server.extra if is_family else {})


def _plain_device(device: Device, keeps: frozenset[str], *, is_family: bool) -> Device:
    extra = {key: value for key, value in device.extra.items() if is_family or key in keeps}
    number = device.super_device_id if "super_device_id" in keeps else None
    # Template 2 writes an empty address where there is none.
    return replace(device, device_ip=device.device_ip or None, super_device_id=number, extra=extra)


def _read_raw_super_pods(table: RankTable) -> RankTable:
    """Read super pods that stand in a table whose version does not have them: there they are kept, but not read."""
    if "super_pod_list" not in table.extra:
        return table
    from ranktable.codec import encode_document
    from ranktable.codec.layout import render_json
    from ranktable.read import parse_table

    value = {**encode_document(table), "version": "1.2"}
    return parse_table(render_json(value), "the table with its super pods")


def _to_cloud(table: RankTable, wishes: ConvertWishes) -> Converted:
    return Converted(*to_cloud(table, wishes.group_name, renumber=wishes.renumber))


def _to_lab(table: RankTable, wishes: ConvertWishes) -> Converted:
    return Converted(*to_lab(table, wishes.group_name, wishes.board_id, wishes.chip_info))


_WRITERS: Mapping[str, Callable[[RankTable, ConvertWishes], Converted]] = {
    "1.0": _to_1_0,
    "1.2": _to_1_2,
    "template2-cloud": _to_cloud,
    "template2-lab": _to_lab,
}
