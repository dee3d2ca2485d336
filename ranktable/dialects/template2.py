"""Template 2, in its two forms: `group_list[].instance_list[].devices[]`, no version, every scalar a string.

An instance is a pod or a process. HCCL puts all instances with one server_id, of whatever group, on one server.

- template2-cloud: as hccl-controller and ModelArts wrote it, with pods and without rank ids. The ranks follow the
  string order of server_id, then device_id, over all groups. In the model every device has the `pod_name` of its
  instance in `Device.extra`, and a group's servers name it; a server in two groups appears in both.
- template2-lab: as written by hand for the first boards: one instance per rank and device, with rank_id. The facts of
  the board (board_id, chip_info, para_plane_nic_*) stay in `RankTable.extra`.

Instances of one server that stand apart in the file are written side by side, which changes no rank.
Source: HCCL's parser of tables without a version (it calls them "Standard"): with deploy_mode the lab form, else the
cloud form (EI0017 for missing keys); hccl-controller; HCCL's documentation of 2019 to 2021.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ranktable.dialects.foreign import has_any
from ranktable.dialects.servers import DEVICE_ID, decode_device, encode_device, servers_of_groups, survey_device
from ranktable.errors import BuildError
from ranktable.kinds import (
    DeviceEntry,
    Dialect,
    Entry,
    ServerEntry,
    Survey,
    find_repeats,
    rule_ids,
)
from ranktable.model import Device, Group, RankTable, Server
from ranktable.ordering import find_moved, number_by_position
from ranktable.problem import Problem, join_key, show_value
from ranktable.profile import Profile
from ranktable.rules import citations
from ranktable.rules.identity import check_counts
from ranktable.rules.registry import rule
from ranktable.schema import Count, Field, Schema, check_tree, list_objects, walk_objects, without
from ranktable.values import parse_number

CLOUD, LAB = "template2-cloud", "template2-lab"
INSTANCE = "instance"
"""Key of `Device.extra` for an instance's own further keys; a device of a file cannot have it."""

_MAX_GROUP_NAME = 127
_MAX_CLOUD_DEVICE_ID = 7
_PER_SERVER = (1, 2, 4, 8, 16)
_RULES = "R7 R8 R13 R14 R15 R16 R28 P1"
_READERS = frozenset({"hccl", "mindspore"})

Object = dict[str, object]
_NAME = Field("group_name", missing="error", role="group")


def _count(name: str, *steps: str, noun: str, distinct: bool = False) -> Field:
    """Return the key of a count, which rule R28 compares with what is listed."""
    return Field(name, "number", missing="error", rule="R28", count=Count(steps, noun, distinct))


def _schema(
    top: tuple[Field, ...], group: tuple[Field, ...], identity: Field, *, extras: frozenset[str] = frozenset()
) -> Schema:
    """Return the schema of a form; `identity` is the key of an instance beside its server and its devices."""
    # The model keeps something of the instance under these keys of a device.
    reserved = {INSTANCE, "pod_name"} if identity.name == "pod_name" else {INSTANCE}
    address = Field("device_ip", role="device_ip", empty_is_none=True)
    device = Schema((DEVICE_ID, address, *(Field(name, "misplaced") for name in sorted(reserved))))
    instance = Schema(
        (
            identity,
            Field("server_id", missing="error", role="server_id"),
            Field("devices", "list", missing="error", of=device),
        )
    )
    instances = Field("instance_list", "list", missing="error", of=instance)
    groups = Field("group_list", "list", missing="error", of=Schema((*group, instances), extras))
    group_count = _count("group_count", "group_list", noun="group")
    return Schema((Field("status", missing="error"), group_count, *top, groups), frozenset({"version"}))


