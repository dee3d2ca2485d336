"""Servers, devices, super pods and clusters between JSON and the neutral table, by the roles of a schema's fields.

Keys without a role are kept as they are and written back. `super_pod_list` and `cluster_list` name servers and super
pods of the table by their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ranktable.errors import BuildError
from ranktable.kinds import DeviceEntry, Entry, HoldingEntry, ServerEntry, Survey
from ranktable.model import NOTHING, Cluster, Device, RankTable, Server, SuperPod
from ranktable.problem import Problem
from ranktable.schema import (
    Field,
    Members,
    Schema,
    check_tree,
    check_version,
    list_objects,
    walk_objects,
    without,
)
from ranktable.values import parse_number

HOST_DEVICE = -1
"""The number of a rank that has no device (version 1.1)."""

# Written by known producers for other readers than HCCL, which skips them.
SERVER_EXTRAS = frozenset({"host_nic_ip", "container_ip", "server_ip", "pod_name", "hardware_type"})
DEVICE_EXTRAS = frozenset({"device_logical_id", "dpu_ip", "numa_id", "eid", "tor_ip", "tor_port", "pod_name"})

_DEVICE_FIELDS = (
    Field("device_ip", role="device_ip"),
    Field("rank_id", "number", missing="error", rule="R9", role="rank_id"),
    Field("device_port", "number", rule="R22"),
    Field("device_vnic_port", "number", rule="R22"),
    Field("host_port", "number", rule="R22"),
    Field("backup_device_ip"),
    Field("backup_device_port", "number", rule="R22"),
    Field("net_position"),
    Field("net_protocol"),
)
DEVICE_ID = Field("device_id", "number", missing="error", rule="R8", role="device_id")
DEVICE = Schema((DEVICE_ID, Field("super_device_id", "unread"), *_DEVICE_FIELDS), DEVICE_EXTRAS)
SUPER_POD_DEVICE = Schema((DEVICE_ID, Field("super_device_id", role="super_device_id"), *_DEVICE_FIELDS), DEVICE_EXTRAS)
"""A device that may have a number in its super pod; what is wrong with it is told by rule R24."""
SERVERS = ("server_list", "server_id")
SUPER_PODS = ("super_pod_list", "super_pod_id")
"""A list inside a holding, and the id in each of its entries."""
# Other lists inside a super pod or a cluster name their own entries; these few are known in an entry itself.
_MEMBER_EXTRAS = frozenset({"server_list", "super_pod_list", "server_id"})
_NAMED_SERVER = Schema((Field("server_id", missing="error"),), _MEMBER_EXTRAS)
_NAMED_POD = Schema((Field("super_pod_id", missing="error"),), _MEMBER_EXTRAS)
SUPER_POD = Schema(
    (
        Field("super_pod_id", missing="error", rule="R25", role="super_pod_id"),
        Field("server_list", "list", missing="error", of=_NAMED_SERVER),
    )
)


def server_fields(device: Schema) -> tuple[Field, ...]:
    """Return the keys of a server whose devices have that schema."""
    return (
        Field("server_id", missing="error", role="server_id"),
        Field("host_ip", role="host_ip"),
        Field("pod_ip", role="pod_ip"),
        Field("device", "list", missing="error", role="devices", of=device),
    )


SERVER = Schema(server_fields(DEVICE), SERVER_EXTRAS)
SUPER_POD_SERVER = Schema(server_fields(SUPER_POD_DEVICE), SERVER_EXTRAS)


def survey_servers(holder: Members, path: str, key: str, schema: Schema) -> tuple[ServerEntry, ...]:
    """Return what can be read of the array `holder[key]`, however faulty; members have the names of their roles."""
    found = []
    listed = schema.by_role["devices"]
    device_schema = schema.within(listed.name)
    for server_path, server in walk_objects(holder, path, key):
        members, places = schema.rename(server, server_path)
        devices = tuple(
            survey_device(device, device_path, device_schema)
            for device_path, device in walk_objects(server, server_path, listed.name)
        )
        found.append(ServerEntry(server_path, members, devices, places=places))
    return tuple(found)


def survey_device(device: Members, path: str, schema: Schema) -> DeviceEntry:
    """Return what can be read of a device. Number -1 is that of no device: any number of ranks on the host have it."""
    members, places = schema.rename(device, path)
    numbers = parse_number(members.get("device_id")), parse_number(members.get("rank_id"))
    return DeviceEntry(path, members, *numbers, places=places)


def decode_server(members: Members, schema: Schema, group: str | None = None) -> Server:
    """Return the server of an object that fits its schema."""
    rest = dict(members)
    listed = schema.by_role["devices"]
    device_schema = schema.within(listed.name)
    devices = tuple(decode_device(device, device_schema) for device in list_objects(rest, listed.name))
    rest.pop(listed.name, None)
    return Server(devices=devices, group=group, **_take(rest, schema), extra=rest or NOTHING)


def decode_device(members: Members, schema: Schema, **known: object) -> Device:
    """Return the device of an object that fits its schema; `known` is what stands elsewhere in the file."""
    rest = dict(members)
    taken = {**known, **_take(rest, schema)}
    taken["rank_id"], taken["device_id"] = int(str(taken["rank_id"])), int(str(taken.get("device_id", HOST_DEVICE)))
    return Device(**taken, extra=rest or NOTHING)  # type: ignore[arg-type]


def _take(rest: dict[str, object], schema: Schema) -> dict[str, str]:
    """Take the values with a role out of the members; an empty one that says nothing stays."""
    taken = {}
    for role, field in schema.by_role.items():
        name = field.name
        if name in rest and not (field.empty_is_none and rest[name] == ""):
            taken[role] = str(rest.pop(name))
    return taken


def servers_of_groups(table: RankTable) -> dict[str, list[Server]]:
    """Return the servers of each group of the table, in the order of both; raises BuildError for one in no group."""
    members: dict[str, list[Server]] = {group.name: [] for group in table.groups}
    for server in table.servers:
        if server.group is None or server.group not in members:
            message = f"server {server.server_id!r} is in none of the table's groups"
            raise BuildError(message, "name one of them in Server.group")
        members[server.group].append(server)
    return members


def encode_server(server: Server, schema: Schema, **empty: str) -> dict[str, object]:
    """Return the JSON object of a server; decoding it gives `server` again, its group apart.

    `empty` has values for the roles of devices that have none.
    """
    device_schema = schema.within(schema.by_role["devices"].name)
    devices = [encode_device(device, device_schema, **empty) for device in server.devices]
    return _put(server, schema, {"devices": devices})


def encode_device(device: Device, schema: Schema, **empty: str) -> dict[str, object]:
    """Return the JSON object of a device; decoding it gives `device` again."""
    return _put(device, schema, empty)


def _put(item: Server | Device, schema: Schema, otherwise: Mapping[str, object]) -> dict[str, object]:
    encoded: dict[str, object] = {}
    for role, field in schema.by_role.items():
        value = getattr(item, role)
        if role in otherwise and (value is None or role == "devices"):
            value = otherwise[role]
        if value is not None:
            encoded[field.name] = str(value) if type(value) is int and field.kind != "integer" else value
    # A key that the file has beside the one of the model is dropped where both would have one name.
    return (
        {**encoded, **{key: value for key, value in item.extra.items() if key not in encoded}}
        if item.extra
        else encoded
    )


def cluster_schema(demanded: str) -> Schema:
    """Return the schema of a cluster, which must have the list `demanded`."""
    lists = (("server_list", _NAMED_SERVER), ("super_pod_list", _NAMED_POD))
    return Schema(
        (
            Field("cluster_id", missing="error", role="cluster_id"),
            *(Field(name, "list", missing="error" if name == demanded else None, of=of) for name, of in lists),
        ),
        frozenset({"network_type", "az_id", "region_id"}),
    )


def survey_holdings(holder: Mapping[str, object], path: str, key: str) -> tuple[HoldingEntry, ...]:
    """Return what can be read of the super pods or clusters in the array `holder[key]`."""
    return tuple(
        HoldingEntry(place, members, _entries(members, place, SERVERS), _entries(members, place, SUPER_PODS))
        for place, members in walk_objects(holder, path, key)
    )


def _entries(holding: Mapping[str, object], path: str, member: tuple[str, str]) -> tuple[Entry, ...]:
    return tuple(Entry(place, members) for place, members in walk_objects(holding, path, member[0]))


def decode_super_pods(holder: Mapping[str, object]) -> tuple[SuperPod, ...]:
    """Return the super pods of an object that fits its schema."""
    pods = []
    for members in list_objects(holder, "super_pod_list"):
        rest = dict(members)
        pods.append(SuperPod(str(rest.pop("super_pod_id")), _pop_ids(rest, SERVERS), rest))
    return tuple(pods)


def decode_clusters(holder: Mapping[str, object]) -> tuple[Cluster, ...]:
    """Return the clusters of an object that fits its schema."""
    clusters = []
    for members in list_objects(holder, "cluster_list"):
        rest = dict(members)
        server_ids, pod_ids = _pop_ids(rest, SERVERS), _pop_ids(rest, SUPER_PODS)
        clusters.append(Cluster(str(rest.pop("cluster_id")), server_ids, pod_ids, rest))
    return tuple(clusters)


def _pop_ids(rest: dict[str, object], member: tuple[str, str]) -> tuple[str, ...]:
    """Take a list out of the members and return its ids.

    What its entries hold besides stays under the same key, by id, so that a list that loses entries loses that too.
    """
    entries = list_objects(rest, member[0])
    rest.pop(member[0], None)
    others = {
        str(entry[member[1]]): {key: value for key, value in entry.items() if key != member[1]}
        for entry in entries
        if len(entry) > 1
    }
    if others:
        rest[member[0]] = others
    return tuple(str(entry[member[1]]) for entry in entries)


def encode_super_pods(pods: Sequence[SuperPod]) -> list[dict[str, object]]:
    """Return the `super_pod_list` of the super pods."""
    return [
        {
            "super_pod_id": pod.super_pod_id,
            **_encode_ids(pod.server_ids, pod.extra, SERVERS),
            **_others(pod.extra, SERVERS),
        }
        for pod in pods
    ]


def encode_clusters(clusters: Sequence[Cluster]) -> list[dict[str, object]]:
    """Return the `cluster_list` of the clusters; a list that would be empty is left out."""
    return [
        {
            "cluster_id": cluster.cluster_id,
            **_encode_ids(cluster.server_ids, cluster.extra, SERVERS),
            **_encode_ids(cluster.super_pod_ids, cluster.extra, SUPER_PODS),
            **_others(cluster.extra, SERVERS, SUPER_PODS),
        }
        for cluster in clusters
    ]


def _encode_ids(ids: Sequence[str], extra: Mapping[str, object], member: tuple[str, str]) -> dict[str, object]:
    kept = extra.get(member[0])
    others = kept if isinstance(kept, Mapping) else {}
    return {member[0]: [{member[1]: name, **others.get(name, {})} for name in ids]} if ids else {}


def _others(extra: Mapping[str, object], *members: tuple[str, str]) -> dict[str, object]:
    lists = [name for name, _ in members]
    return {key: value for key, value in extra.items() if key not in lists}


@dataclass(frozen=True, slots=True)
class TableForm:
    """The codec of a dialect with one list of servers: its name, its version, and the schema of its top."""

    dialect: str
    version: str
    schema: Schema

    def check_structure(self, value: Members) -> list[Problem]:
        """Return every fault of the structure (R2, R4, R5, R31 and malformed numbers); empty when it can be decoded."""
        otherwise = (
            f"the keys are those of version {self.version}, and HCCL goes by this one"
            if self._list != "server_list"
            else "the version is not known for a table with server_list"
        )
        return [*check_version(value, (self.version,), otherwise), *check_tree(value, self.schema)]

    def survey(self, value: Members) -> Survey:
        """Return what can be read of the object, however faulty it is."""
        return Survey(
            "",
            value,
            survey_servers(value, "", self._list, self._server),
            self.dialect,
            survey_holdings(value, "", "super_pod_list") if self._reads("super_pod_list") else (),
            survey_holdings(value, "", "cluster_list") if self._reads("cluster_list") else (),
        )

    def decode(self, value: Members) -> RankTable:
        """Return the table. `value` must have passed `check_structure` without an error."""
        servers = tuple(decode_server(server, self._server) for server in list_objects(value, self._list))
        if self._writes_empty_addresses(value):
            servers = tuple(map(_drop_empty_addresses, servers))
        pods = decode_super_pods(value) if self._reads("super_pod_list") else ()
        clusters = decode_clusters(value) if self._reads("cluster_list") else ()
        rest = without(value, "version", "status", self._list)
        for key in ("super_pod_list", "cluster_list"):
            if self._reads(key):
                rest.pop(key, None)
        count = parse_number(rest.pop("server_count", None)) if "server_count" in self.schema.by_name else None
        return RankTable(self.dialect, servers, str(value["status"]), count, pods, clusters, extra=rest)

    def encode(self, table: RankTable) -> dict[str, object]:
        """Return the JSON object of `table`; decoding it gives `table` again.

        Raises BuildError for a table with something that this dialect has no place for.
        """
        self._refuse_foreign(table)
        empty = {"device_ip": ""} if self._writes_empty_addresses(table.extra) else {}
        count = {} if table.declared_server_count is None else {"server_count": str(table.declared_server_count)}
        return {
            "version": self.version,
            **(count if "server_count" in self.schema.by_name else {}),
            self._list: [encode_server(server, self._server, **empty) for server in table.servers],
            **({"super_pod_list": encode_super_pods(table.super_pods)} if table.super_pods else {}),
            **({"cluster_list": encode_clusters(table.clusters)} if table.clusters else {}),
            "status": table.status,
            **table.extra,
        }

    @property
    def _list(self) -> str:
        return self.schema.by_role["servers"].name

    @property
    def _server(self) -> Schema:
        return self.schema.within(self._list)

    def _writes_empty_addresses(self, members: Members) -> bool:
        """With heterog_sub_version every rank needs the key of its address, also without one (version 1.1)."""
        return "heterog_sub_version" in self.schema.by_name and "heterog_sub_version" in members

    def _reads(self, key: str) -> bool:
        field = self.schema.by_name.get(key)
        return field is not None and field.kind == "list"

    def _refuse_foreign(self, table: RankTable) -> None:
        device_roles = self._server.within(self._server.by_role["devices"].name).by_role
        found = {
            "super pods": bool(table.super_pods) and not self._reads("super_pod_list"),
            "clusters": bool(table.clusters) and not self._reads("cluster_list"),
            "groups": bool(table.groups) or any(server.group is not None for server in table.servers),
            "super device ids": "super_device_id" not in device_roles
            and any(device.super_device_id is not None for _, device in table.placements),
            **{
                f"a {role}": role not in self._server.by_role
                and any(getattr(server, role) is not None for server in table.servers)
                for role in ("host_ip", "pod_ip")
            },
        }
        foreign = " and ".join(name for name, is_there in found.items() if is_there)
        if foreign:
            message = f"a table with {foreign} cannot be written in dialect {self.dialect!r}"
            raise BuildError(message, "take them out, or choose a dialect that has them")


def _drop_empty_addresses(server: Server) -> Server:
    """Leave out the address where it is empty: it is written for every rank without one."""
    devices = tuple(
        replace(device, extra=without(device.extra, "rank_ip")) if device.device_ip is None else device
        for device in server.devices
    )
    return replace(server, devices=devices)
