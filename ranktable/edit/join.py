"""Joins what tables say beside their servers: super pods, clusters, groups, and the other keys at their top."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from ranktable.compare import same_json
from ranktable.model import Cluster, Group, SuperPod
from ranktable.report.words import plain

_Item = TypeVar("_Item", SuperPod, Cluster, Group)

DATA_VERSION = "data_version"
"""Volcano's counter of changes; the highest of several is the newest, and no conflict."""


@dataclass(slots=True)
class Joined(Generic[_Item]):
    """Items of one kind in the order of their first appearance, each name once; with what was joined, and conflicts."""

    items: list[_Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


def join_super_pods(sources: Iterable[tuple[str, Sequence[SuperPod]]]) -> Joined[SuperPod]:
    """Return the super pods of all sources; pods of equal ids become one with the servers of both."""
    return _join(sources, "super pod", lambda pod: pod.super_pod_id, _add_pod)


def join_clusters(sources: Iterable[tuple[str, Sequence[Cluster]]]) -> Joined[Cluster]:
    """Return the clusters of all sources; clusters of equal ids become one with the members of both."""
    return _join(sources, "cluster", lambda cluster: cluster.cluster_id, _add_cluster)


def join_groups(sources: Iterable[tuple[str, Sequence[Group]]]) -> Joined[Group]:
    """Return the groups of all sources; groups of equal names become one."""
    return _join(sources, "group", lambda group: group.name, lambda _kept, added: added[0])


def join_extras(sources: Iterable[tuple[str, Mapping[str, object]]]) -> tuple[dict[str, object], list[str], list[str]]:
    """Return the other keys of all sources with notes and conflicts: equal values stay, others are in conflict."""
    joined: dict[str, object] = {}
    first_of: dict[str, str] = {}
    count_of: dict[str, int] = {}
    notes: list[str] = []
    conflicts: list[str] = []
    versions: set[str] = set()
    num_sources = 0
    for source, extra in sources:
        num_sources += 1
        for key, value in extra.items():
            count_of[key] = count_of.get(key, 0) + 1
            if key not in joined:
                joined[key], first_of[key] = value, source
            elif not same_json(joined[key], value):
                newest = _newest(joined[key], value) if key == DATA_VERSION else None
                if newest is None:
                    conflicts.append(f"{source}: {plain(key)} is not what {first_of[key]} says")
                else:
                    joined[key] = newest
                    versions.add(key)
    notes += [f"{key} is {joined[key]}, the highest of the tables" for key in versions]
    notes += [f"{plain(key)} is not in every table" for key, count in count_of.items() if count < num_sources]
    return joined, notes, conflicts


def _newest(first: object, second: object) -> object | None:
    """Return the higher of two counters, None when one is no counter."""
    both = [value for value in (first, second) if isinstance(value, int) and not isinstance(value, bool)]
    return max(both) if len(both) == 2 else None


def _join(
    sources: Iterable[tuple[str, Sequence[_Item]]],
    noun: str,
    name_of: Callable[[_Item], str],
    add: Callable[[_Item, Sequence[_Item]], _Item],
) -> Joined[_Item]:
    gathered: dict[str, list[tuple[str, _Item]]] = {}
    for source, items in sources:
        for item in items:
            gathered.setdefault(name_of(item), []).append((source, item))
    joined: Joined[_Item] = Joined()
    for name, found in gathered.items():
        first_source, first = found[0]
        for source, item in found[1:]:
            if not same_json(dict(first.extra), dict(item.extra)):
                joined.conflicts.append(f"{source}: {noun} {plain(name)!r} has other keys than in {first_source}")
        joined.items.append(add(first, [item for _, item in found]) if len(found) > 1 else first)
        if len(found) > 1:
            places = dict.fromkeys(source for source, _ in found)
            joined.notes.append(f"{noun} {plain(name)} is joined out of {_list(list(places))}")
    return joined


def _add_pod(first: SuperPod, found: Sequence[SuperPod]) -> SuperPod:
    return replace(first, server_ids=tuple(server_id for pod in found for server_id in pod.server_ids))


def _add_cluster(first: Cluster, found: Sequence[Cluster]) -> Cluster:
    server_ids = tuple(server_id for cluster in found for server_id in cluster.server_ids)
    pod_ids = dict.fromkeys(pod_id for cluster in found for pod_id in cluster.super_pod_ids)
    return replace(first, server_ids=server_ids, super_pod_ids=tuple(pod_ids))


def _list(sources: Sequence[str]) -> str:
    shown = ", ".join(sources[:3])
    return shown if len(sources) <= 3 else f"{shown} and {len(sources) - 3} more"
