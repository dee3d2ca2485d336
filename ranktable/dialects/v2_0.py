"""Dialect 2.0: `rank_list[].level_list[]`, numbers as JSON integers, read by HCCL on Ascend 950.

The file lists ranks, not servers. In the model the ranks of one sub-network of layer 0 (equal `net_instance_id`; of the
lowest layer where there is no layer 0) are one server with that id, and the servers stand in the order of their first
ranks. What the neutral table has no place for (`local_id`, `level_list`, `control_plane`, ...) stays in `Device.extra`.
A file whose sub-networks interleave is written with each of them in one piece; every rank keeps its rank_id.
Source: HCCL's parser of version 2.0 and the rank table page of its documentation for the Ascend 950.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address

from ranktable.dialects.foreign import has_any
from ranktable.dialects.servers import decode_device, encode_device
from ranktable.errors import BuildError
from ranktable.kinds import DeviceEntry, Dialect, Entry, ServerEntry, Survey, rule_ids
from ranktable.model import COMPLETED, Device, RankTable, Server
from ranktable.problem import Problem, join_index, join_key, show_value
from ranktable.profile import Profile
from ranktable.rules import citations
from ranktable.rules.identity import check_counts, check_ranks
from ranktable.rules.registry import rule
from ranktable.schema import (
    Count,
    Field,
    Schema,
    check_tree,
    check_version,
    list_objects,
    walk_objects,
    without,
)
from ranktable.values import read_integer

VERSION = "2.0"

_RULE = "R30"
SPARE_ID = 64
"""The local_id of the spare card that stands in for another."""

_MAX_RANKS = 65536
_MAX_LEVELS = 8
_MAX_LAYER = 7
_MAX_INSTANCE_ID = 1024
_MAX_DEVICE_ID = 64
_MAX_SOCKET_PORT = 65535
_DETOURS = ("true", "false", "")
_NET_TYPES = ("TOPO_FILE_DESC", "CLOS", "1DMESH", "2DMESH", "A3_SERVER", "A2_AX_SERVER")
_DOCUMENTED_TYPES = ("TOPO_FILE_DESC", "CLOS")
_MAX_ADDRESSES = 24
_MAX_ADDRESS = 256
_MAX_PLANE_ID = 1024
_MAX_PORTS = 16
_MAX_PORT_NAME = 32
_MAX_BACKUPS = 16
_MAX_LISTEN_PORT = 65536
_ADDRESS_TYPES = ("EID", "IPV4", "IPV6")
_EID = re.compile(r"[0-9A-Fa-f]{32}")
_ADDRESS = Schema(
    (
        Field("addr_type", missing="error"),
        Field("addr", missing="error"),
        Field("ports", "texts", missing="error"),
        Field("plane_id"),
        Field("backup_addr", "texts"),
    )
)
_LEVEL = Schema(
    (
        Field("net_layer", "integer", missing="error", rule=_RULE),
        Field("net_instance_id", missing="error", role="server_id"),
        Field("net_type"),
        Field("net_attr"),
        Field("rank_addr_list", "entries", missing="error", of=_ADDRESS),
    ),
    frozenset({"elec_group_id", "pcie_fallback"}),  # what HCCL's own negotiation adds to the files that it exchanges
)
_CONTROL = Schema(
    (
        Field("addr_type", missing="error"),
        Field("addr", missing="error"),
        Field("listen_port", "integer", missing="error", rule=_RULE),
    )
)
_RANK = Schema(
    (
        Field("rank_id", "integer", missing="error", rule=_RULE, role="rank_id"),
        Field("local_id", "integer", missing="error", rule=_RULE),
        Field("device_id", "integer", missing="error", rule=_RULE, role="device_id"),
        Field("replaced_local_id", "integer", rule=_RULE),
        Field("device_port", "integer", rule=_RULE),
        Field("host_port", "integer", rule=_RULE),
        Field("level_list", "list", missing="error", of=_LEVEL),
        Field("control_plane", "object", of=_CONTROL),
    )
)
_SCHEMA = Schema(
    (
        Field("version"),
        Field("status"),
        Field("detour"),
        Field("rank_count", "integer", missing="error", rule=_RULE, count=Count(("rank_list",), "rank")),
        Field("rank_list", "list", missing="error", of=_RANK),
    )
)


@dataclass(frozen=True)
class _Codec:
    """How the dialect is read and written."""

    schema: Schema = _SCHEMA

    def check_structure(self, value: Mapping[str, object]) -> list[Problem]:
        """Return every fault of the structure (R2, R4, R5, R31, numbers out of range); empty when it can be decoded."""
        otherwise = f"the keys are those of version {VERSION}, and HCCL goes by this one"
        return [*check_version(value, (VERSION,), otherwise), *check_tree(value, _SCHEMA)]

    def survey(self, value: Mapping[str, object]) -> Survey:
        """Return what can be read of the object; ranks whose sub-network cannot be read stand alone."""
        heads: dict[str, ServerEntry] = {}
        devices: dict[str, list[DeviceEntry]] = {}
        for path, rank in walk_objects(value, "", "rank_list"):
            level_path, level = _lowest_level(rank, path)
            instance = level.get("net_instance_id")
            server = f"id {instance}" if isinstance(instance, str) else f"path {path}"
            places = {"server_id": join_key(level_path, "net_instance_id")}
            heads.setdefault(server, ServerEntry(path, {"server_id": instance}, places=places))
            device_id, rank_id = read_integer(rank.get("device_id")), read_integer(rank.get("rank_id"))
            devices.setdefault(server, []).append(DeviceEntry(path, rank, device_id, rank_id))
        servers = (replace(head, devices=tuple(devices[server])) for server, head in heads.items())
        return Survey("", value, tuple(servers), dialect=VERSION)

    def decode(self, value: Mapping[str, object]) -> RankTable:
        """Return the table. `value` must have passed `check_structure` without an error."""
        devices: dict[str, list[Device]] = {}
        ranks = list_objects(value, "rank_list")
        for rank in ranks:
            devices.setdefault(str(_server_id_of(rank)), []).append(decode_device(rank, _RANK))
        servers = tuple(Server(server_id, tuple(its_devices)) for server_id, its_devices in devices.items())
        rest = without(value, "version", "status", "rank_list")
        if rest["rank_count"] == len(ranks):
            del rest["rank_count"]  # it is computed when the table is written; a wrong count is kept, to stay visible
        return RankTable(VERSION, servers, str(value.get("status", COMPLETED)), extra=rest)

    def encode(self, table: RankTable) -> dict[str, object]:
        """Return the JSON object of `table`; decoding it gives `table` again. The status is always written.

        Raises BuildError for a device without a level_list, for a server whose id is not that of its devices'
        sub-network, and for what the dialect has no key for.
        """
        if table.super_pods or table.clusters or table.groups:
            message = f"the table has super pods, clusters or groups, which version {VERSION} has no key for"
            raise BuildError(message, "leave them out first")
        ranks = [_encode_rank(server, device) for server in table.servers for device in server.devices]
        return {
            "version": VERSION,
            "status": table.status,
            "rank_count": len(ranks),
            **table.extra,
            "rank_list": ranks,
        }


def _lowest_level(rank: Mapping[str, object], path: str) -> tuple[str, Mapping[str, object]]:
    """Return path and members of the level with the lowest readable net_layer; of nothing when there is none."""
    found: tuple[str, Mapping[str, object]] = path, {}
    lowest: int | None = None
    for level_path, level in walk_objects(rank, path, "level_list"):
        layer = read_integer(level.get("net_layer"))
        if layer is not None and (lowest is None or layer < lowest):
            found, lowest = (level_path, level), layer
    return found


def _server_id_of(rank: Mapping[str, object]) -> object:
    return _lowest_level(rank, "")[1].get("net_instance_id")


def _encode_rank(server: Server, device: Device) -> dict[str, object]:
    who = f"device {device.device_id} of server {server.server_id!r}"
    if not isinstance(device.extra.get("level_list"), list):
        message = f"{who} has no level_list; the addresses and layers of an Ascend 950 cannot be invented"
        raise BuildError(message, "take the table that the cluster's own tools write")
    if _server_id_of(device.extra) != server.server_id:
        message = f"the lowest layer of {who} is in the sub-network {_server_id_of(device.extra)!r}"
        raise BuildError(message, "a server's id is the net_instance_id of its devices' lowest layer")
    named = {
        "host_ip": server.host_ip,
        "pod_ip": server.pod_ip,
        "group": server.group,
        "device_ip": device.device_ip,
        "super_device_id": device.super_device_id,
    }
    lost = [*(key for key, value in named.items() if value is not None), *server.extra]
    if lost:
        raise BuildError(f"{who} has {', '.join(lost)}, which version {VERSION} has no key for", "leave it out first")
    return encode_device(device, _RANK)


@rule(
    "R30",
    "version 2.0: counts, ids, layers, addresses and ports are within HCCL's limits",
    severity="error or warning",
    chips=("a5",),
    sources=(citations.RANK_TABLE_INFO, citations.A5_PAGE),
)
def check_version_2(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """One walk over the ranks; the findings of one rank stand together."""
    ranks = [Entry(path, rank) for path, rank in walk_objects(survey.members, "", "rank_list")]
    yield from check_counts(survey, _SCHEMA)
    yield from _check_table(survey)
    numbers = [(rank, read_integer(rank.members.get("rank_id"))) for rank in ranks]
    yield from check_ranks(numbers, _RULE, "the table has", "rank")
    yield from _check_spare(ranks)
    sub_networks: dict[tuple[int, str], tuple[int, str]] = {}
    local_ids: dict[tuple[str, int], str] = {}
    owners: dict[str, str] = {}
    for rank in ranks:
        yield from _check_numbers(rank)
        levels = [Entry(path, level) for path, level in walk_objects(rank.members, rank.path, "level_list")]
        yield from _check_layers(rank, levels)
        for level in levels:
            yield from _check_level(level)
            yield from _check_sub_network(level, sub_networks)
            yield from check_addresses(level, rank, owners)
        yield from _check_local_id(rank, levels, local_ids)
        control = rank.members.get("control_plane")
        if isinstance(control, dict):
            yield from check_control(Entry(rank.path_of("control_plane"), control))


def _check_table(table: Entry) -> Iterator[Problem]:
    count = read_integer(table.members.get("rank_count"))
    if count is not None and count > _MAX_RANKS:
        yield report_error(table, "rank_count", f"HCCL reads at most {_MAX_RANKS} ranks", "make several smaller jobs")
    if table.text("detour") not in (None, *_DETOURS):
        yield report_error(
            table, "detour", 'the value is neither "true" nor "false"', "write one of the two as a string"
        )


def _check_spare(ranks: list[Entry]) -> Iterator[Problem]:
    """One rank at most runs on a spare card, and no other rank has the local_id of the card that it stands in for."""
    local_ids: dict[int, str] = {}
    spares: list[Entry] = []
    for rank in ranks:
        number = read_integer(rank.members.get("local_id"))
        if number == SPARE_ID:
            spares.append(rank)
        elif number is not None:
            local_ids.setdefault(number, rank.path_of("local_id"))
            if rank.has("replaced_local_id") and rank.members["replaced_local_id"] != number:
                message = f"the key is read only where local_id is {SPARE_ID}"
                yield report_warning(rank, "replaced_local_id", message, "remove it")
    for spare in spares[1:]:
        message = f"a table has one spare card; another stands at {spares[0].path_of('local_id')}"
        yield report_error(spare, "local_id", message, "keep one of them")
    for spare in spares:
        replaced = read_integer(spare.members.get("replaced_local_id"))
        if not spare.has("replaced_local_id"):
            message = "the key is missing; a spare card names the card that it stands in for"
            yield report_error(spare, "replaced_local_id", message, "add the local_id of that card")
        elif replaced is not None and replaced >= SPARE_ID:
            message = f"the cards that can be replaced are 0 to {SPARE_ID - 1}"
            yield report_error(spare, "replaced_local_id", message, "write the local_id of the replaced card")
        elif replaced in local_ids:
            message = f"the replaced card still has a rank, at {local_ids[replaced]}"
            yield report_error(spare, "replaced_local_id", message, "remove one of the two ranks")


def _check_numbers(rank: Entry) -> Iterator[Problem]:
    for key, lowest, highest in (
        ("local_id", 0, SPARE_ID),
        ("device_id", 0, _MAX_DEVICE_ID),
        ("device_port", 1, _MAX_SOCKET_PORT),
        ("host_port", 1, _MAX_SOCKET_PORT),
    ):
        yield from check_range(rank, key, lowest, highest)


def _check_layers(rank: Entry, levels: list[Entry]) -> Iterator[Problem]:
    if len(levels) > _MAX_LEVELS:
        message = f"the rank has {len(levels)} levels, HCCL reads at most {_MAX_LEVELS}"
        yield Problem(rank.path_of("level_list"), _RULE, "error", message, "remove levels")
    highest = -1
    for level in levels:
        layer = read_integer(level.members.get("net_layer"))
        if layer is None:
            continue
        if layer > _MAX_LAYER:
            yield report_error(level, "net_layer", f"layers go from 0 to {_MAX_LAYER}", "write a layer in that range")
        elif layer <= highest:
            message = "the layers of a rank must increase from one level to the next"
            yield report_error(level, "net_layer", message, "sort the levels, each layer once")
        highest = max(highest, layer)


def _check_level(level: Entry) -> Iterator[Problem]:
    yield from check_length(level, "net_instance_id", _MAX_INSTANCE_ID)
    net_type, layer = level.text("net_type"), read_integer(level.members.get("net_layer"))
    if net_type is not None and net_type not in _NET_TYPES:
        yield report_error(
            level, "net_type", "HCCL does not know this kind of network", f"write {quote_names(_NET_TYPES[:2])}"
        )
    elif layer == 0 and net_type != "TOPO_FILE_DESC":
        message = "the documented kind of layer 0 is TOPO_FILE_DESC"
        yield report_warning(level, "net_type", message, 'write "TOPO_FILE_DESC"')
    elif net_type not in (None, *_DOCUMENTED_TYPES):
        message = "the kind is known to HCCL, but not documented"
        yield report_warning(level, "net_type", message, f"write {quote_names(_DOCUMENTED_TYPES)}")


def _check_sub_network(level: Entry, seen: dict[tuple[int, str], tuple[int, str]]) -> Iterator[Problem]:
    """All members of a sub-network have the same number of addresses."""
    layer, instance = read_integer(level.members.get("net_layer")), level.text("net_instance_id")
    addresses = level.members.get("rank_addr_list")
    if layer is None or instance is None or not isinstance(addresses, list):
        return
    count, first = seen.setdefault((layer, instance), (len(addresses), level.path_of("rank_addr_list")))
    if count != len(addresses):
        message = f"the number of addresses is {len(addresses)} here and {count} at {first}, in the same sub-network"
        remedy = "give every rank of a sub-network the same number of addresses"
        yield Problem(level.path_of("rank_addr_list"), _RULE, "error", message, remedy)


def _check_local_id(rank: Entry, levels: list[Entry], seen: dict[tuple[str, int], str]) -> Iterator[Problem]:
    """The topology file names the cards of a layer 0 sub-network by local_id, so two ranks with one share a card."""
    number = read_integer(rank.members.get("local_id"))
    for level in levels:
        instance = level.text("net_instance_id")
        if number is not None and instance is not None and read_integer(level.members.get("net_layer")) == 0:
            place = rank.path_of("local_id")
            first = seen.setdefault((instance, number), place)
            if first != place:
                message = f"the same local_id stands at {first}, in the same sub-network of layer 0"
                yield report_warning(rank, "local_id", message, "give each card of a sub-network its own local_id")


def check_addresses(level: Entry, rank: Entry, owners: dict[str, str]) -> Iterator[Problem]:
    """Check the addresses of one level; `owners` remembers which rank has which address."""
    addresses = [Entry(*found) for found in walk_objects(level.members, level.path, "rank_addr_list")]
    if len(addresses) > _MAX_ADDRESSES:
        message = f"the level has {len(addresses)} addresses, HCCL reads at most {_MAX_ADDRESSES}"
        yield Problem(level.path_of("rank_addr_list"), _RULE, "error", message, "remove addresses")
    for address in addresses:
        yield from _check_address(address)
        yield from check_length(address, "plane_id", _MAX_PLANE_ID, lowest=0)
        yield from _check_port_names(address)
        yield from _check_backups(address)
        text = address.text("addr")
        if text and owners.setdefault(text.lower(), rank.path) != rank.path:
            message = f"the rank at {owners[text.lower()]} has the same address"
            yield report_warning(address, "addr", message, "give every rank its own addresses")


def check_control(control: Entry) -> Iterator[Problem]:
    """Check the address and the port of a control_plane."""
    yield from _check_address(control)
    yield from check_range(control, "listen_port", 1, _MAX_LISTEN_PORT)


def _check_address(entry: Entry) -> Iterator[Problem]:
    kind, text = entry.text("addr_type"), entry.text("addr")
    if kind is not None and kind not in _ADDRESS_TYPES:
        yield report_error(entry, "addr_type", "the type is not known", f"write {quote_names(_ADDRESS_TYPES)}")
    elif kind is not None and text is not None and not _fits(text, kind):
        wanted = "the 32 hexadecimal digits of an EID" if kind == "EID" else f"an {kind[:2]}{kind[2:].lower()} address"
        yield report_error(entry, "addr", f"the value is not {wanted}", f"write {wanted}, or another addr_type")


def _fits(text: str, kind: str) -> bool:
    if kind == "EID":
        return _EID.fullmatch(text) is not None
    if len(text) > _MAX_ADDRESS:
        return False
    try:
        (IPv4Address if kind == "IPV4" else IPv6Address)(text)
    except ValueError:
        return False
    return True


def _check_port_names(address: Entry) -> Iterator[Problem]:
    """A port is named by die and number, such as "0/4"; HCCL counts equal names once."""
    ports = address.members.get("ports")
    if not isinstance(ports, list):
        return
    names = {port for port in ports if isinstance(port, str)}
    if not 1 <= len(names) <= _MAX_PORTS:
        message = f"an address must have 1 to {_MAX_PORTS} different ports"
        yield report_error(address, "ports", message, 'write names like "0/4"')
        return
    wrong = {name for name in names if not 1 <= len(name.encode("utf-8", "surrogatepass")) <= _MAX_PORT_NAME}
    for name in sorted(wrong):
        message, path = f"the name of a port must have 1 to {_MAX_PORT_NAME} bytes", address.path_of("ports")
        yield Problem(join_index(path, ports.index(name)), _RULE, "error", message, 'write a name like "0/4"')


def _check_backups(address: Entry) -> Iterator[Problem]:
    backups, kind, path = address.members.get("backup_addr"), address.text("addr_type"), address.path_of("backup_addr")
    if not isinstance(backups, list) or kind not in _ADDRESS_TYPES:
        return
    if kind == "EID" and backups:
        yield report_error(address, "backup_addr", "an EID has no backup addresses", "remove the key")
    elif len(backups) > _MAX_BACKUPS:
        message = f"the address has {len(backups)} backups, HCCL reads at most {_MAX_BACKUPS}"
        yield Problem(path, _RULE, "error", message, "remove backups")
    else:
        for index, text in enumerate(backups):
            if isinstance(text, str) and not _fits(text, kind):
                message = "the backup is not an address of the same type"
                remedy = "write an address of the type in addr_type"
                yield Problem(join_index(path, index), _RULE, "error", message, remedy, show_value(text))


def report_error(entry: Entry, key: str, message: str, remedy: str) -> Problem:
    """Return an error of R30 about member `key`."""
    return entry.complain(key, _RULE, "error", message, remedy)


def report_warning(entry: Entry, key: str, message: str, remedy: str) -> Problem:
    """Return a warning of R30 about member `key`."""
    return entry.complain(key, _RULE, "warning", message, remedy)


def check_range(entry: Entry, key: str, lowest: int, highest: int) -> Iterator[Problem]:
    """Yield an error for a readable number that is out of range."""
    number = read_integer(entry.members.get(key))
    if number is not None and not lowest <= number <= highest:
        yield report_error(entry, key, f"the number must be from {lowest} to {highest}", "write a number in that range")


def check_length(entry: Entry, key: str, highest: int, lowest: int = 1) -> Iterator[Problem]:
    """Yield an error for a text whose length in bytes is out of range."""
    text = entry.text(key)
    size = None if text is None else len(text.encode("utf-8", "surrogatepass"))
    if size is not None and not lowest <= size <= highest:
        yield report_error(
            entry, key, f"the text must have {lowest} to {highest} bytes", "write a shorter or a filled text"
        )


def quote_names(names: tuple[str, ...]) -> str:
    """Return `"A" or "B"`."""
    return " or ".join(f'"{name}"' for name in names)


DIALECTS = (
    Dialect(
        name=VERSION,
        title="a version 2.0 rank table",
        consumer="HCCL on Ascend 950",
        recognise=has_any("rank_list", "rank_count"),
        keys=("rank_list", "rank_count"),
        sources=(citations.RANK_TABLE_INFO, citations.A5_PAGE),
        codec=_Codec(),
        rules=rule_ids("R30 P1 P2"),
        readers=frozenset({"hccl", "mindspore"}),
        is_for_a5=True,
        refusal="the EIDs, ports and network layers of an Ascend 950 stand in no other table and cannot be made up; "
        "take the table that the cluster's own tools write",
    ),
)
