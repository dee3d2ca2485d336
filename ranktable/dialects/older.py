"""Older kinds: template 2 in its two forms, and heterogeneous groups. Every scalar is a string.

Template 2 is `group_list[].instance_list[].devices[]` without a version. An instance is a pod or a process. HCCL puts
all instances with one server_id, of whatever group, on one server.

- template2-cloud: as hccl-controller and ModelArts wrote it, with pods and without rank ids. The ranks follow the
  string order of server_id, then device_id, over all groups.
- template2-lab: as written by hand for the first boards: one instance per rank and device, with rank_id.
- 1.1: `node_list[].ranks[]`, groups that mix devices and hosts; a rank on a host has device -1. HCCL takes an empty
  rank_ip for the address of the node; with heterog_sub_version every rank needs the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ranktable.kinds import (
    DeviceEntry,
    Dialect,
    Entry,
    ServerEntry,
    Survey,
    find_repeats,
    has_any,
    join_servers,
    rule_ids,
    survey_device,
)
from ranktable.problem import Problem, join_key
from ranktable.profile import Profile
from ranktable.rules import citations, rule
from ranktable.rules.identity import check_counts
from ranktable.schema import Count, Field, Members, Schema, check_limits, list_objects, walk_objects
from ranktable.values import parse_address

_CLOUD_NAME, _LAB_NAME, _MIXED = "template2-cloud", "template2-lab", "1.1"
_RULES = "R7 R8 R13 R14 R15 R16 R28 P1"
_READERS = frozenset({"hccl", "mindspore"})
_PER_SERVER = (1, 2, 4, 8, 16)
_MAX_PORT = 65535
_DEVICE_IP = Field("device_ip", role="device_ip", empty_is_none=True)


def _count(name: str, *steps: str, noun: str, distinct: bool = False) -> Field:
    """Return the key of a count, which rule R28 compares with what is listed."""
    return Field(name, "number", missing="error", rule="R28", count=Count(steps, noun, distinct))


def _schema(
    top: tuple[Field, ...],
    counts: tuple[Field, ...],
    identity: Field,
    devices: tuple[int, int],
    extras: frozenset[str] = frozenset(),
) -> Schema:
    """Return the schema of a form of template 2.

    `identity` is the key of an instance beside its server and its devices; `devices` are the limits of device numbers.
    """
    number = Field("device_id", "number", missing="error", rule="R8", role="device_id", limits=devices)
    instance = Schema(
        (
            identity,
            Field("server_id", missing="error", role="server_id"),
            Field("devices", "list", missing="error", of=Schema((number, _DEVICE_IP))),
        )
    )
    group = Schema(
        (
            Field("group_name", missing="error", role="group", limits=(0, 127)),
            _count("instance_count", "instance_list", noun="instance"),
            *counts,
            Field("instance_list", "list", missing="error", of=instance),
        ),
        extras,
    )
    count = _count("group_count", "group_list", noun="group")
    listed = Field("group_list", "list", missing="error", role="groups", of=group)
    return Schema((Field("status", missing="error"), count, *top, listed), frozenset({"version"}))


_CLOUD = _schema(
    (),
    (_count("device_count", "instance_list", "devices", noun="device"),),
    Field("pod_name", missing="error", role="pod_name"),
    (0, 7),
)
_LAB = _schema(
    (
        # HCCL goes by this key alone: without it the table is taken for the cloud form, which needs pod_name.
        Field("deploy_mode", missing="error"),
        Field("para_plane_nic_location", missing="error", choices=("device",)),
        Field("para_plane_nic_num", "number", rule="R29"),
        Field("para_plane_nic_name", "texts"),
        Field("board_id"),
        Field("chip_info"),
    ),
    (
        _count("device_num", "instance_list", noun="instance"),
        _count("server_num", "instance_list", "server_id", noun="server", distinct=True),
    ),
    Field("rank_id", "number", missing="error", rule="R9", role="rank_id"),
    (0, 2**32 - 1),
    # Addresses of the hosts' own network ports, which HCCL read before it gave up such ports.
    frozenset({"server_list"}),
)


def _walk_instances(value: Members) -> Iterator[tuple[str, dict[str, object]]]:
    for group_path, group in walk_objects(value, "", "group_list"):
        yield from walk_objects(group, group_path, "instance_list")


def _survey(value: Members, kind: Dialect) -> Survey:
    """The lab form keeps `rank_id` in the instance; the survey names it as a member of the device."""
    device_schema = kind.known_schema.within("group_list").within("instance_list").within("devices")
    found = []
    for path, instance in _walk_instances(value):
        rank = {"rank_id": instance["rank_id"]} if "rank_id" in instance and kind.name == _LAB_NAME else {}
        devices = []
        for device_path, device in walk_objects(instance, path, "devices"):
            entry = survey_device({**device, **rank}, device_path, device_schema)
            devices.append(replace(entry, places={"rank_id": join_key(path, "rank_id")}))
            rank = {}  # a second device has no rank, which R28 reports
        members = {key: member for key, member in instance.items() if key not in ("devices", "rank_id")}
        found.append((ServerEntry(path, members), devices))
    return Survey("", value, join_servers(found), kind.name)


@rule(
    "R28",
    "the counts and names of template 2 agree with what is listed",
    severity="error or warning",
    sources=(citations.STANDARD,),
)
def check_template2(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """Groups, instances and devices are counted in the file; pods are named once; HCCL's further demands."""
    schema, groups = survey.kind.known_schema, survey.entries("group_list")
    yield from check_limits(survey.members, schema, "R28")
    yield from check_counts(survey, schema)
    for group in groups:
        yield from check_counts(group, schema.within("group_list"))
    same, remedy = "the same group_name stands at {}", "give each group its own name"
    yield from find_repeats(groups, "group_name", "R28", same, remedy)
    instances = [entry for group in groups for entry in group.entries("instance_list")]
    if survey.dialect == _CLOUD_NAME:
        # A process finds its rank by the name of its pod, so the name stands once in the whole table.
        same, remedy = "the same pod_name stands at {}", "give each pod its own name"
        yield from find_repeats(instances, "pod_name", "R28", same, remedy)
    else:
        yield from _check_lab(survey, groups, instances, profile)
    for group in groups if profile.is_ascend else ():
        yield from _check_addresses_present(group, survey.dialect)


