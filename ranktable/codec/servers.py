"""Servers and devices between JSON and the neutral table, by the roles that the fields of a schema have.

Source of the keys: the rank table pages of the HCCL, MindSpore and MindIE documentation, and what HCCL's parser reads.
Keys without a role are kept as they are and written back.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranktable.codec.schema import Field, Members, Schema, list_objects, parse_number, walk_objects
from ranktable.model import NOTHING, Device, Server
from ranktable.survey import DeviceEntry, ServerEntry

HOST_DEVICE = -1
"""The number of a rank that has no device (version 1.1)."""

# Written by known producers for other readers than HCCL, which skips them.
SERVER_EXTRAS = frozenset({"host_nic_ip", "container_ip", "server_ip", "pod_name", "hardware_type"})
DEVICE_EXTRAS = frozenset({"device_logical_id", "dpu_ip", "numa_id", "eid", "tor_ip", "tor_port", "pod_name"})

_DEVICE_FIELDS = (
    Field("device_ip", role="device_ip"),
    Field("rank_id", "number", missing="error", rule="R9", role="rank_id"),
    Field("device_port", "number", rule="R22"),
    Field("device_vnic_port", "number", rule="R22"),
    Field("host_port", "number", rule="R22"),
    Field("backup_device_ip"),
    Field("backup_device_port", "number", rule="R22"),
    Field("net_position"),
    Field("net_protocol"),
)
DEVICE_ID = Field("device_id", "number", missing="error", rule="R8", role="device_id")
DEVICE = Schema((DEVICE_ID, Field("super_device_id", "unread"), *_DEVICE_FIELDS), DEVICE_EXTRAS)
SUPER_POD_DEVICE = Schema((DEVICE_ID, Field("super_device_id", role="super_device_id"), *_DEVICE_FIELDS), DEVICE_EXTRAS)
"""A device that may have a number in its super pod; what is wrong with it is told by rule R24."""


def server_fields(device: Schema) -> tuple[Field, ...]:
    """Return the keys of a server whose devices have that schema."""
    return (
        Field("server_id", missing="error", role="server_id"),
        Field("host_ip", role="host_ip"),
        Field("pod_ip", role="pod_ip"),
        Field("device", "list", missing="error", role="devices", of=device),
    )


SERVER = Schema(server_fields(DEVICE), SERVER_EXTRAS)
SUPER_POD_SERVER = Schema(server_fields(SUPER_POD_DEVICE), SERVER_EXTRAS)


def survey_servers(holder: Members, path: str, key: str, schema: Schema) -> tuple[ServerEntry, ...]:
    """Return what can be read of the array `holder[key]`, however faulty; members have the names of their roles."""
    found = []
    listed = schema.by_role["devices"]
    device_schema = schema.within(listed.name)
    for server_path, server in walk_objects(holder, path, key):
        members, places = schema.rename(server, server_path)
        devices = tuple(
            survey_device(device, device_path, device_schema)
            for device_path, device in walk_objects(server, server_path, listed.name)
        )
        found.append(ServerEntry(server_path, members, devices, places=places))
    return tuple(found)


def survey_device(device: Members, path: str, schema: Schema) -> DeviceEntry:
    """Return what can be read of a device. Number -1 is that of no device: any number of ranks on the host have it."""
    members, places = schema.rename(device, path)
    numbers = parse_number(members.get("device_id")), parse_number(members.get("rank_id"))
    return DeviceEntry(path, members, *numbers, places=places)


def decode_server(members: Members, schema: Schema, group: str | None = None) -> Server:
    """Return the server of an object that fits its schema."""
    rest = dict(members)
    listed = schema.by_role["devices"]
    device_schema = schema.within(listed.name)
    devices = tuple(decode_device(device, device_schema) for device in list_objects(rest, listed.name))
    rest.pop(listed.name, None)
    return Server(devices=devices, group=group, **_take(rest, schema), extra=rest or NOTHING)


def decode_device(members: Members, schema: Schema, **known: object) -> Device:
    """Return the device of an object that fits its schema; `known` is what stands elsewhere in the file."""
    rest = dict(members)
    taken = {**known, **_take(rest, schema)}
    taken["rank_id"], taken["device_id"] = int(str(taken["rank_id"])), int(str(taken.get("device_id", HOST_DEVICE)))
    return Device(**taken, extra=rest or NOTHING)  # type: ignore[arg-type]


def _take(rest: dict[str, object], schema: Schema) -> dict[str, str]:
    """Take the values with a role out of the members; an empty one that says nothing stays."""
    taken = {}
    for role, field in schema.by_role.items():
        name = field.name
        if name in rest and not (field.empty_is_none and rest[name] == ""):
            taken[role] = str(rest.pop(name))
    return taken


def encode_server(server: Server, schema: Schema, **empty: str) -> dict[str, object]:
    """Return the JSON object of a server; decoding it gives `server` again, its group apart.

    `empty` has values for the roles of devices that have none.
    """
    device_schema = schema.within(schema.by_role["devices"].name)
    devices = [encode_device(device, device_schema, **empty) for device in server.devices]
    return _put(server, schema, {"devices": devices})


def encode_device(device: Device, schema: Schema, **empty: str) -> dict[str, object]:
    """Return the JSON object of a device; decoding it gives `device` again."""
    return _put(device, schema, empty)


def _put(item: Server | Device, schema: Schema, otherwise: Mapping[str, object]) -> dict[str, object]:
    encoded: dict[str, object] = {}
    for role, field in schema.by_role.items():
        value = getattr(item, role)
        if role in otherwise and (value is None or role == "devices"):
            value = otherwise[role]
        if value is not None:
            encoded[field.name] = str(value) if type(value) is int and field.kind != "integer" else value
    # A key that the file has beside the one of the model is dropped where both would have one name.
    return (
        {**encoded, **{key: value for key, value in item.extra.items() if key not in encoded}}
        if item.extra
        else encoded
    )
