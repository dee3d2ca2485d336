"""Dialect template2-cloud: template 2 as hccl-controller and ModelArts wrote it, with pods and without rank ids.

The ranks follow the string order of server_id, then device_id, over all groups. In the model every device has the
`pod_name` of its instance in `Device.extra`, and a group's servers name it; a server in two groups appears in both.
Instances of one server that stand apart in the file are written side by side; their ranks do not depend on it.
Source: HCCL's parser: a table without version and without deploy_mode (EI0017 for missing keys).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ranktable.codec import Codec
from ranktable.codec.schema import Field, Schema, list_objects, without
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
from ranktable.errors import BuildError
from ranktable.model import Device, Group, RankTable, Server
from ranktable.problem import Problem
from ranktable.survey import Survey

DIALECT = "template2-cloud"

_INSTANCE = Schema(
    (
        Field("pod_name", missing="error", role="pod_name"),
        Field("server_id", missing="error", role="server_id"),
        Field("devices", "list", missing="error", of=device_schema("pod_name")),
    )
)
_GROUP = (
    Field("group_name", missing="error", role="group"),
    count_field("instance_count", "instance_list", noun="instance"),
    count_field("device_count", "instance_list", "devices", noun="device"),
)
_FORM = Form(
    DIALECT,
    Schema(
        (
            Field("status", missing="error"),
            count_field("group_count", "group_list", noun="group"),
            group_list(_GROUP, _INSTANCE),
        ),
        frozenset({"version"}),
    ),
)


def check_structure(value: Mapping[str, object]) -> list[Problem]:
    """Return every fault of the structure; empty when it can be decoded."""
    return check_form(value, _FORM)


def survey(value: Mapping[str, object]) -> Survey:
    """Return what can be read of the object, however faulty it is."""
    return survey_form(value, _FORM)


def decode(value: Mapping[str, object]) -> RankTable:
    """Return the table, with the ranks that HCCL gives its devices. `value` must have passed `check_structure`."""
    groups: list[Group] = []
    servers: list[Server] = []
    for members in list_objects(value, "group_list"):
        name, instances = str(members["group_name"]), list_objects(members, "instance_list")
        found = {
            "instance_count": _count_different(instances),
            "device_count": sum(_count_devices(each) for each in instances),
        }
        groups.append(Group(name, keep_wrong_counts(found, without(members, "group_name", "instance_list"))))
        servers += _decode_servers(instances, name)
    rest = keep_wrong_counts({"group_count": len(groups)}, without(value, "status", "group_list"))
    table = RankTable(DIALECT, tuple(servers), str(value["status"]), groups=tuple(groups), extra=rest)
    return replace(table, servers=tuple(_give_ranks(table)))


def _count_different(instances: list[Object]) -> int:
    """Return how many instances there are when those of equal keys are written as one."""
    return len({json.dumps(without(instance, "devices"), sort_keys=True) for instance in instances})


def _count_devices(instance: Object) -> int:
    return len(list_objects(instance, "devices"))


def _decode_servers(instances: list[Object], group: str) -> Iterator[Server]:
    """Yield the servers of one group; their ranks are still to be given."""
    devices: dict[str, list[Device]] = {}
    for instance in instances:
        devices.setdefault(str(instance["server_id"]), []).extend(_decode_devices(instance))
    for server_id, its_devices in devices.items():
        yield Server(server_id, tuple(its_devices), group=group)


def _decode_devices(instance: Object) -> Iterator[Device]:
    own = without(instance, "pod_name", "server_id", "devices")
    shared = {"pod_name": instance["pod_name"], **({INSTANCE: own} if own else {})}
    for members in list_objects(instance, "devices"):
        yield decode_instance_device(members, _FORM, **shared)


def _give_ranks(table: RankTable) -> Iterator[Server]:
    ranks = _implied_ranks(table)
    for place, server in enumerate(table.servers):
        devices = (replace(device, rank_id=ranks[place, position]) for position, device in enumerate(server.devices))
        yield replace(server, devices=tuple(devices))


def _implied_ranks(table: RankTable) -> dict[tuple[int, int], int]:
    """Return the rank of each device by the places of its server and of itself there."""
    keys = [
        (server.server_id, device.device_id, place, position)
        for place, server in enumerate(table.servers)
        for position, device in enumerate(server.devices)
    ]
    return {(place, position): rank for rank, (_, _, place, position) in enumerate(sorted(keys))}


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table`; decoding it gives `table` again.

    Raises BuildError when the ranks are not those that the order of the ids implies, when a device has no pod_name,
    and for what the dialect has no key for.
    """
    _check_ranks(table)
    servers = servers_of_groups(table)
    groups = [_encode_group(group, servers[group.name]) for group in table.groups]
    return {"status": table.status, "group_count": str(len(groups)), "group_list": groups, **table.extra}


def _check_ranks(table: RankTable) -> None:
    ranks = _implied_ranks(table)
    for place, server in enumerate(table.servers):
        for position, device in enumerate(server.devices):
            implied = ranks[place, position]
            if device.rank_id != implied:
                who = f"device {device.device_id} of server {server.server_id!r}"
                order = "the string order of server_id, then device_id"
                message = f"{who} has rank {device.rank_id}; {DIALECT} has no rank ids: {order} makes it {implied}"
                raise BuildError(message, "renumber the ranks in that order first")


def _encode_group(group: Group, servers: list[Server]) -> Object:
    instances = [instance for server in servers for instance in _split_instances(server)]
    return {
        "group_name": group.name,
        "instance_count": str(len(instances)),
        "device_count": str(sum(len(server.devices) for server in servers)),
        "instance_list": [_encode_instance(*instance, needs_address=len(instances) > 1) for instance in instances],
        **group.extra,
    }


def _split_instances(server: Server) -> list[tuple[Object, list[Device]]]:
    """Return the instances of a server, each as its own keys and its devices, in the order of the devices."""
    instances: dict[str, tuple[Object, list[Device]]] = {}
    for device in server.devices:
        if not isinstance(device.extra.get("pod_name"), str):
            message = f"device {device.device_id} of server {server.server_id!r} has no pod_name"
            raise BuildError(message, "name the pod of every device in its extra")
        own = {"pod_name": device.extra["pod_name"], "server_id": server.server_id}
        further = device.extra.get(INSTANCE)
        own |= further if isinstance(further, dict) else {}
        instances.setdefault(json.dumps(own, sort_keys=True), (own, []))[1].append(device)
    return list(instances.values())


def _encode_instance(own: Object, devices: list[Device], *, needs_address: bool) -> Object:
    """In a group of several instances HCCL wants the key device_ip also where there is no address: then it is empty."""
    empty = {"device_ip": ""} if needs_address else {}
    plain = (replace(device, extra=without(device.extra, "pod_name", INSTANCE)) for device in devices)
    return own | {"devices": [encode_device(device, _FORM.device, **empty) for device in plain]}


CODECS = {DIALECT: Codec(_FORM.schema, check_structure, survey, decode, encode)}
