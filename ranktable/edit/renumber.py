"""New ranks for the devices of a table: 0 to n-1 without holes.

Source of what a rank must be: HCCL's parser (EI0014: below the number of devices, each once; rule R9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ranktable.errors import EditError
from ranktable.model import Device, RankTable, Server

RankKey = Callable[[int, Device], Any]
"""What the ranks are sorted by: of the place of a server in the list, and a device of it."""

_OWN_RANKS_PER_GROUP = frozenset({"mindie-global"})
_RANKS_BY_POSITION = frozenset({"template2-cloud"})


def renumber_ranks(table: RankTable) -> RankTable:
    """Return the table with the ranks 0 to n-1 in the order of the ranks that it has; holes are closed.

    The lists stay in their order. Raises EditError for a dialect whose ranks start again in every group.
    """
    refuse_group_ranks(table, "renumbered")
    return replace(table, servers=number_devices(table.servers, lambda _place, device: device.rank_id))


def number_devices(servers: Sequence[Server], key: RankKey) -> tuple[Server, ...]:
    """Return the servers with the ranks 0 to n-1 in ascending order of `key`; equal ones stay as listed."""
    keys = [key(place, device) for place, server in enumerate(servers) for device in server.devices]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    rank_at = [0] * len(keys)
    for rank_id, index in enumerate(order):
        rank_at[index] = rank_id
    ranks = iter(rank_at)
    return tuple(_with_ranks(server, ranks) for server in servers)


def refuse_group_ranks(table: RankTable, done: str) -> None:
    """Raise EditError when the ranks of the table start again in every group, so that they name no device alone."""
    if table.dialect in _OWN_RANKS_PER_GROUP:
        message = f"a table of dialect {table.dialect} cannot be {done}: the ranks start again in each of its groups"
        raise EditError(message, "edit the table of each group before they are put together")


def has_ranks_by_position(table: RankTable) -> bool:
    """True when the dialect writes no ranks: its readers count them, in string order of server_id, then device_id.

    Source: HCCL's parser of template 2, cloud form.
    """
    return table.dialect in _RANKS_BY_POSITION


def _with_ranks(server: Server, ranks: Iterator[int]) -> Server:
    """Take one rank per device from `ranks`, in the order of the list."""
    devices = tuple(
        device if device.rank_id == rank_id else replace(device, rank_id=rank_id)
        for device, rank_id in zip(server.devices, ranks, strict=False)
    )
    is_same = all(new is old for new, old in zip(devices, server.devices, strict=True))
    return server if is_same else replace(server, devices=devices)
