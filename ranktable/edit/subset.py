"""Cuts a table down to some of its servers and devices: super pods, clusters and groups follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ranktable.errors import EditError
from ranktable.model import Cluster, Group, RankTable, Server, SuperPod

_Places = dict[str, list[tuple[int, int]]]


class Cutter:
    """Cuts one table any number of times; the cost of a cut is that of what is kept."""

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self._pods_of = _index(pod.server_ids for pod in table.super_pods)
        self._clusters_of = _index(cluster.server_ids for cluster in table.clusters)
        self._clusters_of_pod = _index(cluster.super_pod_ids for cluster in table.clusters)
        self._peopled_groups = {server.group for server in table.servers}
        self._place_of_group = {group.name: place for place, group in enumerate(table.groups)}
        self._empty_groups = {place for name, place in self._place_of_group.items() if name not in self._peopled_groups}

    def cut(self, servers: Sequence[Server]) -> RankTable:
        """Return the table with `servers` (its own, perhaps with fewer devices) in place of all; ranks stay.

        Super pods and clusters without a server are left out; so are groups, those apart that never had one.
        Raises EditError when no device is left.
        """
        kept = tuple(server for server in servers if server.devices)
        if not kept:
            raise EditError("no device of the table is left", "choose servers, devices or ranks that it has")
        count = None if self._table.declared_server_count is None else len(kept)
        pods = self._cut_pods(kept)
        return replace(
            self._table,
            servers=kept,
            declared_server_count=count,
            super_pods=pods,
            clusters=self._cut_clusters(kept, pods),
            groups=self._cut_groups(kept),
        )

    def pods_of(self, server_id: str) -> tuple[SuperPod, ...]:
        """Return the super pods that name the server."""
        return tuple(self._table.super_pods[place] for place, _ in self._pods_of.get(server_id, ()))

    def _cut_pods(self, kept: Sequence[Server]) -> tuple[SuperPod, ...]:
        found = _gather((server.server_id for server in kept), self._pods_of)
        pods = self._table.super_pods
        return tuple(replace(pods[place], server_ids=found[place]) for place in sorted(found))

    def _cut_clusters(self, kept: Sequence[Server], pods: Sequence[SuperPod]) -> tuple[Cluster, ...]:
        by_server = _gather((server.server_id for server in kept), self._clusters_of)
        by_pod = _gather((pod.super_pod_id for pod in pods), self._clusters_of_pod)
        return tuple(
            replace(
                self._table.clusters[place], server_ids=by_server.get(place, ()), super_pod_ids=by_pod.get(place, ())
            )
            for place in sorted({*by_server, *by_pod})
        )

    def _cut_groups(self, kept: Sequence[Server]) -> tuple[Group, ...]:
        places = {self._place_of_group[server.group] for server in kept if server.group in self._place_of_group}
        return tuple(self._table.groups[place] for place in sorted(places | self._empty_groups))


def _index(lists: Iterable[Sequence[str]]) -> _Places:
    """Return for each name the lists that hold it, and its place in each."""
    places: _Places = {}
    for number, names in enumerate(lists):
        for place, name in enumerate(names):
            places.setdefault(name, []).append((number, place))
    return places


def _gather(names: Iterable[str], places: Mapping[str, Sequence[tuple[int, int]]]) -> dict[int, tuple[str, ...]]:
    """Return for each list the names that it holds, in its own order."""
    found: dict[int, list[tuple[int, str]]] = {}
    for name in dict.fromkeys(names):
        for number, place in places.get(name, ()):
            found.setdefault(number, []).append((place, name))
    return {number: tuple(name for _, name in sorted(pairs)) for number, pairs in found.items()}
