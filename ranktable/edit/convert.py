"""A table in another dialect, with a list of what the dialect cannot hold and of what had to be made up for it.

Ranks, device ids and addresses are carried over as they are; no address, device id or super device id is made up.
Sources: the keys of the dialects (see their codecs); super device ids are demanded by HCCL's parser together with
super_pod_list; what a version 2.0 table needs (EIDs, layers, ports) stands in no other table.

Template 2: HCCL's parser of tables without a version. The cloud form has no rank ids: the ranks follow the string order
of server_id, then device_id. The lab form has them, and the facts of the board that no other table has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ranktable.errors import BuildError
from ranktable.export import EXTRAS, check_ranks, list_losses, refuse_host_ranks
from ranktable.generate import give_super_device_ids
from ranktable.model import Device, Group, RankTable, Server, SuperPod
from ranktable.ordering import find_moved, number_by_position
from ranktable.profile import ANY_TARGET
from ranktable.rules.registry import CONCISE
from ranktable.text import count_noun
from ranktable.validate import hold_to_rules

BOARD_IDS = ("0x0000", "0x0020", "0x002f", "0x2000", "0x3000")
"""The boards that HCCL's parser knows."""
CHIP_INFOS = ("910", "310P3")

_DEFAULT_GROUP = "hccl_world_group"
_CLOUD, _LAB = "template2-cloud", "template2-lab"

_REFUSED = {
    "2.0": "the EIDs, ports and network layers of an Ascend 950 stand in no other table and cannot be made up; "
    "take the table that the cluster's own tools write",
    "1.1": "the collective_id and the ports of heterogeneous groups cannot be made up; take the table of their tools",
    "1.1-offline": "the item ids of offline compilation cannot be made up; take the table of its tools",
    "volcano-job": "Volcano writes this table itself; give it to HCCL as version 1.0 or 1.2",
    "volcano-global": "Volcano writes this table itself out of those of its jobs",
    "cross-cluster": "the clusters of the servers cannot be made up; write cluster_list into a version 1.0 table",
    "mindie-global": "the groups of an inference service cannot be made up; take the table of MindIE-Motor",
}
"""Dialects that nothing is converted to, and why."""

_KEPT_IN_FAMILY = frozenset({"device_id", "device_ip", "host_ip", "pod_ip", EXTRAS})
_KEPT_FROM_OTHERS = frozenset({"device_id", "device_ip", "pod_name"})
_OWN_EXTRAS = frozenset({"data_version"})
"""Keys at the top that belong to the dialect that is left."""


@dataclass(frozen=True, slots=True)
class SuperPodWishes:
    """The servers of each super pod, and the super device ids of each server in the order of its devices."""

    pods: Sequence[tuple[str, Sequence[str]]] = ()
    device_ids: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConvertWishes:
    """What only a person knows, for dialects that have a place for it."""

    renumber: bool = False
    """Number the ranks anew where the dialect counts them itself."""
    super_pods: SuperPodWishes = field(default_factory=SuperPodWishes)
    group_name: str | None = None
    """Name of the one group of a template 2 table."""
    board_id: str | None = None
    chip_info: str | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """A table in another dialect."""

    table: RankTable
    lost: tuple[str, ...] = ()
    """What the table said and the dialect cannot, in words."""
    invented: tuple[str, ...] = ()
    """What the dialect demands and the table did not say, in words."""
    is_renumbered: bool = False
    """True when the ranks are not those of the table."""


def dialect_names() -> tuple[str, ...]:
    """Return the dialects that a table can be converted to."""
    return tuple(_WRITERS)


def refused_names() -> tuple[str, ...]:
    """Return the dialects that exist and that nothing can be converted to."""
    return tuple(_REFUSED)


def convert_table(table: RankTable, to: str, wishes: ConvertWishes | None = None) -> Converted:
    """Return `table` in the dialect `to` (one of `dialect_names()`); in its own dialect it is returned as it is.

    Raises BuildError for dialects that cannot be written out of others, for ranks that are not 0 to n-1, and for
    what `to` demands and neither the table nor `wishes` say.
    """
    if to == table.dialect:
        return Converted(table)
    if to in _REFUSED:
        raise BuildError(f"nothing can be converted to {to}", _REFUSED[to])
    if to not in _WRITERS:
        raise BuildError(f"dialect {to!r} is not known", f"choose one of {', '.join(_WRITERS)}")
    check_ranks(table)
    refuse_host_ranks(table)
    return _WRITERS[to](table, wishes or ConvertWishes())


def _to_1_2(table: RankTable, wishes: ConvertWishes) -> Converted:
    with_pods = _add_super_pods(_read_raw_super_pods(table), wishes.super_pods)
    return _to_server_list(with_pods, "1.2", frozenset({"super_device_id", "super_pod_list"}))


