"""Ranks in the order that HCCL and MindSpore expect: string order of server_id, then device_id (rules R9 to R12)."""

from __future__ import annotations

from collections.abc import Iterator

from ranktable.codec.schema import parse_number
from ranktable.edit.repair import Repair, replaced
from ranktable.problem import join_index, join_key

Members = dict[str, object]


def reorder_ranks(value: Members, notes: list[str]) -> Iterator[Repair]:
    """Sort the servers by id as strings and their devices by number, and number the ranks in that order.

    Only for tables of `server_list` with one rank space, and only when every id can be read and is there once;
    otherwise nothing is changed, and `notes` gets the reason.
    """
    servers = value.get("server_list")
    reason = _find_obstacle(servers)
    if reason or not isinstance(servers, list):
        notes.append(f"the ranks are not reordered: {reason}")
        return
    before = [id(item) for server in servers for item in [server, *server["device"]]]
    servers.sort(key=lambda server: str(server["server_id"]))
    for server in servers:
        server["device"].sort(key=lambda device: parse_number(device["device_id"]) or 0)
    if [id(item) for server in servers for item in [server, *server["device"]]] != before:
        yield Repair("R11", "server_list", "sorted by server_id as strings, devices by device_id")
    yield from _number(servers)


def _number(servers: list[Members]) -> Iterator[Repair]:
    rank = 0
    for server_index, server in enumerate(servers):
        devices = server["device"]
        path = join_key(join_index("server_list", server_index), "device")
        for index, device in enumerate(devices if isinstance(devices, list) else ()):
            before = device.get("rank_id")
            if before != str(rank):
                device["rank_id"] = str(rank)
                place = join_key(join_index(path, index), "rank_id")
                yield Repair("R9", place, f"added {rank}" if before is None else replaced(before, str(rank)))
            rank += 1


def _find_obstacle(servers: object) -> str:
    """Return why the ranks cannot be numbered; empty when they can."""
    if not isinstance(servers, list) or not servers:
        return "only tables with a server_list can be"
    seen: set[str] = set()
    for index, server in enumerate(servers):
        server_id = server.get("server_id") if isinstance(server, dict) else None
        devices = server.get("device") if isinstance(server, dict) else None
        if not isinstance(server_id, str) or not isinstance(devices, list):
            return f"server_list[{index}] has no usable server_id or device"
        if server_id in seen:
            return f"the server_id of server_list[{index}] is there twice"
        seen.add(server_id)
        ids = [parse_number(device.get("device_id")) if isinstance(device, dict) else None for device in devices]
        if None in ids or len(set(ids)) < len(ids):
            return f"the device ids of server_list[{index}] are not readable and different"
    return ""