_INSTANCES = _count("instance_count", "instance_list", noun="instance")
_CLOUD = _schema(
    (),
    (_NAME, _INSTANCES, _count("device_count", "instance_list", "devices", noun="device")),
    Field("pod_name", missing="error", role="pod_name"),
)
_LAB = _schema(
    (
        # HCCL goes by this key alone: without it the table is taken for the cloud form, which needs pod_name.
        Field("deploy_mode", missing="error"),
        Field("para_plane_nic_location", missing="error"),
        Field("para_plane_nic_num", "number", rule="R29"),
        Field("para_plane_nic_name", "texts"),
        Field("board_id"),
        Field("chip_info"),
    ),
    (
        _count("device_num", "instance_list", noun="instance"),
        _count("server_num", "instance_list", "server_id", noun="server", distinct=True),
        _INSTANCES,
        _NAME,
    ),
    Field("rank_id", "number", missing="error", rule="R9", role="rank_id"),
    # Addresses of the hosts' own network ports, which HCCL read before it gave up such ports.
    extras=frozenset({"server_list"}),
)


@dataclass(frozen=True, slots=True)
class Form:
    """One of the two forms, by its schema."""

    dialect: str
    schema: Schema

    def check_structure(self, value: Mapping[str, object]) -> list[Problem]:
        """Return every fault of the structure (R2, R4, R5, R28, R31, malformed numbers); empty when it can be read."""
        groups = (Entry(path, group) for path, group in walk_objects(value, "", "group_list"))
        same, remedy = "the same group_name stands at {}", "give each group its own name"
        return [
            *_check_no_version(value),
            *check_tree(value, self.schema),
            # The model tells groups apart by nothing else.
            *find_repeats(groups, "group_name", "R28", same, remedy),
            *(_check_single_devices(value) if self._has_ranks else ()),
        ]

    def survey(self, value: Mapping[str, object]) -> Survey:
        """Return what can be read of the object: one server per server_id, in the order of their first instances."""
        firsts: dict[str, tuple[str, Object]] = {}
        devices: dict[str, list[DeviceEntry]] = {}
        for path, instance in _walk_instances(value):
            server_id = instance.get("server_id")
            server = f"id {server_id}" if isinstance(server_id, str) else f"path {path}"
            firsts.setdefault(server, (path, instance))
            devices.setdefault(server, []).extend(self._survey_devices(path, instance))
        servers = tuple(ServerEntry(*first, tuple(devices[server])) for server, first in firsts.items())
        return Survey("", value, servers, dialect=self.dialect)

    def decode(self, value: Mapping[str, object]) -> RankTable:
        """Return the table, in the cloud form with the ranks that HCCL gives its devices.

        `value` must have passed `check_structure` without an error. A count that is right is left out, because writing
        computes it; a wrong one is kept, so that it stays visible.
        """
        groups: list[Group] = []
        servers: list[Server] = []
        for members in list_objects(value, "group_list"):
            name = str(members["group_name"])
            its_servers = self._decode_servers(list_objects(members, "instance_list"), name)
            rest = without(members, "group_name", "instance_list")
            groups.append(Group(name, _keep_wrong_counts(rest, self._counts(its_servers))))
            servers += its_servers
        extra = _keep_wrong_counts(without(value, "status", "group_list"), {"group_count": str(len(groups))})
        numbered = tuple(servers) if self._has_ranks else number_by_position(servers)
        return RankTable(self.dialect, numbered, str(value["status"]), groups=tuple(groups), extra=extra)

    def encode(self, table: RankTable) -> dict[str, object]:
        """Return the JSON object of `table`; decoding it gives `table` again.

        Raises BuildError in the cloud form for ranks that the order of the ids does not imply and for a device without
        pod_name, and in both for what they have no key for.
        """
        _refuse_foreign(table)
        if not self._has_ranks:
            _check_ranks(table)
        servers = servers_of_groups(table)
        groups = [self._encode_group(group, servers[group.name]) for group in table.groups]
        return {"status": table.status, "group_count": str(len(groups)), **table.extra, "group_list": groups}

    @property
    def _instance(self) -> Schema:
        return self.schema.within("group_list").within("instance_list")

    @property
    def _device(self) -> Schema:
        return self._instance.within("devices")

    @property
    def _has_ranks(self) -> bool:
        return "rank_id" in self._instance.by_name

    def _survey_devices(self, path: str, instance: Object) -> Iterator[DeviceEntry]:
        """The lab form keeps `rank_id` in the instance; the survey names it as a member of the device."""
        places = {"rank_id": join_key(path, "rank_id")} if self._has_ranks else None
        rank = {"rank_id": instance["rank_id"]} if self._has_ranks and "rank_id" in instance else {}
        for device_path, device in walk_objects(instance, path, "devices"):
            entry = survey_device({**device, **rank}, device_path, self._device)
            yield replace(entry, rank_id=parse_number(rank.get("rank_id")), places=places)
            rank = {}  # a second device has no rank, which R28 reports

    def _decode_servers(self, instances: list[Object], group: str) -> list[Server]:
        devices: dict[str, list[Device]] = {}
        for instance in instances:
            devices.setdefault(str(instance["server_id"]), []).extend(self._decode_devices(instance))
        return [Server(server_id, tuple(its_devices), group=group) for server_id, its_devices in devices.items()]

    def _decode_devices(self, instance: Object) -> Iterator[Device]:
        own = without(instance, *self._instance.by_name)
        shared = {key: instance[key] for key in ("pod_name",) if key in self._instance.by_name}
        shared |= {INSTANCE: own} if own else {}
        rank = instance["rank_id"] if self._has_ranks else -1
        for members in list_objects(instance, "devices"):
            device = decode_device(members, self._device, rank_id=rank)
            yield replace(device, extra={**shared, **without(device.extra, "device_ip")})  # an empty one is none

    def _encode_group(self, group: Group, servers: list[Server]) -> Object:
        instances = [instance for server in servers for instance in self._split_instances(server)]
        # HCCL wants the key device_ip also where there is no address, in the cloud form from two instances on.
        empty = {"device_ip": ""} if self._has_ranks or len(instances) > 1 else {}
        listed = {
            "group_name": group.name,
            "instance_list": [self._encode_instance(*instance, empty) for instance in instances],
            **self._counts(servers),
        }
        in_order = {field.name: listed[field.name] for field in self.schema.within("group_list").fields}
        return {**in_order, **group.extra}

    def _counts(self, servers: list[Server]) -> dict[str, str]:
        devices = sum(len(server.devices) for server in servers)
        counts = {"device_count": devices, "device_num": devices, "server_num": len(servers)}
        counts["instance_count"] = sum(len(self._split_instances(server)) for server in servers)
        known = self.schema.within("group_list").by_name
        return {key: str(count) for key, count in counts.items() if key in known}

    def _split_instances(self, server: Server) -> list[tuple[Object, list[Device]]]:
        """Return the instances of a server, each as its own keys and its devices, in the order of the devices."""
        instances: dict[object, tuple[Object, list[Device]]] = {}
        for place, device in enumerate(server.devices):
            further = device.extra.get(INSTANCE)
            own = {**self._identify(server, device), "server_id": server.server_id}
            own |= further if isinstance(further, dict) else {}
            key = place if self._has_ranks else json.dumps(own, sort_keys=True)
            instances.setdefault(key, (own, []))[1].append(device)
        return list(instances.values())

    def _identify(self, server: Server, device: Device) -> Object:
        if self._has_ranks:
            return {"rank_id": str(device.rank_id)}
        if not isinstance(device.extra.get("pod_name"), str):
            message = f"device {device.device_id} of server {server.server_id!r} has no pod_name"
            raise BuildError(message, "name the pod of every device in its extra")
        return {"pod_name": device.extra["pod_name"]}

    def _encode_instance(self, own: Object, devices: list[Device], empty: dict[str, str]) -> Object:
        kept = (INSTANCE,) if self._has_ranks else (INSTANCE, "pod_name")
        plain = (replace(device, extra=without(device.extra, *kept)) for device in devices)
        return own | {"devices": [encode_device(device, self._device, **empty) for device in plain]}