def _to_server_list(table: RankTable, dialect: str, keeps: frozenset[str] = frozenset()) -> Converted:
    """Return the table in a dialect of `server_list[].device[]`."""
    is_family = table.dialect in CONCISE
    keeps = keeps | (_KEPT_IN_FAMILY if is_family else _KEPT_FROM_OTHERS)
    own = {key: value for key, value in table.extra.items() if key in _OWN_EXTRAS}
    lost = list_losses(replace(table, status="completed"), keeps)
    lost += tuple(f"{key} of the table" for key in own if is_family)
    extra = {key: value for key, value in table.extra.items() if is_family and key not in own}
    servers = tuple(_plain_server(server, keeps, is_family=is_family) for server in join_servers(table.servers))
    pods = table.super_pods if "super_pod_list" in keeps else ()
    return Converted(RankTable(dialect, servers, table.status, len(servers), pods, extra=extra), lost)


def join_servers(servers: tuple[Server, ...]) -> tuple[Server, ...]:
    """Put the entries of one server_id together, as HCCL does with the instances of template 2; groups are left out."""
    joined: dict[str, Server] = {}
    for server in servers:
        first = joined.get(server.server_id)
        devices = (*first.devices, *server.devices) if first else server.devices
        joined[server.server_id] = replace(first or server, devices=devices, group=None)
    return tuple(joined.values())


def _plain_server(server: Server, keeps: frozenset[str], *, is_family: bool) -> Server:
    devices = tuple(_plain_device(device, keeps, is_family=is_family) for device in server.devices)
    return replace(server, devices=devices, extra=server.extra if is_family else {})


def _plain_device(device: Device, keeps: frozenset[str], *, is_family: bool) -> Device:
    extra = {key: value for key, value in device.extra.items() if is_family or key in keeps}
    number = device.super_device_id if "super_device_id" in keeps else None
    # Template 2 writes an empty address where there is none.
    return replace(device, device_ip=device.device_ip or None, super_device_id=number, extra=extra)


def _add_super_pods(table: RankTable, wishes: SuperPodWishes) -> RankTable:
    """Return the table with super pods and super device ids, its own or those of `wishes`, held to R24 and R25."""
    if table.super_pods and wishes.pods:
        raise BuildError("the table has super pods of its own", "leave --super_pods out")
    if not table.super_pods and not wishes.pods:
        message = "the table does not say which servers make a super pod, which version 1.2 is for"
        raise BuildError(message, "give --super_pods ID=SERVERS for each")
    pods = tuple(SuperPod(pod_id, tuple(members)) for pod_id, members in wishes.pods)
    servers = give_super_device_ids(table.servers, wishes.device_ids)
    missing = sum(device.super_device_id is None for server in servers for device in server.devices)
    if missing:
        what = f"{count_noun(missing, 'device')} of the table have no super_device_id"
        remedy = "give --super_device_ids with what npu-smi info -t spod-info says"
        raise BuildError(f"{what}, which HCCL demands in a super pod", remedy)
    added = replace(table, servers=servers, super_pods=pods or table.super_pods)
    if wishes.pods or wishes.device_ids:  # what is wrong with a table's own super pods is its own fault, and noted
        plain = tuple(replace(server, group=None, extra={}) for server in join_servers(added.servers))
        hold_to_rules(RankTable("1.2", plain, super_pods=added.super_pods), ANY_TARGET, only=("R24", "R25"))
    return added


def _read_raw_super_pods(table: RankTable) -> RankTable:
    """Read super pods that stand in a table whose version does not have them: there they are kept, but not read."""
    if "super_pod_list" not in table.extra:
        return table
    from ranktable.codec import encode_document, parse_table
    from ranktable.text import render_json

    value = {**encode_document(table), "version": "1.2"}
    return parse_table(render_json(value), "the table with its super pods")


def _to_cloud(table: RankTable, wishes: ConvertWishes) -> Converted:
    """Return the table in the cloud form of template 2.

    Pods are those of the devices or servers (`pod_name`), else they are named after the place of the server.
    Raises BuildError when the ranks that the form implies are not those of the table, unless they may be
    numbered anew.
    """
    lost = list_losses(table, _kept_by_template2(table) | {"pod_name"})
    grouped, groups, invented = _group(table, wishes.group_name)
    named, made_up = _name_pods(grouped)
    ordered, is_renumbered = _imply_ranks(named, renumber=wishes.renumber)
    result = RankTable(_CLOUD, ordered, table.status, groups=groups)
    return Converted(result, lost, (*invented, *made_up), is_renumbered)


