"""The order of servers, and ranks numbered in it: 0 to n-1 without holes.

Source: HCCL and MindSpore ask for the string order of the server ids (rule R11); operators of clusters count by value.
What a rank must be: HCCL's parser (EI0014: below the number of devices, each once; rule R9).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from ranktable.errors import EditError
from ranktable.model import Device, RankTable, Server
from ranktable.text import count_noun, plain
from ranktable.values import parse_address

MergeOrder = Literal["server_id", "argument", "numeric", "host_file"]
MERGE_ORDERS: tuple[MergeOrder, ...] = ("server_id", "argument", "numeric", "host_file")

_MEANING = {
    "server_id": "the string order of their ids",
    "argument": "the order of the arguments",
    "numeric": "the numeric order of their ids",
    "host_file": "the order of the host list",
}


_DIGITS = re.compile(r"([0-9]+)")
RankKey = Callable[[int, Device], Any]
"""What the ranks are sorted by: of the place of a server in the list, and a device of it."""


def numeric_key(server_id: str) -> tuple[int, int, tuple[str | int, ...]]:
    """Return a sort key that compares addresses by value, and names by text and numbers in turn; addresses first."""
    address = parse_address(server_id)
    if address is not None:
        return 0, address.version, (int(address),)
    return 1, 0, tuple(int(part) if index % 2 else part for index, part in enumerate(_DIGITS.split(server_id)))


def sort_servers(servers: Sequence[Server], order: MergeOrder, hosts: Sequence[str] | None) -> list[Server]:
    """Return the servers in the order of the list to be; raises EditError for an order that cannot be had."""
    if order not in MERGE_ORDERS:
        raise EditError(f"order {order!r} is not known", f"choose one of {', '.join(MERGE_ORDERS)}")
    if (order == "host_file") != (hosts is not None):
        raise EditError("the order host_file and a list of hosts go together", "give both or neither")
    if order == "argument":
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


def number_devices(servers: Sequence[Server], key: RankKey) -> tuple[Server, ...]:
    """Return the servers with the ranks 0 to n-1 in ascending order of `key`; equal ones stay as listed."""
    keys = [key(place, device) for place, server in enumerate(servers) for device in server.devices]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    rank_at = [0] * len(keys)
    for rank_id, index in enumerate(order):
        rank_at[index] = rank_id
    ranks = iter(rank_at)
    return tuple(_with_ranks(server, ranks) for server in servers)


def number_by_position(servers: Sequence[Server]) -> tuple[Server, ...]:
    """Return the servers with the ranks that readers of the cloud form of template 2 count: by server_id, device_id."""
    return number_devices(servers, lambda place, device: (servers[place].server_id, device.device_id))


def find_moved(before: Sequence[Server], after: Sequence[Server]) -> tuple[Server, Device, int] | None:
    """Return the first device that has another rank in `after`, with its server and that rank; None without one."""
    pairs = zip(before, after, strict=True)
    return next(
        (
            (server, device, moved.rank_id)
            for server, other in pairs
            for device, moved in zip(server.devices, other.devices, strict=True)
            if device.rank_id != moved.rank_id
        ),
        None,
    )


def _with_ranks(server: Server, ranks: Iterator[int]) -> Server:
    """Take one rank per device from `ranks`, in the order of the list."""
    devices = tuple(
        device if device.rank_id == rank_id else replace(device, rank_id=rank_id)
        for device, rank_id in zip(server.devices, ranks, strict=False)
    )
    is_same = all(new is old for new, old in zip(devices, server.devices, strict=True))
    return server if is_same else replace(server, devices=devices)
