"""Dialect 2.0: `rank_list[].level_list[]`, numbers as JSON integers, read by HCCL on Ascend 950.

The file lists ranks, not servers. In the model the ranks of one sub-network of layer 0 (equal `net_instance_id`; of the
lowest layer where there is no layer 0) are one server with that id, and the servers stand in the order of their first
ranks. What the neutral table has no place for (`local_id`, `level_list`, `control_plane`, ...) stays in `Device.extra`.
A file whose sub-networks interleave is written with each of them in one piece; every rank keeps its rank_id.
Source: HCCL's parser of version 2.0 and the rank table page of its documentation for the Ascend 950.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ranktable.codec import Codec
from ranktable.codec.schema import Count, Field, Schema, check_tree, check_version, list_objects, walk_objects, without
from ranktable.codec.servers import decode_device, encode_device
from ranktable.errors import BuildError
from ranktable.model import COMPLETED, Device, RankTable, Server
from ranktable.problem import Problem, join_key
from ranktable.survey import DeviceEntry, ServerEntry, Survey
from ranktable.values import read_integer

VERSION = "2.0"

_RULE = "R30"
_ADDRESS = Schema(
    (
        Field("addr_type", missing="error"),
        Field("addr", missing="error"),
        Field("ports", "texts", missing="error"),
        Field("plane_id"),
        Field("backup_addr", "texts"),
    )
)
_LEVEL = Schema(
    (
        Field("net_layer", "integer", missing="error", rule=_RULE),
        Field("net_instance_id", missing="error", role="server_id"),
        Field("net_type"),
        Field("net_attr"),
        Field("rank_addr_list", "entries", missing="error", of=_ADDRESS),
    ),
    frozenset({"elec_group_id", "pcie_fallback"}),  # what HCCL's own negotiation adds to the files that it exchanges
)
_CONTROL = Schema(
    (
        Field("addr_type", missing="error"),
        Field("addr", missing="error"),
        Field("listen_port", "integer", missing="error", rule=_RULE),
    )
)
_RANK = Schema(
    (
        Field("rank_id", "integer", missing="error", rule=_RULE, role="rank_id"),
        Field("local_id", "integer", missing="error", rule=_RULE),
        Field("device_id", "integer", missing="error", rule=_RULE, role="device_id"),
        Field("replaced_local_id", "integer", rule=_RULE),
        Field("device_port", "integer", rule=_RULE),
        Field("host_port", "integer", rule=_RULE),
        Field("level_list", "list", missing="error", of=_LEVEL),
        Field("control_plane", "object", of=_CONTROL),
    )
)
_SCHEMA = Schema(
    (
        Field("version"),
        Field("status"),
        Field("detour"),
        Field("rank_count", "integer", missing="error", rule=_RULE, count=Count(("rank_list",), "rank")),
        Field("rank_list", "list", missing="error", of=_RANK),
    )
)


def check_structure(value: Mapping[str, object]) -> list[Problem]:
    """Return every fault of the structure (R2, R4, R5, R31, numbers out of range); empty when it can be decoded."""
    otherwise = f"the keys are those of version {VERSION}, and HCCL goes by this one"
    return [*check_version(value, (VERSION,), otherwise), *check_tree(value, _SCHEMA)]


def survey(value: Mapping[str, object]) -> Survey:
    """Return what can be read of the object; ranks whose sub-network cannot be read stand alone."""
    heads: dict[str, ServerEntry] = {}
    devices: dict[str, list[DeviceEntry]] = {}
    for path, rank in walk_objects(value, "", "rank_list"):
        level_path, level = _lowest_level(rank, path)
        instance = level.get("net_instance_id")
        server = f"id {instance}" if isinstance(instance, str) else f"path {path}"
        places = {"server_id": join_key(level_path, "net_instance_id")}
        heads.setdefault(server, ServerEntry(path, {"server_id": instance}, places=places))
        device_id, rank_id = read_integer(rank.get("device_id")), read_integer(rank.get("rank_id"))
        devices.setdefault(server, []).append(DeviceEntry(path, rank, device_id, rank_id))
    servers = (replace(head, devices=tuple(devices[server])) for server, head in heads.items())
    return Survey("", value, tuple(servers), dialect=VERSION)


def _lowest_level(rank: Mapping[str, object], path: str) -> tuple[str, Mapping[str, object]]:
    """Return path and members of the level with the lowest readable net_layer; of nothing when there is none."""
    found: tuple[str, Mapping[str, object]] = path, {}
    lowest: int | None = None
    for level_path, level in walk_objects(rank, path, "level_list"):
        layer = read_integer(level.get("net_layer"))
        if layer is not None and (lowest is None or layer < lowest):
            found, lowest = (level_path, level), layer
    return found


def decode(value: Mapping[str, object]) -> RankTable:
    """Return the table. `value` must have passed `check_structure` without an error."""
    devices: dict[str, list[Device]] = {}
    ranks = list_objects(value, "rank_list")
    for rank in ranks:
        devices.setdefault(str(_server_id_of(rank)), []).append(decode_device(rank, _RANK))
    servers = tuple(Server(server_id, tuple(its_devices)) for server_id, its_devices in devices.items())
    rest = without(value, "version", "status", "rank_list")
    if rest["rank_count"] == len(ranks):
        del rest["rank_count"]  # it is computed when the table is written; a wrong count is kept, to stay visible
    return RankTable(VERSION, servers, str(value.get("status", COMPLETED)), extra=rest)


def _server_id_of(rank: Mapping[str, object]) -> object:
    return _lowest_level(rank, "")[1].get("net_instance_id")


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table`; decoding it gives `table` again. The status is always written.

    Raises BuildError for a device without a level_list, for a server whose id is not that of its devices'
    sub-network, and for what the dialect has no key for.
    """
    if table.super_pods or table.clusters or table.groups:
        message = f"the table has super pods, clusters or groups, which version {VERSION} has no key for"
        raise BuildError(message, "leave them out first")
    ranks = [_encode_rank(server, device) for server in table.servers for device in server.devices]
    return {
        "version": VERSION,
        "status": table.status,
        "rank_count": len(ranks),
        **table.extra,
        "rank_list": ranks,
    }


def _encode_rank(server: Server, device: Device) -> dict[str, object]:
    who = f"device {device.device_id} of server {server.server_id!r}"
    if not isinstance(device.extra.get("level_list"), list):
        message = f"{who} has no level_list; the addresses and layers of an Ascend 950 cannot be invented"
        raise BuildError(message, "take the table that the cluster's own tools write")
    if _server_id_of(device.extra) != server.server_id:
        message = f"the lowest layer of {who} is in the sub-network {_server_id_of(device.extra)!r}"
        raise BuildError(message, "a server's id is the net_instance_id of its devices' lowest layer")
    named = {
        "host_ip": server.host_ip,
        "pod_ip": server.pod_ip,
        "group": server.group,
        "device_ip": device.device_ip,
        "super_device_id": device.super_device_id,
    }
    lost = [*(key for key, value in named.items() if value is not None), *server.extra]
    if lost:
        raise BuildError(f"{who} has {', '.join(lost)}, which version {VERSION} has no key for", "leave it out first")
    return encode_device(device, _RANK)


CODECS = {VERSION: Codec(_SCHEMA, check_structure, survey, decode, encode)}
