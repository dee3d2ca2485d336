"""What both forms of template 2 share: `group_list[].instance_list[].devices[]`, no version, every scalar a string.

An instance is a pod or a process. HCCL puts all instances with one server_id, of whatever group, on one server.
Source: HCCL's parser of tables without a version (it calls them "Standard") and hccl-controller, which wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ranktable.codec.members import walk_objects
from ranktable.codec.shape import Key, check_shape, parse_number
from ranktable.errors import BuildError
from ranktable.model import RankTable, Server
from ranktable.problem import Problem, join_key, show_value
from ranktable.survey import DeviceEntry, ServerEntry, Survey

INSTANCE = "instance"
"""Key of `Device.extra` for an instance's own further keys; a device of a file cannot have it."""

Object = dict[str, object]


@dataclass(frozen=True, slots=True)
class Form:
    """The keys of one of the two forms: those that are checked, and those that are known and left alone."""

    dialect: str
    table: tuple[Key, ...]
    group: tuple[Key, ...]
    instance: tuple[Key, ...]
    table_extras: frozenset[str] = frozenset()
    group_extras: frozenset[str] = frozenset()
    reserved: frozenset[str] = frozenset({INSTANCE})
    """Keys that a device must not have, because the model keeps something of the instance under that name."""


_DEVICE_KEYS = (Key("device_id", "number", missing="error", rule="R8"), Key("device_ip"))


def check_form(value: Mapping[str, object], form: Form) -> list[Problem]:
    """Return every fault of the structure (R2, R4, R5, R31 and malformed numbers) of a table of `form`."""
    problems = [*_check_no_version(value), *check_shape(value, "", form.table, form.table_extras | {"version"})]
    problems += _check_group_names(value)
    for group_path, group in walk_objects(value, "", "group_list"):
        problems += check_shape(group, group_path, form.group, form.group_extras)
        for instance_path, instance in walk_objects(group, group_path, "instance_list"):
            problems += check_shape(instance, instance_path, form.instance, ())
            for device_path, device in walk_objects(instance, instance_path, "devices"):
                problems += check_shape(device, device_path, _DEVICE_KEYS, form.reserved)
                problems += (_misplaced(device_path, key) for key in device if key in form.reserved)
    return problems


def survey_form(value: Mapping[str, object], form: Form) -> Survey:
    """Return what can be read of the object: one server per server_id, in the order of their first instances.

    The lab form keeps `rank_id` in the instance; the survey names it as a member of the device, with its true path.
    """
    has_ranks = any(key.name == "rank_id" for key in form.instance)
    firsts: dict[str, tuple[str, Object]] = {}
    devices: dict[str, list[DeviceEntry]] = {}
    for path, instance in _walk_instances(value):
        server_id = instance.get("server_id")
        server = f"id {server_id}" if isinstance(server_id, str) else f"path {path}"
        firsts.setdefault(server, (path, instance))
        devices.setdefault(server, []).extend(_survey_devices(path, instance, has_ranks=has_ranks))
    servers = tuple(ServerEntry(*first, tuple(devices[server])) for server, first in firsts.items())
    return Survey("", value, servers, dialect=form.dialect)


def _survey_devices(path: str, instance: Object, *, has_ranks: bool) -> Iterator[DeviceEntry]:
    places = {"rank_id": join_key(path, "rank_id")} if has_ranks else None
    rank = {"rank_id": instance["rank_id"]} if has_ranks and "rank_id" in instance else {}
    for device_path, device in walk_objects(instance, path, "devices"):
        members = device
        if rank or device.get("device_ip") == "":
            # HCCL takes an empty address for none at all.
            members = rank | {key: value for key, value in device.items() if (key, value) != ("device_ip", "")}
        numbers = parse_number(device.get("device_id")), parse_number(rank.get("rank_id"))
        yield DeviceEntry(device_path, members, *numbers, places=places)
        rank = {}  # a second device has no rank, which R28 reports


def _walk_instances(value: Mapping[str, object]) -> Iterator[tuple[str, Object]]:
    for group_path, group in walk_objects(value, "", "group_list"):
        yield from walk_objects(group, group_path, "instance_list")


def _check_no_version(value: Mapping[str, object]) -> Iterator[Problem]:
    if "version" in value:
        message = "a table with group_list has no version; HCCL would look for server_list in it"
        yield Problem("version", "R2", "error", message, "remove the key", show_value(value["version"]))


def _check_group_names(value: Mapping[str, object]) -> Iterator[Problem]:
    """Rule R28: a group name stands once. The model tells groups apart by nothing else."""
    first_paths: dict[str, str] = {}
    for path, group in walk_objects(value, "", "group_list"):
        name, place = group.get("group_name"), join_key(path, "group_name")
        if isinstance(name, str) and first_paths.setdefault(name, place) != place:
            message = f"the same group_name stands at {first_paths[name]}"
            yield Problem(place, "R28", "error", message, "give each group its own name", show_value(name))


def _misplaced(path: str, key: str) -> Problem:
    return Problem(
        join_key(path, key), "R31", "error", "the key belongs to the instance, not to a device", "move it up"
    )


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