def _keep_wrong_counts(members: Object, right: dict[str, str]) -> Object:
    return {key: value for key, value in members.items() if key not in right or right[key] != value}


def _walk_instances(value: Mapping[str, object]) -> Iterator[tuple[str, Object]]:
    for group_path, group in walk_objects(value, "", "group_list"):
        yield from walk_objects(group, group_path, "instance_list")


def _check_no_version(value: Mapping[str, object]) -> Iterator[Problem]:
    if "version" in value:
        message = "a table with group_list has no version; HCCL would look for server_list in it"
        yield Problem("version", "R2", "error", message, "remove the key", show_value(value["version"]))


def _check_single_devices(value: Mapping[str, object]) -> Iterator[Problem]:
    """Rule R28: HCCL has one rank id per instance of the lab form, and so one device."""
    for path, instance in _walk_instances(value):
        devices = instance.get("devices")
        if isinstance(devices, list) and len(devices) > 1:
            message = f"the instance has {len(devices)} devices and one rank_id; an instance has one device"
            yield Problem(join_key(path, "devices"), "R28", "error", message, "write one instance for each device")


def _check_ranks(table: RankTable) -> None:
    moved = find_moved(table.servers, number_by_position(table.servers))
    if moved is not None:
        server, device, implied = moved
        who = f"device {device.device_id} of server {server.server_id!r} has rank {device.rank_id}"
        order = f"the string order of server_id, then device_id, makes it {implied}"
        raise BuildError(f"{who}; {CLOUD} has no rank ids: {order}", "number the ranks in that order first")


