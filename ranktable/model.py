"""The rank table: frozen values that every dialect is read into, each with the object of the file that says it.

Of a faulty file they hold what can be read, so that all its faults are found in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from ranktable.errors import BuildError
from ranktable.problem import Problem, Severity, join_key, show_value
from ranktable.schema import Members, walk_objects
from ranktable.values import parse_number

COMPLETED = "completed"
INITIALIZING = "initializing"

NOTHING: dict[str, object] = {}
"""No other keys: one object for the many that have none."""

RankKey = Callable[[int, "Device"], Any]
"""What ranks are sorted by: of the place of a server in a list, and a device of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An object of a file: its path and its members as they stand there. What no file says has neither."""

    _: KW_ONLY
    path: str = field(default="", compare=False, repr=False)
    members: Members = field(default_factory=lambda: NOTHING, compare=False, repr=False)
    places: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    """Paths of the members that stand elsewhere in the file, or under another key, than `path` and their key say."""

    def path_of(self, key: str) -> str:
        """Return the path of member `key` in the file."""
        return (self.places or {}).get(key) or join_key(self.path, key)

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
        return [Entry(path=path, members=members) for path, members in walk_objects(self.members, self.path, key)]

    def complain(self, key: str, rule: str, message: str, remedy: str, severity: Severity = "error") -> Problem:
        """Return a problem about member `key`, with its value unless that is a list."""
        value = self.members.get(key)
        shown = show_value(value) if key in self.members and not isinstance(value, list) else None
        return Problem(self.path_of(key), rule, severity, message, remedy, shown)


@dataclass(frozen=True, slots=True)
class Device(Entry):
    """One accelerator (or, on a host without any, one process slot) and the global rank that it carries."""

    device_id: int
    """Physical number of the device on its server, unique there; -1 where the file gives no usable one."""
    rank_id: int = -1
    """Global rank, 0 to world_size - 1; -1 as long as none is given."""
    device_ip: str | None = None
    """Address of the device's own network port; None where it has none. Never invented."""
    super_device_id: str | None = None
    """Number of the device in its super pod, a decimal of 32 bits; None outside super pods."""
    extra: Mapping[str, object] = field(default_factory=lambda: NOTHING, hash=False)
    """All other keys as they stood in the file, here and below; do not change it."""


