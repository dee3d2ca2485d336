"""Dialect template2-lab: template 2 as written by hand for the first boards: one instance per rank, with rank_id.

The facts of the board (board_id, chip_info, para_plane_nic_*) stay in `RankTable.extra`. An instance holds exactly one
device. Instances of one server that stand apart in the file are written side by side, each with its rank.
Source: HCCL's parser: a table without version and with deploy_mode, and HCCL's documentation of 2019 to 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ranktable.codec import Codec
from ranktable.codec.schema import Field, Schema, list_objects, walk_objects, without
from ranktable.codec.servers import encode_device
from ranktable.codec.template2 import (
    INSTANCE,
    Form,
    Object,
    check_form,
    count_field,
    decode_instance_device,
    device_schema,
    group_list,
    keep_wrong_counts,
    servers_of_groups,
    survey_form,
)
from ranktable.model import Device, Group, RankTable, Server
from ranktable.problem import Problem, join_key
from ranktable.survey import Survey

DIALECT = "template2-lab"

_INSTANCE = Schema(
    (
        Field("rank_id", "number", missing="error", rule="R9", role="rank_id"),
        Field("server_id", missing="error", role="server_id"),
        Field("devices", "list", missing="error", of=device_schema()),
    )
)
_GROUP = (
    Field("group_name", missing="error", role="group"),
    count_field("instance_count", "instance_list", noun="instance"),
    count_field("device_num", "instance_list", noun="instance"),
    count_field("server_num", "instance_list", "server_id", noun="server", distinct=True),
)
_FORM = Form(
    DIALECT,
    Schema(
        (
            Field("status", missing="error"),
            # HCCL goes by this key alone: without it the table is taken for the cloud form, which needs pod_name.
            Field("deploy_mode", missing="error"),
            Field("para_plane_nic_location", missing="error"),
            Field("para_plane_nic_num", "number", rule="R29"),
            Field("para_plane_nic_name", "texts"),
            Field("board_id"),
            Field("chip_info"),
            count_field("group_count", "group_list", noun="group"),
            # `server_list`: addresses of the hosts' own network ports, which HCCL read before it gave up such ports.
            group_list(_GROUP, _INSTANCE, frozenset({"server_list"})),
        ),
        frozenset({"version"}),
    ),
)


def check_structure(value: Mapping[str, object]) -> list[Problem]:
    """Return every fault of the structure; empty when it can be decoded."""
    return [*check_form(value, _FORM), *_check_single_devices(value)]


def survey(value: Mapping[str, object]) -> Survey:
    """Return what can be read of the object, however faulty it is."""
    return survey_form(value, _FORM)


def _check_single_devices(value: Mapping[str, object]) -> Iterator[Problem]:
    """Rule R28: HCCL has one rank id per instance, and so one device."""
    for group_path, group in walk_objects(value, "", "group_list"):
        for path, instance in walk_objects(group, group_path, "instance_list"):
            devices = instance.get("devices")
            if isinstance(devices, list) and len(devices) > 1:
                message = f"the instance has {len(devices)} devices and one rank_id; an instance has one device"
                remedy = "write one instance for each device"
                yield Problem(join_key(path, "devices"), "R28", "error", message, remedy)


def decode(value: Mapping[str, object]) -> RankTable:
    """Return the table. `value` must have passed `check_structure` without an error."""
    groups: list[Group] = []
    servers: list[Server] = []
    for members in list_objects(value, "group_list"):
        name = str(members["group_name"])
        its_servers = _decode_servers(list_objects(members, "instance_list"), name)
        rest = keep_wrong_counts(_counts_of(its_servers), without(members, "group_name", "instance_list"))
        groups.append(Group(name, rest))
        servers += its_servers
    rest = keep_wrong_counts({"group_count": len(groups)}, without(value, "status", "group_list"))
    return RankTable(DIALECT, tuple(servers), str(value["status"]), groups=tuple(groups), extra=rest)


def _decode_servers(instances: list[Object], group: str) -> list[Server]:
    devices: dict[str, list[Device]] = {}
    for instance in instances:
        devices.setdefault(str(instance["server_id"]), []).append(_decode_instance(instance))
    return [Server(server_id, tuple(its_devices), group=group) for server_id, its_devices in devices.items()]


def _decode_instance(instance: Object) -> Device:
    own = without(instance, "rank_id", "server_id", "devices")
    (members,) = list_objects(instance, "devices")
    return decode_instance_device(members, _FORM, instance["rank_id"], **({INSTANCE: own} if own else {}))


def _counts_of(servers: list[Server]) -> dict[str, int]:
    num_devices = sum(len(server.devices) for server in servers)
    return {"device_num": num_devices, "server_num": len(servers), "instance_count": num_devices}


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table`; decoding it gives `table` again.

    Raises BuildError for what the dialect has no key for.
    """
    servers = servers_of_groups(table)
    groups = [_encode_group(group, servers[group.name]) for group in table.groups]
    return {"status": table.status, "group_count": str(len(groups)), **table.extra, "group_list": groups}


def _encode_group(group: Group, servers: list[Server]) -> Object:
    return {
        **{key: str(count) for key, count in _counts_of(servers).items()},
        "group_name": group.name,
        "instance_list": [_encode_instance(server, device) for server in servers for device in server.devices],
        **group.extra,
    }


def _encode_instance(server: Server, device: Device) -> Object:
    """HCCL wants the key device_ip also where there is no address: then it is empty."""
    plain = replace(device, extra=without(device.extra, INSTANCE))
    members = encode_device(plain, _FORM.device, device_ip="")
    further = device.extra.get(INSTANCE)
    own = further if isinstance(further, dict) else {}
    return {"rank_id": str(device.rank_id), "server_id": server.server_id, "devices": [members], **own}


CODECS = {DIALECT: Codec(_FORM.schema, check_structure, survey, decode, encode)}
