"""The kinds of tables, one record each (`Dialect`), and how they are read, however faulty they are.

A new dialect is a record in a module of `ranktable.dialects` that `_MODULES` names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import islice
from typing import NamedTuple, TypeVar

from ranktable.errors import BuildError
from ranktable.model import COMPLETED, NOTHING, Device, Entry, RankTable, Server, SuperPod, number_devices
from ranktable.problem import Problem, Severity
from ranktable.schema import Members, Schema, check_tree, check_version, find_near, walk_objects
from ranktable.values import parse_number

_MODULES = ("foreign", "v2_0", "template2", "server_list")
"""In the order in which kinds are looked for: the rarer and more telling keys first."""
_MAX_KEYS = 100
"""How many keys of a strange object are looked at."""
_DEVICE_ROLES = frozenset({"device_id", "device_ip", "rank_id"})
_POD_DEVICE_ROLES = _DEVICE_ROLES | {"super_device_id"}
_SERVER_ROLES = frozenset({"server_id", "host_ip", "pod_ip", "device"})
_Entry = TypeVar("_Entry", bound="Entry")


def find_repeats(
    entries: Iterable[_Entry],
    key: str,
    rule: str,
    message: str,
    remedy: str,
    value: Callable[[_Entry], Hashable | None] | None = None,
    severity: Severity | Callable[[_Entry, _Entry], Severity] = "error",
) -> Iterator[Problem]:
    """Yield a problem for each entry whose member `key` is that of an earlier one; `message` has {} for its path.

    `value` says what is compared, None for nothing (the member if it is a string, by default); `severity` may be a
    function of the first entry and of the repeat.
    """
    firsts: dict[Hashable, _Entry] = {}
    for entry in entries:
        found = entry.text(key) if value is None else value(entry)
        if found is None:
            continue
        first = firsts.setdefault(found, entry)
        if first is not entry:
            how_bad = severity if isinstance(severity, str) else severity(first, entry)
            yield entry.complain(key, rule, message.format(first.path_of(key)), remedy, how_bad)


def read_device(path: str, members: Members, kind: Dialect) -> Device:
    """Return what can be read of a device."""
    device_id, rank_id = parse_number(members.get("device_id")), parse_number(members.get("rank_id"))
    ip, number = members.get("device_ip"), members.get("super_device_id") if kind.reads_super_pods else None
    return Device(
        -1 if device_id is None else device_id,
        -1 if rank_id is None else rank_id,
        ip if isinstance(ip, str) else None,
        number if isinstance(number, str) else None,
        without(members, _POD_DEVICE_ROLES if kind.reads_super_pods else _DEVICE_ROLES),
        path=path,
        members=members,
    )


def read_server(entry: Entry, devices: Iterable[Device], group: str | None = None) -> Server:
    """Return what can be read of a server beside its devices; its `server_ip` names it where it has no id."""
    return Server(
        entry.text("server_id") or entry.text("server_ip") or "",
        tuple(devices),
        entry.text("host_ip"),
        entry.text("pod_ip"),
        group,
        without(entry.members, _SERVER_ROLES),
        path=entry.path,
        members=entry.members,
        places=entry.places,
    )


def read_lists(top: Entry, kind: Dialect) -> RankTable:
    """Return what can be read of a table, or of each of its groups, with a list of servers that list their devices."""
    schema = kind.known_schema
    if "groups" not in schema.by_role:
        return make_table(top, _read_servers(top, schema, kind), kind)
    key = schema.by_role["groups"].name
    groups = [make_table(group, _read_servers(group, schema.within(key), kind), kind) for group in top.entries(key)]
    return make_table(top, (server for group in groups for server in group.servers), kind, tuple(groups))


def _read_servers(holder: Entry, schema: Schema, kind: Dialect) -> Iterator[Server]:
    key, group = schema.by_role["servers"].name, holder.members.get("group_id")
    listed = schema.within(key).by_role["devices"].name
    for server in holder.entries(key):
        devices = [read_device(*found, kind) for found in walk_objects(server.members, server.path, listed)]
        yield read_server(server, devices, None if group is None else str(group))


def join_servers(found: Iterable[Server]) -> list[Server]:
    """Put devices of one server_id on one server, each in the order of its first one; without an id it stands alone."""
    joined: dict[str, Server] = {}
    for server in found:
        name = f"id {server.server_id}" if server.server_id else f"path {server.path}"
        first = joined.get(name)
        joined[name] = replace(first, devices=first.devices + server.devices) if first else server
    return list(joined.values())


def make_table(entry: Entry, servers: Iterable[Server], kind: Dialect, groups: tuple[RankTable, ...] = ()) -> RankTable:
    """Return the table of what was read; whatever the model has no name for is in `extra`."""
    fields = kind.known_schema.fields
    taken = {"version", "status", *(item.name for item in fields if item.role in ("servers", "groups"))}
    taken |= {"server_count", "super_pod_list"} if kind.reads_super_pods else {"server_count"}
    pods = tuple(
        SuperPod(
            pod.text("super_pod_id") or "",
            tuple(member.text("server_id") or "" for member in pod.entries("server_list")),
            without(pod.members, {"super_pod_id", "server_list"}),
            path=pod.path,
            members=pod.members,
        )
        for pod in (entry.entries("super_pod_list") if kind.reads_super_pods else ())
    )
    listed = tuple(servers)
    if kind.ranks_by_position:
        listed = number_devices(listed, lambda place, device: (listed[place].server_id, device.device_id))
    return RankTable(
        kind.name,
        listed,
        str(entry.members.get("status", COMPLETED)),
        entry.number("server_count"),
        pods,
        without(entry.members, taken),
        groups,
        path=entry.path,
        members=entry.members,
    )


def without(members: Members, names: frozenset[str] | set[str]) -> Mapping[str, object]:
    """Return the members but for those of these names."""
    if members.keys() <= names:
        return NOTHING
    return {key: value for key, value in members.items() if key not in names}


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """One kind of table. One without a schema is known by name only, so that a user is told what the file is."""

    name: str
    title: str
    recognise: Callable[[Members], str]
    """Returns the keys of an object that give the dialect away; empty for another kind."""
    keys: tuple[str, ...] = ()
    """Its telling keys, of which a misspelt one is to be recognised."""
    sources: tuple[str, ...] = ()
    """Where its keys can be read up (`ranktable.rules.citations`)."""
    consumer: str = ""
    instead: str = ""
    """Who reads a file of this kind, and what to do with it, for kinds without a schema."""
    schema: Schema | None = None
    versions: tuple[str, ...] = ()
    """What `version` may be, the usual one first; none where there is no version."""
    read: Callable[[Entry, Dialect], RankTable] = read_lists
    """Returns what can be read of an object, however faulty it is."""
    rules: frozenset[str] = frozenset()
    """Ids of the rules that it is held to, but for those of all dialects."""
    readers: frozenset[str] = frozenset()
    refused_version: str = ""
    """Its version where HCCL refuses that: then it has producers and no reader of its own."""
    is_for_a5: bool = False
    """Chip a5 reads it, and no other does."""
    is_for_a3: bool = False
    """Its version says that there are super pods, which only A3 has."""
    reads_super_pods: bool = False
    is_written: bool = False
    """Tables are generated, merged and converted in it; the others are read and validated."""
    ranks_by_position: bool = False
    """It has no ranks: readers count them, in string order of server_id, then device_id."""
    writes_empty_addresses: bool = False
    """It writes "" for no address of a device."""

    @property
    def known_schema(self) -> Schema:
        """The schema of a kind that has one."""
        assert self.schema is not None, f"{self.name} is known by name only"
        return self.schema

    def check_structure(self, value: Members) -> list[Problem]:
        """Return every fault that keeps an object from being decoded (errors), and what is odd in it (warnings)."""
        return [*check_version(value, self.versions), *check_tree(value, self.known_schema)]


def has_any(*keys: str) -> Callable[[Members], str]:
    """Return a test for an object that has one of the keys."""
    return lambda value: next((key for key in keys if key in value), "")


class Detection(NamedTuple):
    """The dialect of an object and the keys that gave it away."""

    dialect: Dialect
    evidence: str


@cache
def all_dialects() -> tuple[Dialect, ...]:
    """Return every kind that is told apart, in the order in which they are looked for."""
    modules = (import_module(f"ranktable.dialects.{name}") for name in _MODULES)
    return tuple(dialect for module in modules for dialect in module.DIALECTS)


@cache
def dialect_of(name: str) -> Dialect:
    """Return the dialect of that short name; raises BuildError."""
    found = next((dialect for dialect in all_dialects() if dialect.name == name), None)
    if found is None:
        raise BuildError(f"dialect {name!r} is not known", f"use one of {', '.join(read_names())}")
    return found


def written_names() -> tuple[str, ...]:
    """Return the short names of the dialects that tables are written in, the one without super pods first."""
    return tuple(sorted(dialect.name for dialect in all_dialects() if dialect.is_written))


def read_names() -> tuple[str, ...]:
    """Return the short names of the dialects that are read and validated."""
    return tuple(dialect.name for dialect in all_dialects() if dialect.schema)


def detect_dialect(value: Members) -> Detection | None:
    """Return the dialect of the object with the evidence, or None when no key of any known dialect is there."""
    found = ((dialect, dialect.recognise(value)) for dialect in all_dialects())
    return next((Detection(dialect, evidence) for dialect, evidence in found if evidence), None)


def find_near_keys(value: Members) -> dict[str, str]:
    """Return the keys at the top that look like telling keys of a dialect, each with the key that may be meant."""
    telling = [key for dialect in all_dialects() for key in dialect.keys]
    near = ((name, find_near(name, telling)) for name in islice(value, _MAX_KEYS))
    return {name: meant for name, meant in near if meant}