@dataclass(frozen=True, slots=True)
class Server(Entry):
    """One host and its devices, in the order of the file."""

    server_id: str
    """Name or address that is unique in the table."""
    devices: tuple[Device, ...]
    host_ip: str | None = None
    """Address of the host's own network port, if the table gives one."""
    pod_ip: str | None = None
    """Address of the pod that runs on the host, if the table gives one."""
    group: str | None = None
    """Name of the group that the server stands in, for dialects whose groups have ranks from 0 each."""
    extra: Mapping[str, object] = field(default_factory=lambda: NOTHING, hash=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of this server in ascending order."""
        return tuple(sorted(device.rank_id for device in self.devices if device.rank_id >= 0))


@dataclass(frozen=True, slots=True)
class SuperPod(Entry):
    """Servers whose devices share one super pod's fabric."""

    super_pod_id: str
    server_ids: tuple[str, ...]
    extra: Mapping[str, object] = field(default_factory=lambda: NOTHING, hash=False)


@dataclass(frozen=True, slots=True)
class RankTable(Entry):
    """Servers, devices and ranks of one job.

    The values are as the file or the caller gave them: a table may break rules (`validate_table` tells which).
    """

    dialect: str
    """Short name of the dialect that the table is written in, such as "1.0": see `ranktable.dialects`."""
    servers: tuple[Server, ...]
    status: str = COMPLETED
    """"completed" when the table may be used, "initializing" while its producer still works on it."""
    declared_server_count: int | None = None
    """What the file says in `server_count`; None when it says nothing. A correct table declares len(servers)."""
    super_pods: tuple[SuperPod, ...] = ()
    extra: Mapping[str, object] = field(default_factory=lambda: NOTHING, hash=False)
    groups: tuple[RankTable, ...] = field(default=(), compare=False, repr=False)
    """The groups where each has ranks from 0: rules about ranks and servers look at one group at a time."""

    @property
    def world_size(self) -> int:
        """The number of devices, which is the number of ranks; where each group has its own ranks, over all groups."""
        return sum(len(server.devices) for server in self.servers)

    @property
    def is_ready(self) -> bool:
        """True when the status is "completed"."""
        return self.status == COMPLETED

    @property
    def placements(self) -> Iterator[tuple[Server, Device]]:
        """Every device with its server, in the order of the file."""
        return ((server, device) for server in self.servers for device in server.devices)

    @property
    def devices(self) -> Iterator[Device]:
        """Every device of the table, in the order of the file."""
        return (device for server in self.servers for device in server.devices)

    def server_of(self, global_rank: int) -> Server:
        """Return the server of `global_rank`; raises BuildError."""
        return self._placement_of(global_rank)[0]

    def device_of(self, global_rank: int) -> Device:
        """Return the device of `global_rank`; raises BuildError."""
        return self._placement_of(global_rank)[1]

    @property
    def servers_by_rank(self) -> tuple[Server, ...]:
        """The servers ordered by their lowest global rank; servers without devices come last."""
        return tuple(sorted(self.servers, key=lambda server: (not server.devices, server.ranks[:1])))

    def _placement_of(self, global_rank: int) -> tuple[Server, Device]:
        """Where groups have ranks of their own, a rank that two of them have is no answer to anything."""
        found = [placement for placement in self.placements if placement[1].rank_id == global_rank]
        if not found:
            raise BuildError(f"no device of the table has rank {global_rank}", f"it has {self.world_size} devices")
        if len({server.group for server, _ in found}) > 1:
            raise BuildError(f"several groups of the table have a rank {global_rank}", "look at one group")
        return found[0]


def number_devices(servers: Sequence[Server], key: RankKey) -> tuple[Server, ...]:
    """Return the servers with the ranks 0 to n-1 in ascending order of `key`; equal ones stay as listed."""
    keys = [key(place, device) for place, server in enumerate(servers) for device in server.devices]
    rank_at = [0] * len(keys)
    for rank_id, index in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
        rank_at[index] = rank_id
    ranks = iter(rank_at)
    return tuple(
        replace(server, devices=tuple(replace(device, rank_id=next(ranks)) for device in server.devices))
        for server in servers
    )


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of a table of version 1.0 or 1.2, whatever it says."""
    pods: list[dict[str, object]] = [
        {"super_pod_id": pod.super_pod_id, "server_list": [{"server_id": name} for name in pod.server_ids], **pod.extra}
        for pod in table.super_pods
    ]
    number = {} if table.declared_server_count is None else {"server_count": str(table.declared_server_count)}
    return {
        "version": table.dialect,
        **number,
        "server_list": [_encode_server(server) for server in table.servers],
        **({"super_pod_list": pods} if pods else {}),
        "status": table.status,
        **table.extra,
    }


def _encode_server(server: Server) -> dict[str, object]:
    named = {"server_id": server.server_id, "host_ip": server.host_ip, "pod_ip": server.pod_ip}
    encoded = {key: value for key, value in named.items() if value is not None}
    return {**encoded, "device": [_encode_device(device) for device in server.devices], **server.extra}


def _encode_device(device: Device) -> dict[str, object]:
    encoded: dict[str, object] = {"device_id": str(device.device_id)}
    if device.super_device_id is not None:
        encoded["super_device_id"] = device.super_device_id
    if device.device_ip is not None:
        encoded["device_ip"] = device.device_ip
    encoded["rank_id"] = str(device.rank_id)
    return {**encoded, **device.extra} if device.extra else encoded
