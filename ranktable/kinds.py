"""The kinds of tables, one record each (`Dialect`), and what a table says as far as it can be read: the rules' input.

A faulty table cannot be decoded into a `RankTable`, yet all of its faults are to be reported in one run. A survey
holds each value that could be read (None where it could not) together with its JSON path. Every dialect makes one.

A new dialect is a record in a module of `ranktable.dialects`, of which the file's name stands in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Protocol, TypeVar, cast

from ranktable.errors import BuildError
from ranktable.model import RankTable
from ranktable.problem import Problem, Severity, join_key, show_value
from ranktable.schema import Members, Schema, find_near

_MODULES = ("foreign", "mindie", "v2_0", "heterogeneous", "template2", "server_list")
"""In the order in which kinds are looked for: the rarer and more telling keys first."""
_MAX_KEYS = 100
"""How many keys of a strange object are looked at."""
_Result = TypeVar("_Result")
_Entry = TypeVar("_Entry", bound="Entry")


@dataclass(frozen=True, slots=True)
class Entry:
    """An object of the file: its path and its members as they stand there."""

    path: str
    members: Mapping[str, object] = field(default_factory=dict)
    places: Mapping[str, str] | None = field(default=None, kw_only=True)
    """Paths of the members that stand elsewhere in the file, or under another key, than `path` and their key say."""

    def path_of(self, key: str) -> str:
        """Return the path of member `key` in the file."""
        return (self.places.get(key) if self.places else None) or join_key(self.path, key)

    def text(self, key: str) -> str | None:
        """Return the member if it is a string, else None."""
        value = self.members.get(key)
        return value if isinstance(value, str) else None

    def has(self, key: str) -> bool:
        """True when the member is there, whatever its value."""
        return key in self.members

    def complain(self, key: str, rule: str, severity: Severity, message: str, remedy: str) -> Problem:
        """Return a problem about member `key`, with its value."""
        value = show_value(self.members[key]) if key in self.members else None
        return Problem(self.path_of(key), rule, severity, message, remedy, value)


@dataclass(frozen=True, slots=True)
class DeviceEntry(Entry):
    """A device; ids are None where the file does not give a usable number."""

    device_id: int | None = None
    rank_id: int | None = None


@dataclass(frozen=True, slots=True)
class ServerEntry(Entry):
    """A server and its devices."""

    devices: tuple[DeviceEntry, ...] = ()

    @property
    def server_id(self) -> str | None:
        """The id of the server, None where the file gives no string."""
        return self.text("server_id")

    @property
    def ranks(self) -> list[int]:
        """The readable ranks of the server in ascending order."""
        return sorted(device.rank_id for device in self.devices if device.rank_id is not None)


@dataclass(frozen=True, slots=True)
class HoldingEntry(Entry):
    """A super pod or a cluster: an object that names servers, or super pods, of the table."""

    servers: tuple[Entry, ...] = ()
    """The entries of its `server_list`, each with a `server_id`."""
    super_pods: tuple[Entry, ...] = ()
    """The entries of its `super_pod_list`, each with a `super_pod_id`."""


@dataclass(frozen=True, slots=True)
class Survey(Entry):
    """A whole table, or one group of a table whose groups are rank tables of their own."""

    servers: tuple[ServerEntry, ...] = ()
    dialect: str = ""
    """Short name of the dialect that the file is written in."""
    super_pods: tuple[HoldingEntry, ...] = ()
    clusters: tuple[HoldingEntry, ...] = ()
    groups: tuple[Survey, ...] = ()
    """The groups where each has ranks from 0: rules about ranks and servers look at one group at a time."""
    _worked_out: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def work_out_once(self, name: str, work_out: Callable[[], _Result]) -> _Result:
        """Return what `work_out` returned when `name` was asked for first: for what several rules need and is slow."""
        if name not in self._worked_out:
            self._worked_out[name] = work_out()
        return cast(_Result, self._worked_out[name])

    @property
    def kind(self) -> Dialect:
        """The record of the dialect."""
        return dialect_of(self.dialect)

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
            yield entry.complain(key, rule, how_bad, message.format(first.path_of(key)), remedy)


class Codec(Protocol):
    """How a dialect is read and written."""

    @property
    def schema(self) -> Schema:
        """What its top consists of, and everything below it."""
        ...

    def check_structure(self, value: Members) -> list[Problem]:
        """Return every fault that keeps the object from being decoded (errors), and what is odd in it (warnings)."""
        ...

    def survey(self, value: Members) -> Survey:
        """Return what can be read of the object, however faulty it is."""
        ...

    def decode(self, value: Members) -> RankTable:
        """Return the table of an object that `check_structure` finds no error in."""
        ...

    def encode(self, table: RankTable) -> dict[str, object]:
        """Return the object of a table, which decodes to it; raises BuildError for what the dialect cannot hold."""
        ...


@dataclass(frozen=True, slots=True)
class ConvertWishes:
    """What only a person knows, for dialects that have a place for it."""

    super_pods: Sequence[tuple[str, Sequence[str]]] = ()
    """The servers of each super pod."""
    super_device_ids: dict[str, list[str]] = field(default_factory=dict)
    """Those of each server, in the order of its devices."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A table in another dialect."""

    table: RankTable
    lost: tuple[str, ...] = ()
    """What the table said and the dialect cannot, in words."""
    is_renumbered: bool = False
    """True when the ranks are not those of the table."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """One kind of table. One without a codec is known by name only, so that a user is told what the file is."""

    name: str
    title: str
    """What to call it in a sentence."""
    consumer: str
    """Who reads it."""
    recognise: Callable[[Members], str]
    """Returns the keys of an object that give the dialect away; empty for another kind."""
    keys: tuple[str, ...] = ()
    """Its telling keys, of which a misspelt one is to be recognised."""
    short_keys: tuple[str, ...] = ()
    """Telling keys that are too short or too rare to be guessed out of a misspelt one."""
    sources: tuple[str, ...] = ()
    """Where its keys can be read up (`ranktable.rules.citations`)."""
    instead: str = ""
    """What to do with a file of this kind, for kinds without a codec."""
    codec: Codec | None = None
    rules: frozenset[str] = frozenset()
    """Ids of the rules that it is held to, but for those of all dialects."""
    readers: frozenset[str] = frozenset()
    """The profiles that read it."""
    own_reader: str | None = None
    """A profile whose demands hold without being named, since nobody else reads the kind."""
    refused_version: str = ""
    """Its version where HCCL refuses that: then it has producers and no reader of its own."""
    is_for_a5: bool = False
    """Chip a5 reads it, and no other does."""
    has_super_pods: bool | None = None
    """Whether its version says that there are super pods; None where only the table tells."""
    reads_super_pods: bool = False
    """It has a place for super pods."""
    max_bytes: int = 40 * 1024 * 1024
    """Largest file of this kind that HCCL reads."""
    is_generated: bool = False
    """`ranktable generate` can write it."""
    writes_empty_addresses: bool = False
    """It writes "" for no address of a device."""
    ranks_per_group: bool = False
    """The ranks start again in every group."""
    ranks_by_position: bool = False
    """It has no ranks: readers count them, in string order of server_id, then device_id."""
    convert: Callable[[RankTable, ConvertWishes], Converted] | None = None
    """Returns a table of another kind in this one."""
    wishes: frozenset[str] = frozenset()
    """The options of `convert` that mean something to it."""
    refusal: str = ""
    """Why nothing is converted to it."""


def rule_ids(*texts: str) -> frozenset[str]:
    """Return the ids in texts such as "R3 R6"."""
    return frozenset(rule_id for text in texts for rule_id in text.split())


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
        raise BuildError(f"dialect {name!r} is not known", f"use one of {', '.join(codec_names())}")
    return found


def codec_of(name: str) -> Codec:
    """Return the codec of a dialect by its short name; raises BuildError for one that cannot be read and written."""
    codec = dialect_of(name).codec
    if codec is None:
        raise BuildError(f"dialect {name!r} cannot be written", f"use one of {', '.join(codec_names())}")
    return codec


def plain_version() -> str:
    """Return the dialect that is generated where nothing is said of super pods."""
    return next(kind.name for kind in all_dialects() if kind.is_generated and not kind.reads_super_pods)


def codec_names() -> tuple[str, ...]:
    """Return the short names of the dialects that have a codec."""
    return tuple(dialect.name for dialect in all_dialects() if dialect.codec)


def detect_dialect(value: Members) -> Detection | None:
    """Return the dialect of the object with the evidence, or None when no key of any known dialect is there."""
    found = ((dialect, dialect.recognise(value)) for dialect in all_dialects())
    return next((Detection(dialect, evidence) for dialect, evidence in found if evidence), None)


def find_near_keys(value: Members) -> dict[str, str]:
    """Return the keys at the top that look like telling keys of a dialect, each with the key that may be meant."""
    telling = [key for dialect in all_dialects() for key in dialect.keys]
    near = ((name, find_near(name, telling)) for name in islice(value, _MAX_KEYS))
    return {name: meant for name, meant in near if meant}
