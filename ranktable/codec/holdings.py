"""The lists `super_pod_list` and `cluster_list`, which name servers and super pods of the table by their ids.

Source: the A3 rank table page of the HCCL documentation (super pods), the rank table pages of MindSpore (clusters of
servers) and the global tables of Volcano (clusters of super pods).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranktable.codec.schema import Field, Schema, list_objects, walk_objects
from ranktable.model import Cluster, SuperPod
from ranktable.survey import Entry, HoldingEntry

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