def _check_lab(survey: Survey, groups: list[Entry], instances: list[Entry], profile: Profile) -> Iterator[Problem]:
    if survey.text("deploy_mode") not in (None, "lab"):
        message = "whatever stands here, HCCL takes a table that has the key for the lab form"
        yield survey.complain("deploy_mode", "R28", message, 'write "lab"', "warning")
    for instance in instances:
        if len(instance.entries("devices")) > 1:
            message = f"the instance has {len(instance.entries('devices'))} devices and one rank_id"
            yield instance.complain("devices", "R28", message, "write one instance for each device")
    for group in groups if profile.chip != "300i-duo" else ():
        num_devices, num_servers = group.number("device_num"), group.number("server_num")
        if num_devices and num_servers and num_devices / num_servers not in _PER_SERVER:
            message = f"{num_devices} devices on {num_servers} servers are not 1, 2, 4, 8 or 16 on each"
            yield group.complain("device_num", "R28", message, "list as many devices on every server")


def _check_addresses_present(group: Entry, dialect: str) -> Iterator[Problem]:
    """The key must be there, and may be empty: in the lab form always, in the cloud form from two instances on."""
    instances = group.entries("instance_list")
    for instance in instances if dialect == _LAB_NAME or len(instances) > 1 else ():
        for device in instance.entries("devices"):
            if not device.has("device_ip"):
                message = "the key is missing; HCCL's parser wants it even where it is empty"
                remedy = "write the address of the device's port (hccn_tool -i DEVICE_ID -ip -g)"
                yield device.complain("device_ip", "R28", message, remedy)


