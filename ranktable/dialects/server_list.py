"""Tables with `server_list[].device[]` whose scalars are strings.

HCCL goes by the version: in 1.0 it does not read `super_pod_list` and `super_device_id`, so they are reported and kept.
Volcano adds its keys to versions 1.0 and 1.2 too. Of a MindIE service group 0 holds the coordinators and group 1 the
controllers, which have no devices; every other group holds instances with ranks from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ranktable.kinds import Dialect, find_repeats, has_any
from ranktable.model import RankTable
from ranktable.problem import Problem, Severity, join_key
from ranktable.profile import Profile
from ranktable.rules import Rule, citations
from ranktable.rules.identity import check_cover
from ranktable.schema import Count, Field, Members, Schema

PLAIN, SUPER_PODS = "1.0", "1.2"
_LISTED = frozenset(["R6", "R7", "R8", "R9", "R10", "R12", "R13", "R14", "R15", "R16", "R21", "R22", "R27"])
"""What holds for every list of servers and their devices."""
_SUPER_PODS = {"R24", "R25", "R26"}
_ORDER = {"R11", "P1", "P2", "P6"}
_OF_910A = {"R17", "R18", "R19", "R20"}
_CONTROL = ("0", "1")
"""Ids of the two groups of MindIE without devices."""

# Written by known producers for other readers than HCCL, which skips them.
_SERVER_EXTRAS = frozenset({"host_nic_ip", "container_ip", "server_ip", "pod_name", "hardware_type"})
_DEVICE_EXTRAS = frozenset({"device_logical_id", "dpu_ip", "numa_id", "eid", "tor_ip", "tor_port", "pod_name"})
_PORTS = frozenset({"predict_port", "mgmt_port", "metric_port", "inter_comm_port"})
_EXTRAS = frozenset({"cluster_list", "data_version", "hardware_type", "super_pod_list"})
# Other lists inside a super pod or a cluster name their own entries; these few are known in an entry itself.
_MEMBER_EXTRAS = frozenset({"server_list", "super_pod_list", "server_id"})


def _device(number: Field) -> Schema:
    return Schema(
        Field("device_id", "number", missing="error", rule="R8", role="device_id"),
        number,
        Field("device_ip", role="device_ip"),
        Field("rank_id", "number", missing="error", rule="R9", role="rank_id"),
        *(Field(key, "number", rule="R22") for key in ("device_port", "device_vnic_port", "host_port")),
        Field("backup_device_ip"),
        Field("backup_device_port", "number", rule="R22"),
        Field("net_position"),
        Field("net_protocol"),
        extras=_DEVICE_EXTRAS,
    )


def _server(device: Schema, extras: frozenset[str] = frozenset(), *, may_be_control: bool = False) -> Schema:
    missing: Severity | None = None if may_be_control else "error"
    return Schema(
        Field("server_id", missing=missing, role="server_id"),
        Field("host_ip", role="host_ip"),
        Field("pod_ip", role="pod_ip"),
        Field("device", "list", missing=missing, role="devices", of=device),
        *([Field("server_ip", missing="error")] if may_be_control else ()),
        extras=_SERVER_EXTRAS | extras,
    )


_PLAIN_SERVER = _server(_device(Field("super_device_id", "unread")))
_POD_DEVICE = _device(Field("super_device_id", role="super_device_id"))
_POD_SERVER = _server(_POD_DEVICE)
_NAMED_SERVER = Schema(Field("server_id", missing="error"), extras=_MEMBER_EXTRAS)
_SUPER_POD = Schema(
    Field("super_pod_id", missing="error", rule="R25", role="super_pod_id"),
    Field("server_list", "list", missing="error", of=_NAMED_SERVER),
)
_COUNT = Field("server_count", "number", missing="warning", rule="R6", count=Count(("server_list",), "server"))
_POD_LIST = Field("super_pod_list", "list", of=_SUPER_POD)
_UNREAD_PODS = Field("super_pod_list", "unread", of=_SUPER_POD)
_DATA_VERSION = Field("data_version", "integer", missing="warning", rule="R4")


def _schema(server: Schema, *more: Field) -> Schema:
    servers = Field("server_list", "list", missing="error", role="servers", of=server)
    return Schema(Field("version"), Field("status", missing="error"), _COUNT, servers, *more, extras=_EXTRAS)


_CLUSTER = Schema(
    Field("cluster_id", missing="error", role="cluster_id"),
    Field("server_list", "list", missing="error", of=_NAMED_SERVER),
    extras=frozenset({"super_pod_list", "network_type", "az_id", "region_id"}),
)
_CLUSTERS = Field("cluster_list", "list", missing="error", of=_CLUSTER)
_CONTROL_OR_INSTANCE = _server(_POD_DEVICE, _PORTS, may_be_control=True)
_GROUP = Schema(
    Field("group_id", missing="error", role="group"),
    _COUNT,
    # A group whose pods have not started has no servers yet, and MindIE-Motor reads it all the same.
    Field("server_list", "any_list", missing="error", role="servers", of=_CONTROL_OR_INSTANCE),
    Field("deploy_server"),
    _POD_LIST,
)
_SERVICE = Schema(
    Field("version"),
    Field("status", missing="error"),
    Field("server_group_list", "list", missing="error", role="groups", of=_GROUP),
)


def _has_version(version: str) -> Callable[[Members], str]:
    def find_evidence(value: Members) -> str:
        is_it = "server_list" in value and value.get("version") == version
        return f'server_list with version "{version}"' if is_it else ""

    return find_evidence


def _is_super_pod(value: Members) -> str:
    """Version 1.2, or a super pod list without a version. Version 1.0 with one stays 1.0: HCCL goes by the version."""
    found = _has_version(SUPER_PODS)(value)
    return found or ("super_pod_list and no version" if "super_pod_list" in value and "version" not in value else "")


def _is_cross_cluster(value: Members) -> str:
    """Version 1.0 with clusters: MindSpore goes by the key, HCCL skips it."""
    is_it = "server_list" in value and "cluster_list" in value and value.get("version", PLAIN) == PLAIN
    return f'cluster_list with version "{PLAIN}"' if is_it else ""


def _is_plain(value: Members) -> str:
    if "server_list" in value:
        return "server_list"
    return f'version "{PLAIN}"' if value.get("version") == PLAIN else ""


@Rule(
    "P4",
    "cluster_list has unique clusters that cover every server once, and no others",
    is_whole=True,
    sources=(citations.MINDSPORE,),
)
def check_clusters(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """HCCL skips the key, MindSpore goes by it."""
    clusters = table.entries("cluster_list")
    same, remedy = "the same cluster_id stands at {}", "give each cluster its own id"
    yield from find_repeats(clusters, "cluster_id", "P4", same, remedy)
    members = [entry for cluster in clusters for entry in cluster.entries("server_list")]
    yield from check_cover(members, table.servers, "server_id", "server_list", "P4", "cluster of cluster_list")


@Rule(
    "P5",
    "every group has a group_id of its own, and every server of an instance an id and devices",
    is_whole=True,
    sources=(citations.MINDIE_MOTOR,),
)
def check_groups(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """Coordinators and controllers have no devices, and go by their server_ip."""
    groups = table.entries("server_group_list")
    yield from find_repeats(groups, "group_id", "P5", "the same group_id stands at {}", "give each group its own id")
    for server in table.servers:
        for key in ("server_id", "device") if server.group not in _CONTROL else ():
            if not server.has(key):
                path = join_key(server.path, key)
                yield Problem(path, "P5", "error", "the key is missing; an instance has it", f"add {key!r}")


DIALECTS = (
    Dialect(
        name="mindie-global",
        title="a MindIE global table",
        recognise=has_any("server_group_list"),
        keys=("server_group_list",),
        sources=(citations.MINDIE_MOTOR,),
        schema=_SERVICE,
        versions=(PLAIN, SUPER_PODS),
        rules=_LISTED | _SUPER_PODS | {"P1", "P5"},
        reads_super_pods=True,
    ),
    Dialect(
        name="volcano-job",
        title="a Volcano job table (version 1.3)",
        recognise=_has_version("1.3"),
        sources=(citations.VOLCANO,),
        schema=_schema(_POD_SERVER, _POD_LIST, _DATA_VERSION),
        versions=("1.3",),
        rules=_LISTED | _ORDER | _OF_910A | _SUPER_PODS,
        refused_version="1.3",
        reads_super_pods=True,
    ),
    Dialect(
        name=SUPER_PODS,
        title="a super pod rank table (version 1.2)",
        recognise=_is_super_pod,
        keys=("super_pod_list",),
        sources=(citations.CONCISE, citations.A3_PAGE, citations.OPERATOR),
        schema=_schema(_POD_SERVER, _POD_LIST),
        versions=(SUPER_PODS,),
        rules=_LISTED | _ORDER | _SUPER_PODS,
        readers=frozenset({"hccl", "mindspore"}),
        is_for_a3=True,
        reads_super_pods=True,
        is_written=True,
    ),
    Dialect(
        name="cross-cluster",
        title="a rank table over several clusters (version 1.0 with cluster_list)",
        recognise=_is_cross_cluster,
        sources=(citations.MINDSPORE,),
        schema=_schema(_PLAIN_SERVER, _UNREAD_PODS, _CLUSTERS),
        versions=(PLAIN,),
        rules=_LISTED | _ORDER | _OF_910A | {"P4"},
        readers=frozenset({"hccl", "mindspore"}),
    ),
    Dialect(
        name=PLAIN,
        title="a version 1.0 rank table",
        recognise=_is_plain,
        keys=("server_list", "server_count"),
        sources=(citations.CONCISE, citations.MINDSPORE),
        schema=_schema(_PLAIN_SERVER, _UNREAD_PODS),
        versions=(PLAIN,),
        rules=_LISTED | _ORDER | _OF_910A,
        readers=frozenset({"hccl", "mindspore"}),
        is_written=True,
    ),
)
