"""The kinds of tables, one record each (`Dialect`), and what a table says as far as it can be read: the rules' input.

A survey holds each value that could be read (None where it could not) with its JSON path, so that all faults of a table
are reported in one run; `table_of` makes the table of one without. A new dialect is a record in a module of
`ranktable.dialects` that `_MODULES` names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import islice
from typing import TypeVar

from ranktable.errors import BuildError
from ranktable.model import COMPLETED, NOTHING, Device, RankTable, Server, SuperPod, number_devices
from ranktable.problem import Problem, Severity, join_key, show_value
from ranktable.schema import Members, Schema, check_tree, check_version, find_near, walk_objects
from ranktable.values import parse_number

_MODULES = ("foreign", "v2_0", "template2", "server_list")
"""In the order in which kinds are looked for: the rarer and more telling keys first."""
_MAX_KEYS = 100
"""How many keys of a strange object are looked at."""
_DEVICE_ROLES = frozenset({"device_id", "device_ip", "rank_id", "super_device_id"})
_SERVER_ROLES = frozenset({"server_id", "host_ip", "pod_ip", "device"})
_Entry = TypeVar("_Entry", bound="Entry")


@dataclass(frozen=True, slots=True)
class Entry:
    """An object of the file: its path and its members as they stand there."""

    path: str
    members: Members = field(default_factory=dict)
    places: Mapping[str, str] | None = field(default=None, kw_only=True)
    """Paths of the members that stand elsewhere in the file, or under another key, than `path` and their key say."""

    def path_of(self, key: str) -> str:
        """Return the path of member `key` in the file."""
        return (self.places.get(key) if self.places else None) or join_key(self.path, key)

    def text(self, key: str) -> str | None:
        """Return the member if it is a string, else None."""
        value = self.members.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """Return the member if it is a JSON integer or a decimal string, else None."""
        return parse_number(self.members.get(key))

    def has(self, key: str) -> bool:
        """True when the member is there, whatever its value."""
        return key in self.members

    def entries(self, key: str) -> list[Entry]:
        """Return the objects in the array that member `key` is."""
        return [Entry(*found) for found in walk_objects(self.members, self.path, key)]

    def complain(self, key: str, rule: str, message: str, remedy: str, severity: Severity = "error") -> Problem:
        """Return a problem about member `key`, with its value unless that is a list."""
        value = self.members.get(key)
        shown = show_value(value) if key in self.members and not isinstance(value, list) else None
        return Problem(self.path_of(key), rule, severity, message, remedy, shown)


@dataclass(frozen=True, slots=True)
class DeviceEntry(Entry):
    """A device; ids are None where the file does not give a usable number."""

    device_id: int | None = None
    rank_id: int | None = None


@dataclass(frozen=True, slots=True)
class ServerEntry(Entry):
    """A server and its devices."""

    devices: tuple[DeviceEntry, ...] = ()
    group: str | None = None

    @property
    def server_id(self) -> str | None:
        """The id of the server, None where the file gives no string."""
        return self.text("server_id")

    @property
    def ranks(self) -> list[int]:
        """The readable ranks of the server in ascending order."""
        return sorted(device.rank_id for device in self.devices if device.rank_id is not None)


@dataclass(frozen=True, slots=True)
class Survey(Entry):
    """A whole table, or one group of a table whose groups are rank tables of their own."""

    servers: tuple[ServerEntry, ...] = ()
    dialect: str = ""
    """Short name of the dialect that the file is written in."""
    groups: tuple[Survey, ...] = ()
    """The groups where each has ranks from 0: rules about ranks and servers look at one group at a time."""

    @property
    def kind(self) -> Dialect:
        """The record of the dialect."""
        return dialect_of(self.dialect)

    @property
    def super_pods(self) -> list[Entry]:
        """The super pods, where the dialect reads them; the servers of one are the entries of its `server_list`."""
        return self.entries("super_pod_list") if self.kind.reads_super_pods else []

    @property
    def devices(self) -> Iterator[DeviceEntry]:
        """Every device of the table, in the order of the file."""
        return (device for server in self.servers for device in server.devices)

    @property
    def num_devices(self) -> int:
        """How many devices the table lists."""
        return sum(len(server.devices) for server in self.servers)

    @property
    def is_multi_server(self) -> bool:
        """True when the table lists two servers or more."""
        return len(self.servers) > 1


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


def survey_device(device: Members, path: str) -> DeviceEntry:
    """Return what can be read of a device."""
    return DeviceEntry(path, device, parse_number(device.get("device_id")), parse_number(device.get("rank_id")))


def survey_lists(value: Members, kind: Dialect) -> Survey:
    """Return what can be read of a table, or of each of its groups, with a list of servers that list their devices."""
    top = kind.known_schema
    if "groups" not in top.by_role:
        return Survey("", value, _survey_servers(value, "", top), kind.name)
    key = top.by_role["groups"].name
    found = walk_objects(value, "", key)
    groups = tuple(
        Survey(path, group, _survey_servers(group, path, top.within(key)), kind.name) for path, group in found
    )
    return Survey("", value, tuple(server for group in groups for server in group.servers), kind.name, groups)


def _survey_servers(holder: Members, path: str, schema: Schema) -> tuple[ServerEntry, ...]:
    key = schema.by_role["servers"].name
    listed = schema.within(key).by_role["devices"].name
    group = holder.get("group_id")
    found = []
    for server_path, server in walk_objects(holder, path, key):
        devices = tuple(survey_device(device, place) for place, device in walk_objects(server, server_path, listed))
        found.append(ServerEntry(server_path, server, devices, None if group is None else str(group)))
    return tuple(found)


def join_servers(found: Iterable[tuple[ServerEntry, list[DeviceEntry]]]) -> tuple[ServerEntry, ...]:
    """Put devices of one server_id on one server, each in the order of its first one; without an id it stands alone."""
    heads: dict[str, ServerEntry] = {}
    devices: dict[str, list[DeviceEntry]] = {}
    for head, its_devices in found:
        name = f"path {head.path}" if head.server_id is None else f"id {head.server_id}"
        heads.setdefault(name, head)
        devices.setdefault(name, []).extend(its_devices)
    return tuple(replace(head, devices=tuple(devices[name])) for name, head in heads.items())


def table_of(survey: Survey) -> RankTable:
    """Return the table of a survey without faults of structure; whatever the model has no name for is in `extra`."""
    kind = survey.kind
    roles = _DEVICE_ROLES if kind.reads_super_pods else _DEVICE_ROLES - {"super_device_id"}
    servers = tuple(_server_of(entry, roles) for entry in survey.servers)
    if kind.ranks_by_position:
        servers = number_devices(servers, lambda place, device: (servers[place].server_id, device.device_id))
    pods = tuple(
        SuperPod(
            pod.text("super_pod_id") or "",
            tuple(entry.text("server_id") or "" for entry in pod.entries("server_list")),
            _without(pod.members, {"super_pod_id", "server_list"}),
        )
        for pod in survey.super_pods
    )
    is_counted = "server_count" in kind.known_schema.by_name
    taken = {
        "version",
        "status",
        *(item.name for item in kind.known_schema.fields if item.role in ("servers", "groups")),
    }
    taken |= ({"server_count"} if is_counted else set()) | ({"super_pod_list"} if kind.reads_super_pods else set())
    count = survey.number("server_count") if is_counted else None
    status = str(survey.members.get("status", COMPLETED))
    return RankTable(survey.dialect, servers, status, count, pods, _without(survey.members, taken))


def _server_of(entry: ServerEntry, roles: frozenset[str]) -> Server:
    devices = tuple(
        Device(
            -1 if device.device_id is None else device.device_id,
            -1 if device.rank_id is None else device.rank_id,
            device.text("device_ip"),
            device.text("super_device_id") if "super_device_id" in roles else None,
            _without(device.members, roles),
        )
        for device in entry.devices
    )
    server_id = entry.text("server_id") or entry.text("server_ip") or ""
    rest = _without(entry.members, _SERVER_ROLES)
    return Server(server_id, devices, entry.text("host_ip"), entry.text("pod_ip"), entry.group, rest)


def _without(members: Members, names: frozenset[str] | set[str]) -> Mapping[str, object]:
    if members.keys() <= names:
        return NOTHING
    return {key: value for key, value in members.items() if key not in names}


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """One kind of table. One without a schema is known by name only, so that a user is told what the file is."""

    name: str
    title: str
    """What to call it in a sentence."""
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
    """What its top consists of, and everything below it."""
    versions: tuple[str, ...] = ()
    """What `version` may be, the usual one first; none where there is no version."""
    make_survey: Callable[[Members, Dialect], Survey] = survey_lists
    """Returns what can be read of an object, however faulty it is."""
    rules: frozenset[str] = frozenset()
    """Ids of the rules that it is held to, but for those of all dialects."""
    readers: frozenset[str] = frozenset()
    """The profiles that read it."""
    refused_version: str = ""
    """Its version where HCCL refuses that: then it has producers and no reader of its own."""
    is_for_a5: bool = False
    """Chip a5 reads it, and no other does."""
    is_for_a3: bool = False
    """Its version says that there are super pods, which only A3 has."""
    reads_super_pods: bool = False
    """It has a place for super pods."""
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


def rule_ids(*texts: str) -> frozenset[str]:
    """Return the ids in texts such as "R3 R6"."""
    return frozenset(rule_id for text in texts for rule_id in text.split())


def has_any(*keys: str) -> Callable[[Members], str]:
    """Return a test for an object that has one of the keys."""
    return lambda value: next((key for key in keys if key in value), "")


@dataclass(frozen=True, slots=True)
class Detection:
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
