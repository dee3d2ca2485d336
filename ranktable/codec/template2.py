"""What both forms of template 2 share: `group_list[].instance_list[].devices[]`, no version, every scalar a string.

An instance is a pod or a process. HCCL puts all instances with one server_id, of whatever group, on one server.
Source: HCCL's parser of tables without a version (it calls them "Standard") and hccl-controller, which wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ranktable.codec.schema import Count, Field, Schema, check_tree, walk_objects, without
from ranktable.codec.servers import DEVICE_ID, decode_device, survey_device
from ranktable.errors import BuildError
from ranktable.model import Device, RankTable, Server
from ranktable.problem import Problem, join_key, show_value
from ranktable.survey import DeviceEntry, Entry, ServerEntry, Survey, find_repeats
from ranktable.values import parse_number

INSTANCE = "instance"
"""Key of `Device.extra` for an instance's own further keys; a device of a file cannot have it."""

Object = dict[str, object]


@dataclass(frozen=True, slots=True)
class Form:
    """One of the two forms, by its schema."""

    dialect: str
    schema: Schema

    @property
    def device(self) -> Schema:
        """What a device consists of."""
        return self.schema.within("group_list").within("instance_list").within("devices")


def device_schema(*reserved: str) -> Schema:
    """Return the schema of a device without the keys under which the model keeps something of the instance."""
    address = Field("device_ip", role="device_ip", empty_is_none=True)
    return Schema((DEVICE_ID, address, *(Field(name, "misplaced") for name in (INSTANCE, *reserved))))


def group_list(fields: tuple[Field, ...], instance: Schema, extras: frozenset[str] = frozenset()) -> Field:
    """Return the key of the groups; the instances are the last field of each."""
    instances = Field("instance_list", "list", missing="error", of=instance)
    return Field("group_list", "list", missing="error", of=Schema((*fields, instances), extras))


def count_field(name: str, *steps: str, noun: str, distinct: bool = False) -> Field:
    """Return the key of a count, which rule R28 compares with what is listed."""
    return Field(name, "number", missing="error", rule="R28", count=Count(steps, noun, distinct))


def check_form(value: Mapping[str, object], form: Form) -> list[Problem]:
    """Return every fault of the structure (R2, R4, R5, R31 and malformed numbers) of a table of `form`."""
    names = (Entry(path, group) for path, group in walk_objects(value, "", "group_list"))
    return [
        *_check_no_version(value),
        *check_tree(value, form.schema),
        # The model tells groups apart by nothing else.
        *find_repeats(names, "group_name", "R28", "the same group_name stands at {}", "give each group its own name"),
    ]


def survey_form(value: Mapping[str, object], form: Form) -> Survey:
    """Return what can be read of the object: one server per server_id, in the order of their first instances.

    The lab form keeps `rank_id` in the instance; the survey names it as a member of the device, with its true path.
    """
    has_ranks = "rank_id" in form.schema.within("group_list").within("instance_list").by_name
    firsts: dict[str, tuple[str, Object]] = {}
    devices: dict[str, list[DeviceEntry]] = {}
    for path, instance in _walk_instances(value):
        server_id = instance.get("server_id")
        server = f"id {server_id}" if isinstance(server_id, str) else f"path {path}"
        firsts.setdefault(server, (path, instance))
        devices.setdefault(server, []).extend(_survey_devices(path, instance, form, has_ranks=has_ranks))
    servers = tuple(ServerEntry(*first, tuple(devices[server])) for server, first in firsts.items())
    return Survey("", value, servers, dialect=form.dialect)


def _survey_devices(path: str, instance: Object, form: Form, *, has_ranks: bool) -> Iterator[DeviceEntry]:
    places = {"rank_id": join_key(path, "rank_id")} if has_ranks else None
    rank = {"rank_id": instance["rank_id"]} if has_ranks and "rank_id" in instance else {}
    for device_path, device in walk_objects(instance, path, "devices"):
        entry = survey_device({**device, **rank}, device_path, form.device)
        yield replace(entry, rank_id=parse_number(rank.get("rank_id")), places=places)
        rank = {}  # a second device has no rank, which R28 reports


def decode_instance_device(members: Object, form: Form, rank_id: object = -1, **shared: object) -> Device:
    """Return a device with what its instance says in its extra keys; an empty address is none."""
    device = decode_device(members, form.device, rank_id=rank_id)
    return replace(device, extra={**shared, **without(device.extra, "device_ip")})


def _walk_instances(value: Mapping[str, object]) -> Iterator[tuple[str, Object]]:
    for group_path, group in walk_objects(value, "", "group_list"):
        yield from walk_objects(group, group_path, "instance_list")


def _check_no_version(value: Mapping[str, object]) -> Iterator[Problem]:
    if "version" in value:
        message = "a table with group_list has no version; HCCL would look for server_list in it"
        yield Problem("version", "R2", "error", message, "remove the key", show_value(value["version"]))


def keep_wrong_counts(found: Mapping[str, int], group: Object) -> Object:
    """Take the counts out of the members of a group or table and return the rest of it.

    A count that is right is left out, because writing computes it; a wrong one is kept, so that it stays visible.
    """
    return {key: text for key, text in group.items() if key not in found or parse_number(text) != found[key]}


def servers_of_groups(table: RankTable) -> dict[str, list[Server]]:
    """Return the servers of each group of the table, in the order of both.

    Raises BuildError for a server in no group of the table, and for what template 2 has no key for.
    """
    members: dict[str, list[Server]] = {group.name: [] for group in table.groups}
    for server in table.servers:
        if server.group is None or server.group not in members:
            message = f"server {server.server_id!r} is in none of the table's groups, which template 2 consists of"
            raise BuildError(message, "name one of them in Server.group")
        members[server.group].append(server)
        lost = _lost_keys(server)
        if lost:
            message = f"server {server.server_id!r} has {lost}, which template 2 has no key for"
            raise BuildError(message, "leave it out first")
    if table.super_pods or table.clusters:
        raise BuildError(
            "the table has super pods or clusters, which template 2 has no key for", "leave them out first"
        )
    return members


def _lost_keys(server: Server) -> str:
    has_sdid = any(device.super_device_id is not None for device in server.devices)
    named = {"host_ip": server.host_ip, "pod_ip": server.pod_ip, "super_device_id": "" if has_sdid else None}
    return ", ".join([*(key for key, value in named.items() if value is not None), *server.extra])