@rule("R29", "para_plane_nic_num is the number of names in para_plane_nic_name", severity="warning")
def check_nic_count(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A convention of the hand-written tables: HCCL ignores both for ports of devices."""
    names, number = survey.members.get("para_plane_nic_name"), survey.number("para_plane_nic_num")
    if isinstance(names, list) and number is not None and number != len(names):
        message = f"para_plane_nic_name lists {len(names)} names"
        yield survey.complain("para_plane_nic_num", "R29", message, f'write "{len(names)}"', "warning")


@rule(
    "R33",
    "version 1.1: collective_id, mode, node addresses and ports are what HCCL reads",
    severity="error or warning",
    sources=(citations.HETEROGENEOUS,),
)
def check_heterogeneous(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Port 0 stands for the default. A rank without an address of its own listens on that of its node."""
    yield from check_limits(survey.members, survey.kind.known_schema, "R33")
    owners = {device.path: server for server in survey.servers for device in server.devices}
    for server in survey.servers:
        if server.server_id and parse_address(server.server_id) is None:
            remedy = "write the address of the host, not its name"
            yield server.complain("server_id", "R33", "node_addr must be an IPv4 or IPv6 address", remedy)

    def place(device: DeviceEntry) -> tuple[str, int | None] | None:
        port, owner = device.number("port"), owners[device.path]
        is_one = port is not None and 0 < port <= _MAX_PORT
        return (device.text("device_ip") or owner.server_id or owner.path, port) if is_one else None

    same, remedy = "the same address and port stand at {}", "give each rank of an address its own port"
    yield from find_repeats(survey.devices, "port", "R33", same, remedy, place, severity="warning")
    for device in survey.devices if survey.has("heterog_sub_version") else ():
        needed = ("device_id", "port", "rank_ip", "sdid", "bind_device_id")
        for key in needed if device.text("device_id") == "-1" else needed[:-1]:
            role = {"rank_ip": "device_ip", "sdid": "super_device_id"}.get(key, key)
            if not device.has(key) and not device.has(role):
                message = "the key is missing; with heterog_sub_version every rank needs it"
                yield device.complain(key, "R33", message, f"add {key!r}")


_RANK = Schema(
    (
        Field("rank_id", "number", missing="error", rule="R9", role="rank_id"),
        Field("device_id", "device_number", rule="R8", role="device_id"),
        Field("rank_ip", role="device_ip", empty_is_none=True),
        Field("port", "number", rule="R33", limits=(0, _MAX_PORT)),
        Field("sdid", "number", rule="R33", role="super_device_id"),
        Field("bind_device_id", "device_number", rule="R8"),
    )
)
_NODE = Schema(
    (
        Field("node_addr", missing="error", role="server_id"),
        Field("ranks", "list", missing="error", role="devices", of=_RANK),
    )
)
_HETEROGENEOUS = Schema(
    (
        Field("version"),
        Field("status", missing="error"),
        Field("collective_id", missing="error", limits=(0, 127)),
        Field("heterog_sub_version", choices=("1.2",)),
        Field("mode", choices=("tcp", "rdma")),
        Field("node_list", "list", missing="error", role="servers", of=_NODE),
    )
)


def _is_lab(value: Members) -> str:
    telling = [key for key in ("board_id", "chip_info", "deploy_mode", "para_plane_nic_location") if key in value]
    if "group_list" not in value or "deploy_mode" in telling:
        return " and ".join(telling) if "group_list" in value else ""
    # Without deploy_mode HCCL would take the table for the cloud form, which has pods in place of ranks.
    instances = [each for group in list_objects(value, "group_list") for each in list_objects(group, "instance_list")]
    has_ranks = any("rank_id" in each for each in instances) and not any("pod_name" in each for each in instances)
    return "group_list with rank_id in its instances" if has_ranks else ""


DIALECTS = (
    Dialect(
        name=_MIXED,
        title="a heterogeneous rank table (version 1.1)",
        consumer="HCCL groups of hosts and devices",
        recognise=has_any("node_list", "collective_id"),
        keys=("node_list", "collective_id"),
        sources=(citations.HETEROGENEOUS,),
        schema=_HETEROGENEOUS,
        versions=(_MIXED,),
        rules=rule_ids("R7 R8 R9 R13 R15 R33 P1"),
        readers=_READERS,
        max_bytes=10 * 1024,
    ),
    Dialect(
        name=_LAB_NAME,
        title="a template 2 lab rank table (board_id, group_list)",
        consumer="HCCL of 2019 to 2021",
        recognise=_is_lab,
        sources=(citations.STANDARD,),
        schema=_LAB,
        make_survey=_survey,
        rules=rule_ids(_RULES, "R9 R29"),
        readers=_READERS,
        writes_empty_addresses=True,
    ),
    Dialect(
        name=_CLOUD_NAME,
        title="a template 2 cloud rank table (group_list, no version)",
        consumer="older HCCL and ModelArts",
        recognise=has_any("group_list", "group_count"),
        keys=("group_list", "group_count"),
        sources=(citations.STANDARD,),
        schema=_CLOUD,
        make_survey=_survey,
        rules=rule_ids(_RULES),
        readers=_READERS,
        writes_empty_addresses=True,
        ranks_by_position=True,
    ),
)
