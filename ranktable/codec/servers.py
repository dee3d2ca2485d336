"""The objects of `server_list` and `device`, which every dialect with a server list shares.

Source of the keys: the rank table pages of the HCCL, MindSpore and MindIE documentation, and what HCCL's parser reads.
A dialect says in a `ServerForm` what it reads beyond the keys of version 1.0. Keys that are not known by type are kept
as they are and written back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ranktable.codec.shape import Key, check_shape, parse_number
from ranktable.model import Device, Server
from ranktable.problem import Problem, join_index, join_key
from ranktable.survey import DeviceEntry, ServerEntry

SERVER_KEYS = (
    Key("server_id", missing="error"),
    Key("host_ip"),
    Key("pod_ip"),
    Key("device", "list", missing="error"),
)
DEVICE_KEYS = (
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
SERVER_EXTRAS = frozenset({"host_nic_ip", "container_ip", "server_ip", "pod_name", "hardware_type"})
DEVICE_EXTRAS = frozenset({"device_logical_id", "dpu_ip", "numa_id", "eid", "tor_ip", "tor_port", "pod_name"})

SUPER_DEVICE_ID = "super_device_id"


@dataclass(frozen=True, slots=True)
class ServerForm:
    """What a dialect reads of its servers and devices."""

    server_keys: tuple[Key, ...] = SERVER_KEYS
    device_keys: tuple[Key, ...] = DEVICE_KEYS
    server_extras: frozenset[str] = SERVER_EXTRAS
    device_extras: frozenset[str] = DEVICE_EXTRAS
    has_super_devices: bool = False
    """True when `super_device_id` is read; else it is kept like a key that is not known."""


def objects_of(holder: Mapping[str, object], path: str, key: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield path and members of each object in the array `holder[key]`; skip what is not an object."""
    items, list_path = holder.get(key), join_key(path, key)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield join_index(list_path, index), item


def check_server(server: Mapping[str, object], path: str, form: ServerForm) -> Iterator[Problem]:
    """Yield what is wrong with the structure of a server and its devices: R4, R5, R31 and malformed numbers."""
    yield from check_shape(server, path, form.server_keys, form.server_extras)
    for device_path, device in objects_of(server, path, "device"):
        yield from check_shape(device, device_path, form.device_keys, form.device_extras)


def survey_servers(holder: Mapping[str, object], path: str) -> tuple[ServerEntry, ...]:
    """Return what can be read of the `server_list` of the object at `path`, however faulty it is."""
    return tuple(
        ServerEntry(server_path, server, tuple(_survey_devices(server, server_path)))
        for server_path, server in objects_of(holder, path, "server_list")
    )


def _survey_devices(server: Mapping[str, object], server_path: str) -> Iterator[DeviceEntry]:
    for path, device in objects_of(server, server_path, "device"):
        yield DeviceEntry(path, device, parse_number(device.get("device_id")), parse_number(device.get("rank_id")))


def decode_server(members: Mapping[str, object], form: ServerForm, group: str | None = None) -> Server:
    """Return the server of an object that `check_server` finds no error in."""
    rest = dict(members)
    devices = tuple(_decode_device(device, form) for _, device in objects_of(rest, "", "device"))
    rest.pop("device", None)
    server_id = str(rest.pop("server_id"))
    return Server(server_id, devices, pop_text(rest, "host_ip"), pop_text(rest, "pod_ip"), group, extra=rest)


def _decode_device(members: Mapping[str, object], form: ServerForm) -> Device:
    rest = dict(members)
    device_id, rank_id = int(str(rest.pop("device_id"))), int(str(rest.pop("rank_id")))
    super_device_id = pop_text(rest, SUPER_DEVICE_ID) if form.has_super_devices else None
    return Device(device_id, rank_id, pop_text(rest, "device_ip"), super_device_id, extra=rest)


def pop_text(members: dict[str, object], key: str) -> str | None:
    """Take `key` out of the members and return it as text, None when it is not there."""
    return str(members.pop(key)) if key in members else None


def encode_server(server: Server) -> dict[str, object]:
    """Return the JSON object of a server; decoding it gives `server` again, its group apart."""
    optional = {"host_ip": server.host_ip, "pod_ip": server.pod_ip}
    return {
        "server_id": server.server_id,
        **{key: text for key, text in optional.items() if text is not None},
        "device": [encode_device(device) for device in server.devices],
        **server.extra,
    }


def encode_device(device: Device) -> dict[str, object]:
    """Return the JSON object of a device; decoding it gives `device` again."""
    address = {} if device.device_ip is None else {"device_ip": device.device_ip}
    number = {} if device.super_device_id is None else {SUPER_DEVICE_ID: device.super_device_id}
    device_id, rank_id = str(device.device_id), str(device.rank_id)
    return {"device_id": device_id, **number, **address, "rank_id": rank_id, **device.extra}
