"""Version 2.0: `rank_list[].level_list[]`, numbers as JSON integers, read by HCCL on Ascend 950.

The file lists ranks, not servers. In the model the ranks of one sub-network of layer 0 (equal `net_instance_id`; of the
lowest layer where there is no layer 0) are one server, and what the model has no place for stays in `Device.extra`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

from ranktable.kinds import Dialect, has_any, join_servers, make_table, read_device, read_server
from ranktable.model import Entry, RankTable
from ranktable.problem import Problem, join_key, show_value
from ranktable.profile import Profile
from ranktable.rules import Rule, citations
from ranktable.rules.identity import check_counts, check_ranks
from ranktable.schema import Count, Field, Schema, check_limits

_NAME = "2.0"
_RULE = "R30"
_SPARE_ID = 64
"""The local_id of the spare card that stands in for another."""
_DOCUMENTED_TYPES = (None, "TOPO_FILE_DESC", "CLOS")
_NET_TYPES = ("TOPO_FILE_DESC", "CLOS", "1DMESH", "2DMESH", "A3_SERVER", "A2_AX_SERVER")
_ADDRESS_TYPES = ("EID", "IPV4", "IPV6")
_MAX_PORTS, _MAX_PORT_NAME, _MAX_ADDRESS = 16, 32, 256
_EID = re.compile(r"[0-9A-Fa-f]{32}")


def _number(name: str, lowest: int, highest: int, *, optional: bool = False) -> Field:
    role = name if name == "device_id" else None
    return Field(
        name, "integer", missing=None if optional else "error", rule=_RULE, role=role, limits=(lowest, highest)
    )


_ADDRESS = (Field("addr_type", missing="error", choices=_ADDRESS_TYPES), Field("addr", missing="error"))
_LEVEL = Schema(
    _number("net_layer", 0, 7),
    Field("net_instance_id", missing="error", role="server_id", limits=(1, 1024)),
    Field("net_type", choices=_NET_TYPES),
    Field("net_attr"),
    Field(
        "rank_addr_list",
        "entries",
        missing="error",
        limits=(0, 24),
        of=Schema(
            *_ADDRESS,
            Field("ports", "texts", missing="error"),
            Field("plane_id", limits=(0, 1024)),
            Field("backup_addr", "texts", limits=(0, 16)),
        ),
    ),
    extras=frozenset({"elec_group_id", "pcie_fallback"}),
)
_RANK = Schema(
    Field("rank_id", "integer", missing="error", rule=_RULE, role="rank_id"),
    _number("local_id", 0, _SPARE_ID),
    _number("device_id", 0, 64),
    Field("replaced_local_id", "integer", rule=_RULE),
    _number("device_port", 1, 65535, optional=True),
    _number("host_port", 1, 65535, optional=True),
    Field("level_list", "list", missing="error", limits=(1, 8), of=_LEVEL),
    Field("control_plane", "object", of=Schema(*_ADDRESS, _number("listen_port", 1, 65536))),
)
_SCHEMA = Schema(
    Field("version"),
    Field("status"),
    Field("detour", choices=("true", "false", "")),
    Field("rank_count", "integer", missing="error", rule=_RULE, count=Count(("rank_list",), "rank"), limits=(1, 65536)),
    Field("rank_list", "list", missing="error", role="servers", of=_RANK),
)


def _read(top: Entry, kind: Dialect) -> RankTable:
    """Return what can be read; a rank whose sub-network cannot be read stands alone."""
    found = []
    for rank in top.entries("rank_list"):
        levels = rank.entries("level_list")
        readable = [(layer, level) for level in levels if (layer := level.number("net_layer")) is not None]
        lowest = min(readable, key=lambda pair: pair[0], default=(0, Entry(path=rank.path)))[1]
        members = {"server_id": lowest.text("net_instance_id")} if lowest.text("net_instance_id") is not None else {}
        head = Entry(path=rank.path, members=members, places={"server_id": join_key(lowest.path, "net_instance_id")})
        found.append(read_server(head, [read_device(rank.path, rank.members, kind)]))
    return make_table(top, join_servers(found), kind)


@Rule(
    "R30",
    "version 2.0: counts, ids, layers, addresses and ports are within HCCL's limits",
    severity="error or warning",
    chips=("a5",),
    sources=(citations.RANK_TABLE_INFO, citations.A5_PAGE),
)
def check_version_2(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """What a schema cannot say: ranks and cards against each other, and texts by their type."""
    yield from check_limits(table.members, _SCHEMA, _RULE)
    yield from check_counts(table, _SCHEMA)
    ranks = table.entries("rank_list")
    yield from check_ranks([(rank, rank.number("rank_id")) for rank in ranks], _RULE, "the table has", "rank")
    yield from _check_spare(ranks)
    sub_networks: dict[tuple[int, str], tuple[int, str]] = {}
    cards: dict[tuple[str, int], str] = {}
    owners: dict[str, str] = {}
    for rank in ranks:
        highest = -1
        for level in rank.entries("level_list"):
            layer, instance = level.number("net_layer"), level.text("net_instance_id")
            addresses = level.entries("rank_addr_list")
            yield from _check_type(level, layer)
            for address in addresses:
                yield from _check_address(address)
                yield from _check_ports(address)
                text = (address.text("addr") or "").lower()
                if text and owners.setdefault(text, rank.path) != rank.path:
                    message = f"the rank at {owners[text]} has the same address"
                    yield address.complain("addr", _RULE, message, "give every rank its own addresses", "warning")
            if layer is None:
                continue
            if layer <= highest:
                message = "the layers of a rank must increase from one level to the next"
                yield level.complain("net_layer", _RULE, message, "sort the levels, each layer once")
            highest = max(highest, layer)
            if instance is None or not isinstance(level.members.get("rank_addr_list"), list):
                continue
            where = level.path_of("rank_addr_list")
            count, first = sub_networks.setdefault((layer, instance), (len(addresses), where))
            if count != len(addresses):
                message = f"the number of addresses is {len(addresses)} here and {count} at {first}"
                remedy = "give every rank of a sub-network the same number of addresses"
                yield level.complain("rank_addr_list", _RULE, f"{message}, in the same sub-network", remedy)
            number, path = rank.number("local_id"), rank.path_of("local_id")
            if layer == 0 and number is not None and cards.setdefault((instance, number), path) != path:
                # The topology file names the cards of a sub-network of layer 0 by local_id.
                message = f"the same local_id stands at {cards[instance, number]}, in the same sub-network of layer 0"
                remedy = "give each card of a sub-network its own local_id"
                yield rank.complain("local_id", _RULE, message, remedy, "warning")
        control = rank.members.get("control_plane")
        if isinstance(control, dict):
            yield from _check_address(Entry(path=rank.path_of("control_plane"), members=control))


def _check_spare(ranks: list[Entry]) -> Iterator[Problem]:
    """One rank at most runs on a spare card, and no other rank has the local_id of the card that it stands in for."""
    spares = [rank for rank in ranks if rank.number("local_id") == _SPARE_ID]
    places = {number: rank.path_of("local_id") for rank in ranks if (number := rank.number("local_id")) is not None}
    for spare in spares[1:]:
        message = f"a table has one spare card; another stands at {spares[0].path_of('local_id')}"
        yield spare.complain("local_id", _RULE, message, "keep one of them")
    for rank in ranks:
        replaced, key = rank.number("replaced_local_id"), "replaced_local_id"
        if rank not in spares:
            if rank.has(key) and replaced != rank.number("local_id"):
                message = f"the key is read only where local_id is {_SPARE_ID}"
                yield rank.complain(key, _RULE, message, "remove it", "warning")
        elif replaced is None or replaced >= _SPARE_ID:
            message = f"a spare card names the card that it stands in for, 0 to {_SPARE_ID - 1}"
            yield rank.complain(key, _RULE, message, "write the local_id of the replaced card")
        elif replaced in places:
            message = f"the replaced card still has a rank, at {places[replaced]}"
            yield rank.complain(key, _RULE, message, "remove one of the two ranks")


def _check_type(level: Entry, layer: int | None) -> Iterator[Problem]:
    net_type = level.text("net_type")
    if net_type is not None and net_type not in _NET_TYPES:
        return
    if layer == 0 and net_type != "TOPO_FILE_DESC":
        message = "the documented kind of layer 0 is TOPO_FILE_DESC"
        yield level.complain("net_type", _RULE, message, 'write "TOPO_FILE_DESC"', "warning")
    elif net_type not in _DOCUMENTED_TYPES:
        message, remedy = "the kind is known to HCCL, but not documented", 'write "TOPO_FILE_DESC" or "CLOS"'
        yield level.complain("net_type", _RULE, message, remedy, "warning")


def _check_address(entry: Entry) -> Iterator[Problem]:
    kind, text = entry.text("addr_type") or "", entry.text("addr")
    if kind not in _ADDRESS_TYPES:
        return
    if text is not None and not _has_form(text, kind):
        wanted = "the 32 hexadecimal digits of an EID" if kind == "EID" else f"an {kind[:2]}{kind[2:].lower()} address"
        yield entry.complain("addr", _RULE, f"the value is not {wanted}", f"write {wanted}, or another addr_type")
    backups = entry.members.get("backup_addr")
    if not isinstance(backups, list):
        return
    if kind == "EID" and backups:
        yield entry.complain("backup_addr", _RULE, "an EID has no backup addresses", "remove the key")
        return
    for index, backup in enumerate(backups):
        if isinstance(backup, str) and not _has_form(backup, kind):
            path = f"{entry.path_of('backup_addr')}[{index}]"
            message = "the backup is not an address of the same type"
            remedy = "write an address of the type in addr_type"
            yield Problem(path, _RULE, "error", message, remedy, show_value(backup))


def _has_form(text: str, kind: str) -> bool:
    if kind == "EID":
        return _EID.fullmatch(text) is not None
    try:
        (IPv4Address if kind == "IPV4" else IPv6Address)(text)
    except ValueError:
        return False
    return len(text) <= _MAX_ADDRESS


def _check_ports(address: Entry) -> Iterator[Problem]:
    """A port is named by die and number, such as "0/4"; HCCL counts equal names once."""
    ports = address.members.get("ports")
    if not isinstance(ports, list):
        return
    names = {port for port in ports if isinstance(port, str)}
    sizes = [len(name.encode("utf-8", "surrogatepass")) for name in names]
    if not 1 <= len(names) <= _MAX_PORTS or not all(1 <= size <= _MAX_PORT_NAME for size in sizes):
        message = f"an address must have 1 to {_MAX_PORTS} different ports with names of 1 to {_MAX_PORT_NAME} bytes"
        yield address.complain("ports", _RULE, message, 'write names like "0/4"')


DIALECTS = (
    Dialect(
        name=_NAME,
        title="a version 2.0 rank table",
        recognise=has_any("rank_list", "rank_count"),
        keys=("rank_list", "rank_count"),
        sources=(citations.RANK_TABLE_INFO, citations.A5_PAGE),
        schema=_SCHEMA,
        versions=(_NAME,),
        read=_read,
        rules=frozenset(("R30", "P1", "P2")),
        readers=frozenset({"hccl", "mindspore"}),
        is_for_a5=True,
    ),
)
