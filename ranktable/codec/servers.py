"""Servers, devices, super pods and clusters between JSON and the neutral table, by the roles of a schema's fields.

Servers and devices between JSON and the neutral table, by the roles that the fields of a schema have.

Source of the keys: the rank table pages of the HCCL, MindSpore and MindIE documentation, and what HCCL's parser reads.
Keys without a role are kept as they are and written back.

The lists `super_pod_list` and `cluster_list`, which name servers and super pods of the table by their ids.

Source: the A3 rank table page of the HCCL documentation (super pods), the rank table pages of MindSpore (clusters of
servers) and the global tables of Volcano (clusters of super pods).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranktable.codec.schema import Field, Members, Schema, list_objects, walk_objects
from ranktable.errors import BuildError
from ranktable.model import NOTHING, Cluster, Device, RankTable, Server, SuperPod
from ranktable.survey import DeviceEntry, Entry, HoldingEntry, ServerEntry
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