def _to_lab(table: RankTable, wishes: ConvertWishes) -> Converted:
    """Return the table in the lab form of template 2, with its ranks.

    Raises BuildError without the facts of the board, and for servers that the form cannot hold.
    """
    if wishes.board_id is None or wishes.chip_info is None:
        message = "the lab form of template 2 says which board and chip it is for"
        raise BuildError(message, "give --board_id and --chip_info")
    lost = list_losses(table, _kept_by_template2(table))
    grouped, groups, invented = _group(table, wishes.group_name)
    plain = tuple(
        replace(server, devices=tuple(replace(device, extra={}) for device in server.devices)) for server in grouped
    )
    names = [f"eth{place}" for place in range(max(len(server.devices) for server in plain))]
    extra = {
        "board_id": wishes.board_id,
        "chip_info": wishes.chip_info,
        "deploy_mode": "lab",
        "para_plane_nic_location": "device",
        "para_plane_nic_name": names,
        "para_plane_nic_num": str(len(names)),
    }
    made_up = f"para_plane_nic_name {', '.join(names)} (HCCL does not read it for the ports of devices)"
    result = RankTable(_LAB, plain, table.status, groups=groups, extra=extra)
    hold_to_rules(result, replace(ANY_TARGET, chip="300i-duo" if wishes.chip_info == "310P3" else None), only=("R28",))
    return Converted(result, lost, (*invented, made_up))


def _kept_by_template2(table: RankTable) -> frozenset[str]:
    return frozenset({"device_id", "device_ip", *(["group_list"] if _has_groups(table) else [])})


def _has_groups(table: RankTable) -> bool:
    """Return whether the groups of the table are ones of template 2."""
    return table.dialect in (_CLOUD, _LAB) and bool(table.groups)


def _group(table: RankTable, group_name: str | None) -> tuple[tuple[Server, ...], tuple[Group, ...], tuple[str, ...]]:
    """Return the servers with nothing but their devices in the groups of the table, or in a new one."""
    has_groups = _has_groups(table)
    if has_groups and group_name is not None:
        raise BuildError(f"the table has groups of its own, such as {table.groups[0].name!r}", "leave --group_name out")
    name = group_name if group_name is not None else _DEFAULT_GROUP
    groups = tuple(Group(group.name) for group in table.groups) if has_groups else (Group(name),)
    servers = tuple(
        Server(server.server_id, tuple(map(_pod_device, server.devices)), group=server.group if has_groups else name)
        for server in (table.servers if has_groups else _with_pod_names(table.servers))
    )
    is_new = not has_groups and group_name is None
    return servers, groups, (f"group_name {name}, HCCL's own default",) if is_new else ()


def _with_pod_names(servers: Iterable[Server]) -> Iterable[Server]:
    """Give the devices the pod_name of their server where only that has one."""
    for server in servers:
        name = server.extra.get("pod_name")
        own = {"pod_name": name} if isinstance(name, str) else {}
        yield replace(
            server, devices=tuple(replace(device, extra={**own, **device.extra}) for device in server.devices)
        )


def _pod_device(device: Device) -> Device:
    name = device.extra.get("pod_name")
    extra = {"pod_name": name} if isinstance(name, str) else {}
    return Device(device.device_id, device.rank_id, device.device_ip or None, extra=extra)


def _name_pods(servers: tuple[Server, ...]) -> tuple[tuple[Server, ...], tuple[str, ...]]:
    """Return the servers with a pod for each device; missing names count the servers in the order of their ids."""
    taken = {str(device.extra["pod_name"]) for server in servers for device in server.devices if device.extra}
    server_ids = sorted(server.server_id for server in servers if not all(device.extra for device in server.devices))
    names = {server_id: f"pod-{place}" for place, server_id in enumerate(dict.fromkeys(server_ids))}
    doubled = next((name for name in names.values() if name in taken), None)
    if doubled is not None:
        raise BuildError(f"some devices have no pod_name, and {doubled} is taken", "name the pod of every device")
    named = tuple(
        replace(server, devices=tuple(_give_pod(device, names.get(server.server_id)) for device in server.devices))
        for server in servers
    )
    texts = list(names.values())
    invented = f"pod_name of {count_noun(len(names), 'server')} ({texts[0]} to {texts[-1]})" if texts else ""
    return named, (invented,) if invented else ()


def _give_pod(device: Device, name: str | None) -> Device:
    return device if device.extra or name is None else replace(device, extra={"pod_name": name})


def _imply_ranks(servers: tuple[Server, ...], *, renumber: bool) -> tuple[tuple[Server, ...], bool]:
    """Return the servers with the ranks that the cloud form implies, and whether these are new."""
    ranked = number_by_position(servers)
    moved = find_moved(servers, ranked)
    if moved is not None and not renumber:
        server, device, implied = moved
        message = (
            f"device {device.device_id} of server {server.server_id!r} has rank {device.rank_id}; the cloud form has "
            f"no rank ids, and the string order of server_id, then device_id, makes it {implied}"
        )
        raise BuildError(message, "give --renumber to have the ranks numbered so")
    return ranked, moved is not None


_WRITERS: Mapping[str, Callable[[RankTable, ConvertWishes], Converted]] = {
    "1.0": lambda table, _: _to_server_list(table, "1.0"),
    "1.2": _to_1_2,
    "template2-cloud": _to_cloud,
    "template2-lab": _to_lab,
}
