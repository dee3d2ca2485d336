"""What the two forms of version 1.1 share: `node_list[]` with ranks on devices and on the host's processor.

A rank without a device has number -1, in the file and in the model. Every scalar is a string.
Source: HCCL's parsers of heterogeneous tables, online and offline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ranktable.codec.members import check_version, list_objects, pop_text, walk_objects, without
from ranktable.codec.shape import Key, check_shape, parse_number
from ranktable.errors import BuildError
from ranktable.model import Device, RankTable, Server
from ranktable.placeholder import name_placeholder
from ranktable.problem import Problem, join_key, show_value
from ranktable.survey import DeviceEntry, ServerEntry, Survey

VERSION = "1.1"
HOST_DEVICE = -1
"""The number of a rank that has no device."""

_DEVICE_NUMBER = re.compile(r"-1|0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class NodeForm:
    """Names and keys of one form."""

    dialect: str
    table: tuple[Key, ...]
    node: tuple[Key, Key]
    """The key of the node's id or address, which is the model's server_id, and that of its ranks."""
    device_key: str
    rank: tuple[Key, ...]
    number_keys: tuple[str, ...]
    """Keys of a rank that hold a device number, or -1 for none."""

    @property
    def node_key(self) -> str:
        """Name of the key of the node's id or address."""
        return self.node[0].name

    @property
    def ranks_key(self) -> str:
        """Name of the key of the node's ranks."""
        return self.node[1].name


def check_form(value: Mapping[str, object], form: NodeForm) -> list[Problem]:
    """Return every fault of the structure (R2, R4, R5, R31 and malformed numbers) of a table of `form`."""
    problems = [*check_version(value, VERSION), *check_shape(value, "", form.table, ())]
    for node_path, members in walk_objects(value, "", "node_list"):
        problems += check_shape(members, node_path, form.node, ())
        for path, rank in walk_objects(members, node_path, form.ranks_key):
            problems += check_shape(rank, path, form.rank, ())
            for key in form.number_keys:
                problems += _check_device_number(rank, path, key)
    return problems


def _check_device_number(rank: Mapping[str, object], path: str, key: str) -> Iterator[Problem]:
    text = rank.get(key)
    if isinstance(text, str) and not _DEVICE_NUMBER.fullmatch(text):
        what = name_placeholder(text)
        message = f"the value is {what}, not a number" if what else "the value is not a plain decimal number or -1"
        remedy = 'write the number of the device, or "-1" for a rank on the host'
        yield Problem(join_key(path, key), "R8", "error", message, remedy, show_value(text), is_form=True)


def survey_form(value: Mapping[str, object], form: NodeForm) -> Survey:
    """Return what can be read of the object; nodes are servers, and `rank_ip` is named device_ip."""
    servers = tuple(
        ServerEntry(
            path,
            _rename(node, {"server_id": form.node_key}),
            tuple(_survey_ranks(node, path, form)),
            places={"server_id": join_key(path, form.node_key)},
        )
        for path, node in walk_objects(value, "", "node_list")
    )
    return Survey("", value, servers, dialect=form.dialect)


def _survey_ranks(node: Mapping[str, object], node_path: str, form: NodeForm) -> Iterator[DeviceEntry]:
    for path, rank in walk_objects(node, node_path, form.ranks_key):
        # HCCL takes an empty rank_ip for the address of the node, so it stays under its own name.
        address = {} if rank.get("rank_ip") == "" else {"device_ip": "rank_ip"}
        members = _rename(rank, {"device_id": form.device_key, **address})
        places = {"device_id": join_key(path, form.device_key), "device_ip": join_key(path, "rank_ip")}
        # Any number of ranks on the host have device -1, which is the number of no device.
        number, rank_id = parse_number(members.get("device_id")), parse_number(rank.get("rank_id"))
        yield DeviceEntry(path, members, number, rank_id, places=places)


def _rename(members: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Return the members with those of `names` under the names that the rules know."""
    renamed = without(members, *names.values())
    return renamed | {known: members[own] for known, own in names.items() if own in members}


def decode_form(value: Mapping[str, object], form: NodeForm, *, empty_rank_ip: bool) -> RankTable:
    """Return the table; `value` must have passed `check_form` without an error.

    An empty rank_ip is what a rank without an address has, if `empty_rank_ip`; else it is kept as an extra key.
    """
    servers = tuple(_decode_node(node, form, empty_rank_ip=empty_rank_ip) for node in list_objects(value, "node_list"))
    rest = without(value, "version", "status", "node_list")
    return RankTable(form.dialect, servers, str(value["status"]), extra=rest)


def _decode_node(node: Mapping[str, object], form: NodeForm, *, empty_rank_ip: bool) -> Server:
    devices = tuple(
        _decode_rank(rank, form, empty_rank_ip=empty_rank_ip) for rank in list_objects(node, form.ranks_key)
    )
    return Server(str(node[form.node_key]), devices, extra=without(node, form.node_key, form.ranks_key))


def _decode_rank(rank: Mapping[str, object], form: NodeForm, *, empty_rank_ip: bool) -> Device:
    rest = dict(rank)
    device_id, rank_id = int(str(rest.pop(form.device_key, HOST_DEVICE))), int(str(rest.pop("rank_id")))
    address = pop_text(rest, "rank_ip") if empty_rank_ip or rest.get("rank_ip") else None
    sdid = str(rest.pop("sdid")) if "sdid" in rest else None
    return Device(device_id, rank_id, address, sdid, extra=rest)


def encode_form(table: RankTable, form: NodeForm, *, empty_rank_ip: bool) -> dict[str, object]:
    """Return the JSON object; `empty_rank_ip` writes the key also for ranks without an address of their own.

    Raises BuildError for what the dialect has no key for.
    """
    if table.super_pods or table.clusters or table.groups:
        message = f"the table has super pods, clusters or groups, which version {VERSION} has no key for"
        raise BuildError(message, "leave them out first")
    nodes = [_encode_node(server, form, empty_rank_ip=empty_rank_ip) for server in table.servers]
    return {"version": VERSION, "status": table.status, "node_list": nodes, **table.extra}


def _encode_node(server: Server, form: NodeForm, *, empty_rank_ip: bool) -> dict[str, object]:
    lost = [key for key in ("host_ip", "pod_ip", "group") if getattr(server, key) is not None]
    if lost:
        message = f"server {server.server_id!r} has {', '.join(lost)}, which version {VERSION} has no key for"
        raise BuildError(message, "leave it out first")
    ranks = [_encode_rank(device, form, empty_rank_ip=empty_rank_ip) for device in server.devices]
    return {form.node_key: server.server_id, form.ranks_key: ranks, **server.extra}


def _encode_rank(device: Device, form: NodeForm, *, empty_rank_ip: bool) -> dict[str, object]:
    extra = without(device.extra, "rank_ip") if device.device_ip else device.extra
    address = {"rank_ip": device.device_ip or ""} if device.device_ip or empty_rank_ip else {}
    sdid = {} if device.super_device_id is None else {"sdid": device.super_device_id}
    numbers = {"rank_id": str(device.rank_id), form.device_key: str(device.device_id)}
    return {**numbers, **address, **sdid, **extra}
