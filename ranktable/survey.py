"""What a table says as far as it can be read: the dialect-neutral input of the rules.

A faulty table cannot be decoded into a `RankTable`, yet all of its faults are to be reported in one run. A survey
holds each value that could be read (None where it could not) together with its JSON path. Every dialect makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

from ranktable.problem import Problem, Severity, join_key, show_value

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
    dialect: str = "1.0"
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
