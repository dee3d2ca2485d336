"""Dialect 1.0: `server_list[].device[]`, every scalar a string. Read by HCCL on 910A, A2 and 300I Duo.

Source of the rules: the rank table pages of the HCCL and MindSpore documentation, and what HCCL's parser refuses.
Keys that this module does not know by type are kept as they are and written back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ranktable.codec.codec import Codec
from ranktable.codec.shape import Key, check_shape, parse_number
from ranktable.model import Device, RankTable, Server
from ranktable.placeholder import name_placeholder
from ranktable.problem import Problem, join_index, join_key, show_value
from ranktable.survey import DeviceEntry, ServerEntry, Survey

VERSION = "1.0"

_TABLE_KEYS = (
    Key("version"),
    Key("status", missing="error"),
    Key("server_count", "number", missing="warning", rule="R6"),
    Key("server_list", "list", missing="error"),
)
_SERVER_KEYS = (
    Key("server_id", missing="error"),
    Key("host_ip"),
    Key("pod_ip"),
    Key("device", "list", missing="error"),
)
_DEVICE_KEYS = (
    Key("device_id", "number", missing="error", rule="R8"),
    Key("device_ip"),
    Key("rank_id", "number", missing="error", rule="R9"),
    Key("device_port", "number", rule="R22"),
    Key("device_vnic_port", "number", rule="R22"),
    Key("host_port", "number", rule="R22"),
    Key("backup_device_ip"),
    Key("backup_device_port", "number", rule="R22"),
    Key("net_position"),
    Key("net_protocol"),
)
# Written by known producers for other readers than HCCL, which skips them.
_TABLE_EXTRAS = frozenset({"cluster_list", "data_version", "hardware_type"})
_SERVER_EXTRAS = frozenset({"host_nic_ip", "container_ip", "server_ip", "pod_name", "hardware_type"})
_DEVICE_EXTRAS = frozenset({"device_logical_id", "dpu_ip", "numa_id", "eid", "tor_ip", "tor_port", "pod_name"})

_BELONGS_TO_1_2 = frozenset({"super_pod_list", "super_device_id"})


def check_structure(value: Mapping[str, object]) -> list[Problem]:
    """Return every fault of the structure (R2, R4, R5, R31 and malformed numbers); empty when it can be decoded."""
    problems = [*_check_version(value), *_check_object(value, "", _TABLE_KEYS, _TABLE_EXTRAS)]
    for server_path, server in _objects(value, "", "server_list"):
        problems += _check_object(server, server_path, _SERVER_KEYS, _SERVER_EXTRAS)
        for device_path, device in _objects(server, server_path, "device"):
            problems += _check_object(device, device_path, _DEVICE_KEYS, _DEVICE_EXTRAS)
    return problems


def survey(value: Mapping[str, object]) -> Survey:
    """Return what can be read of the object, however faulty it is."""
    servers = tuple(
        ServerEntry(server_path, server, tuple(_survey_devices(server, server_path)))
        for server_path, server in _objects(value, "", "server_list")
    )
    return Survey("", value, servers, parse_number(value.get("server_count")))


def decode(value: Mapping[str, object]) -> RankTable:
    """Return the table. `value` must have passed `check_structure` without an error."""
    rest = dict(value)
    servers = tuple(_decode_server(server) for _, server in _objects(rest, "", "server_list"))
    del rest["server_list"]
    status = str(rest.pop("status"))
    del rest["version"]
    return RankTable(VERSION, servers, status, parse_number(rest.pop("server_count", None)), extra=rest)


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table`; decoding it gives `table` again."""
    count = {} if table.declared_server_count is None else {"server_count": str(table.declared_server_count)}
    return {
        "version": VERSION,
        **count,
        "server_list": [_encode_server(server) for server in table.servers],
        "status": table.status,
        **table.extra,
    }


def _check_version(value: Mapping[str, object]) -> Iterator[Problem]:
    path, remedy = "version", f'write "version": "{VERSION}"'
    version = value.get("version")
    if "version" not in value:
        yield Problem(path, "R2", "error", "the key is missing, so HCCL takes the table for an older kind", remedy)
    elif isinstance(version, str) and version != VERSION:
        what = name_placeholder(version)
        message = f"the version is {what}" if what else "the version is not known for a table with server_list"
        yield Problem(path, "R2", "error", message, remedy, show_value(version))


def _check_object(
    members: Mapping[str, object], path: str, keys: tuple[Key, ...], extras: frozenset[str]
) -> Iterator[Problem]:
    yield from check_shape(members, path, keys, extras | _BELONGS_TO_1_2)
    for name in members:
        if name in _BELONGS_TO_1_2:
            remedy = 'write "version": "1.2" for a super pod, or remove the key'
            yield Problem(join_key(path, name), "R31", "warning", "the key is read in version 1.2 only", remedy)


def _objects(holder: Mapping[str, object], path: str, key: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield path and members of each object in the array `holder[key]`; skip what is not an object."""
    items, list_path = holder.get(key), join_key(path, key)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield join_index(list_path, index), item


def _survey_devices(server: Mapping[str, object], server_path: str) -> Iterator[DeviceEntry]:
    for path, device in _objects(server, server_path, "device"):
        yield DeviceEntry(path, device, parse_number(device.get("device_id")), parse_number(device.get("rank_id")))


def _decode_server(members: Mapping[str, object]) -> Server:
    rest = dict(members)
    devices = tuple(_decode_device(device) for _, device in _objects(rest, "", "device"))
    del rest["device"]
    server_id = str(rest.pop("server_id"))
    return Server(server_id, devices, _pop_text(rest, "host_ip"), _pop_text(rest, "pod_ip"), extra=rest)


def _decode_device(members: Mapping[str, object]) -> Device:
    rest = dict(members)
    device_id, rank_id = int(str(rest.pop("device_id"))), int(str(rest.pop("rank_id")))
    return Device(device_id, rank_id, _pop_text(rest, "device_ip"), extra=rest)


def _pop_text(members: dict[str, object], key: str) -> str | None:
    return str(members.pop(key)) if key in members else None


def _encode_server(server: Server) -> dict[str, object]:
    optional = {"host_ip": server.host_ip, "pod_ip": server.pod_ip}
    return {
        "server_id": server.server_id,
        **{key: text for key, text in optional.items() if text is not None},
        "device": [_encode_device(device) for device in server.devices],
        **server.extra,
    }


def _encode_device(device: Device) -> dict[str, object]:
    address = {} if device.device_ip is None else {"device_ip": device.device_ip}
    return {"device_id": str(device.device_id), **address, "rank_id": str(device.rank_id), **device.extra}


CODEC = Codec(check_structure, survey, decode, encode)