def _refuse_foreign(table: RankTable) -> None:
    """Raise BuildError for what template 2 has no key for."""
    if table.super_pods or table.clusters:
        message = "the table has super pods or clusters, which template 2 has no key for"
        raise BuildError(message, "leave them out first")
    for server in table.servers:
        has_sdid = any(device.super_device_id is not None for device in server.devices)
        named = {"host_ip": server.host_ip, "pod_ip": server.pod_ip, "super_device_id": "" if has_sdid else None}
        lost = ", ".join([*(key for key, value in named.items() if value is not None), *server.extra])
        if lost:
            message = f"server {server.server_id!r} has {lost}, which template 2 has no key for"
            raise BuildError(message, "leave it out first")


@rule(
    "R28",
    "the counts and names of template 2 agree with what is listed",
    severity="error or warning",
    sources=(citations.STANDARD,),
)
def check_template2(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """Groups, instances and devices are counted in the file; pods are named once; HCCL's further demands."""
    groups = [Entry(path, group) for path, group in walk_objects(survey.members, "", "group_list")]
    schema = _CLOUD if survey.dialect == CLOUD else _LAB
    yield from check_counts(survey, schema)
    for group in groups:
        yield from _check_group_name(group)
        yield from check_counts(group, schema.within("group_list"))
    if survey.dialect == CLOUD:
        yield from _check_pods(groups)
        yield from _check_cloud_devices(survey)
    else:
        for group in groups:
            yield from _check_average(group, profile)
        yield from _check_board(survey, profile)
    if profile.is_ascend:
        yield from _check_addresses_present(survey, groups)


@rule("R29", "para_plane_nic_num is the number of names in para_plane_nic_name", severity="warning")
def check_nic_count(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A convention of the hand-written tables: HCCL ignores both for ports of devices."""
    names, number = survey.members.get("para_plane_nic_name"), parse_number(survey.members.get("para_plane_nic_num"))
    if isinstance(names, list) and number is not None and number != len(names):
        message = f"para_plane_nic_name lists {len(names)} names"
        yield survey.complain("para_plane_nic_num", "R29", "warning", message, f'write "{len(names)}"')


def _check_group_name(group: Entry) -> Iterator[Problem]:
    name = group.text("group_name")
    if name is not None and len(name.encode("utf-8", "surrogatepass")) > _MAX_GROUP_NAME:
        message = f"the name is longer than {_MAX_GROUP_NAME} bytes"
        yield group.complain("group_name", "R28", "error", message, "shorten it")


def _check_pods(groups: list[Entry]) -> Iterator[Problem]:
    """A process finds its rank by the name of its pod, so the name stands once in the whole table."""
    pods = (Entry(*found) for group in groups for found in walk_objects(group.members, group.path, "instance_list"))
    same = "the same pod_name stands at {}"
    yield from find_repeats(pods, "pod_name", "R28", same, "give each pod its own name")


def _check_cloud_devices(survey: Survey) -> Iterator[Problem]:
    """The parser of this form knows boards of eight devices only."""
    for device in survey.devices:
        if device.device_id is not None and device.device_id > _MAX_CLOUD_DEVICE_ID:
            message = f"HCCL reads device numbers up to {_MAX_CLOUD_DEVICE_ID} in a table without a version"
            yield device.complain("device_id", "R28", "error", message, "write the table as version 1.0")


def _check_average(group: Entry, profile: Profile) -> Iterator[Problem]:
    """The 310P (300I Duo) is exempt."""
    num_devices, num_servers = (parse_number(group.members.get(key)) for key in ("device_num", "server_num"))
    if not num_devices or not num_servers or profile.chip == "300i-duo":
        return
    if num_devices % num_servers or num_devices // num_servers not in _PER_SERVER:
        message = f"{num_devices} devices on {num_servers} servers are not 1, 2, 4, 8 or 16 on each"
        yield group.complain("device_num", "R28", "error", message, "list as many devices on every server")


def _check_board(survey: Survey, profile: Profile) -> Iterator[Problem]:
    location = survey.text("para_plane_nic_location")
    if location is not None and location != "device" and profile.is_ascend:
        message = "HCCL reads tables only whose network ports belong to the devices"
        yield survey.complain("para_plane_nic_location", "R28", "error", message, 'write "device"')
    if survey.text("deploy_mode") not in (None, "lab"):
        message = "whatever stands here, HCCL takes a table that has the key for the lab form"
        yield survey.complain("deploy_mode", "R28", "warning", message, 'write "lab"')


def _check_addresses_present(survey: Survey, groups: list[Entry]) -> Iterator[Problem]:
    """The key must be there, and may be empty: in the lab form always, in the cloud form from two instances on."""
    for group in groups:
        instances = list(walk_objects(group.members, group.path, "instance_list"))
        if survey.dialect == CLOUD and len(instances) < 2:
            continue
        for instance_path, instance in instances:
            for path, device in walk_objects(instance, instance_path, "devices"):
                if "device_ip" not in device:
                    message = "the key is missing; HCCL's parser wants it even where it is empty"
                    remedy = "write the address of the device's port (hccn_tool -i DEVICE_ID -ip -g)"
                    yield DeviceEntry(path, device).complain("device_ip", "R28", "error", message, remedy)


def _is_lab(value: Mapping[str, object]) -> str:
    telling = [key for key in ("board_id", "chip_info", "deploy_mode", "para_plane_nic_location") if key in value]
    if "group_list" not in value or (telling and "deploy_mode" in telling):
        return " and ".join(telling) if "group_list" in value else ""
    # Without deploy_mode HCCL would take the table for the cloud form, which has pods in place of ranks.
    instances = [each for group in list_objects(value, "group_list") for each in list_objects(group, "instance_list")]
    has_ranks = any("rank_id" in each for each in instances) and not any("pod_name" in each for each in instances)
    return "group_list with rank_id in its instances" if has_ranks else ""


DIALECTS = (
    Dialect(
        name=LAB,
        title="a template 2 lab rank table (board_id, group_list)",
        consumer="HCCL of 2019 to 2021",
        recognise=_is_lab,
        sources=(citations.STANDARD,),
        codec=Form(LAB, _LAB),
        rules=rule_ids(_RULES, "R9 R29"),
        readers=_READERS,
        writes_empty_addresses=True,
        refusal="the board and the chip of a lab table cannot be made up, and its boards are those of 2019 to 2021",
    ),
    Dialect(
        name=CLOUD,
        title="a template 2 cloud rank table (group_list, no version)",
        consumer="older HCCL and ModelArts",
        recognise=has_any("group_list", "group_count"),
        keys=("group_list", "group_count"),
        sources=(citations.STANDARD,),
        codec=Form(CLOUD, _CLOUD),
        rules=rule_ids(_RULES),
        readers=_READERS,
        writes_empty_addresses=True,
        ranks_by_position=True,
        refusal="its pods cannot be made up, and HCCL reads version 1.0 wherever it reads this one",
    ),
)
