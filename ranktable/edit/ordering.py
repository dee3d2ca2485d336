"""The orders in which a merge puts servers and ranks, and what is to be said of each.

Source: HCCL and MindSpore ask for the string order of the server ids (rule R11); operators of clusters count by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from ranktable.assembly.generate import numeric_key
from ranktable.errors import EditError
from ranktable.model import RankTable, Server
from ranktable.report.words import count_noun, plain

MergeOrder = Literal["server_id", "argument", "numeric", "rank", "host_file"]
MERGE_ORDERS: tuple[MergeOrder, ...] = ("server_id", "argument", "numeric", "rank", "host_file")

_MEANING = {
    "server_id": "the string order of their ids",
    "argument": "the order of the arguments",
    "numeric": "the numeric order of their ids",
    "rank": "the order of the arguments, and every device keeps its rank",
    "host_file": "the order of the host list",
}


def sort_servers(servers: Sequence[Server], order: MergeOrder, hosts: Sequence[str] | None) -> list[Server]:
    """Return the servers in the order of the list to be; raises EditError for an order that cannot be had."""
    if order not in MERGE_ORDERS:
        raise EditError(f"order {order!r} is not known", f"choose one of {', '.join(MERGE_ORDERS)}")
    if (order == "host_file") != (hosts is not None):
        raise EditError("the order host_file and a list of hosts go together", "give both or neither")
    if order in ("argument", "rank"):
        return list(servers)
    keys: dict[str, Callable[[Server], Any]] = {
        "server_id": lambda server: server.server_id,
        "numeric": lambda server: (numeric_key(server.server_id), server.server_id),
    }
    return sorted(servers, key=_by_host(servers, hosts) if hosts is not None else keys[order])


def sort_holders(table: RankTable) -> RankTable:
    """Return the table with super pods, clusters and groups, and their members, in the order of its servers."""
    place_of = {server.server_id: place for place, server in enumerate(table.servers)}
    last = len(place_of)

    def by_place(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=lambda name: place_of.get(name, last)))

    def first_place(names: Sequence[str]) -> int:
        return place_of.get(names[0], last) if names else last

    pods = [replace(pod, server_ids=by_place(pod.server_ids)) for pod in table.super_pods]
    pods.sort(key=lambda pod: first_place(pod.server_ids))
    servers_of_pod = {pod.super_pod_id: pod.server_ids for pod in pods}
    pod_place = {pod.super_pod_id: place for place, pod in enumerate(pods)}
    clusters = [
        replace(
            cluster,
            server_ids=by_place(cluster.server_ids),
            super_pod_ids=tuple(sorted(cluster.super_pod_ids, key=lambda pod_id: pod_place.get(pod_id, last))),
        )
        for cluster in table.clusters
    ]
    clusters.sort(
        key=lambda cluster: min(
            first_place(cluster.server_ids), first_place(servers_of_pod.get(next(iter(cluster.super_pod_ids), ""), ()))
        )
    )
    place_of_group = {server.group: place for place, server in reversed(list(enumerate(table.servers)))}
    groups = sorted(table.groups, key=lambda group: place_of_group.get(group.name, last))
    return replace(table, super_pods=tuple(pods), clusters=tuple(clusters), groups=tuple(groups))


def describe_order(given: Sequence[Server], ordered: Sequence[Server], order: MergeOrder) -> list[str]:
    """Return which order was used, and where it is not what a reader or a user may take for granted."""
    if len(ordered) < 2:
        return []
    first = min((device.rank_id, server.server_id) for server in ordered for device in server.devices)[1]
    notes = [f"servers follow {_MEANING[order]}; rank 0 is on {plain(first)}"]
    if [server.server_id for server in given] != [server.server_id for server in ordered]:
        notes.append("that is not the order of the arguments")
    if order == "argument":
        notes += _find_trap(ordered)
    by_rank = [server.server_id for server in sorted(ordered, key=lambda server: server.ranks[:1])]
    if any(later < earlier for earlier, later in pairwise(by_rank)):
        notes.append("warning: Ascend readers ask for the string order of the server ids (rule R11)")
    return notes


def _find_trap(ordered: Sequence[Server]) -> list[str]:
    """Name the first pair that a shell's string sorting has put in an order that no person would."""
    for before, after in pairwise(server.server_id for server in ordered):
        if before < after and numeric_key(after) < numeric_key(before):
            return [f"{plain(before)} stands before {plain(after)}, as a shell sorts names; by value it comes later"]
    return []


def _by_host(servers: Sequence[Server], hosts: Sequence[str]) -> Callable[[Server], int]:
    place_of = {host: place for place, host in enumerate(hosts)}
    missing = [server for server in servers if server.server_id not in place_of and server.host_ip not in place_of]
    if missing:
        more = f" (and {count_noun(len(missing) - 1, 'server')} more)" if len(missing) > 1 else ""
        message = f"server {missing[0].server_id!r}{more} is not in the list of hosts"
        raise EditError(message, "name every server there by its server_id or host_ip")

    def place(server: Server) -> int:
        return place_of[server.server_id] if server.server_id in place_of else place_of[str(server.host_ip)]

    return place
