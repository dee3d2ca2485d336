"""Tables of template 2 out of others: groups, pods and instances, and the facts of the board.

Source: HCCL's parser of tables without a version. The cloud form has no rank ids: the ranks follow the string order of
server_id, then device_id. The lab form has them, and the facts of the board that no other table has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ranktable.errors import BuildError
from ranktable.export.losses import list_losses
from ranktable.model import Device, Group, RankTable, Server
from ranktable.report.words import count_noun

BOARD_IDS = ("0x0000", "0x0020", "0x002f", "0x2000", "0x3000")
"""The boards that HCCL's parser knows."""
CHIP_INFOS = ("910", "310P3")

_DEFAULT_GROUP = "hccl_world_group"
_PER_SERVER = (1, 2, 4, 8, 16)
_CLOUD, _LAB = "template2-cloud", "template2-lab"
_KEPT = frozenset({"device_id", "device_ip"})

Parts = tuple[RankTable, tuple[str, ...], tuple[str, ...], bool]
"""The table, what is lost, what is made up, and whether the ranks are new."""


def to_cloud(table: RankTable, group_name: str | None, *, renumber: bool) -> Parts:
    """Return the table in the cloud form.

    Pods are those of the devices or servers (`pod_name`), else they are named after the place of the server.
    Raises BuildError when the ranks that the form implies are not those of the table, unless `renumber`.
    """
    lost = list_losses(table, _kept(table, {"pod_name"}))
    grouped, groups, invented = _group(table, group_name)
    named, made_up = _name_pods(grouped)
    ordered, is_renumbered = _imply_ranks(named, renumber=renumber)
    result = RankTable(_CLOUD, ordered, table.status, groups=groups)
    return result, lost, (*invented, *made_up), is_renumbered


def to_lab(table: RankTable, group_name: str | None, board_id: str | None, chip_info: str | None) -> Parts:
    """Return the table in the lab form, with its ranks.

    Raises BuildError without the facts of the board, and for servers that the form cannot hold.
    """
    if board_id is None or chip_info is None:
        message = "the lab form of template 2 says which board and chip it is for"
        raise BuildError(message, "give --board_id and --chip_info")
    lost = list_losses(table, _kept(table, set()))
    grouped, groups, invented = _group(table, group_name)
    for group in groups:
        _check_counts([server for server in grouped if server.group == group.name])
    plain = tuple(replace(server, devices=tuple(map(_without_extra, server.devices))) for server in grouped)
    names = [f"eth{place}" for place in range(max(len(server.devices) for server in plain))]
    extra = {
        "board_id": board_id,
        "chip_info": chip_info,
        "deploy_mode": "lab",
        "para_plane_nic_location": "device",
        "para_plane_nic_name": names,
        "para_plane_nic_num": str(len(names)),
    }
    made_up = f"para_plane_nic_name {', '.join(names)} (HCCL does not read it for the ports of devices)"
    return RankTable(_LAB, plain, table.status, groups=groups, extra=extra), lost, (*invented, made_up), False


def _kept(table: RankTable, further: set[str]) -> frozenset[str]:
    groups = {"group_list"} if _has_groups(table) else set()
    return _KEPT | further | groups


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
        Server(server.server_id, tuple(map(_plain_device, server.devices)), group=server.group if has_groups else name)
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


def _plain_device(device: Device) -> Device:
    name = device.extra.get("pod_name")
    extra = {"pod_name": name} if isinstance(name, str) else {}
    return Device(device.device_id, device.rank_id, device.device_ip or None, extra=extra)


def _without_extra(device: Device) -> Device:
    return replace(device, extra={})


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
    keys = [
        (server.server_id, device.device_id, place, position, device.rank_id)
        for place, server in enumerate(servers)
        for position, device in enumerate(server.devices)
    ]
    ranks = {(place, position): rank for rank, (_, _, place, position, _) in enumerate(sorted(keys))}
    wrong = next((key for key in keys if ranks[key[2], key[3]] != key[4]), None)
    if wrong is None:
        return servers, False
    if not renumber:
        server_id, device_id, place, position, rank_id = wrong
        message = (
            f"device {device_id} of server {server_id!r} has rank {rank_id}; the cloud form has no rank ids, and the "
            f"string order of server_id, then device_id, makes it {ranks[place, position]}"
        )
        raise BuildError(message, "give --renumber to have the ranks numbered so")
    return tuple(
        replace(
            server,
            devices=tuple(
                replace(device, rank_id=ranks[place, position]) for position, device in enumerate(server.devices)
            ),
        )
        for place, server in enumerate(servers)
    ), True


def _check_counts(servers: list[Server]) -> None:
    num_devices, num_servers = sum(len(server.devices) for server in servers), len(servers)
    if num_devices % num_servers or num_devices // num_servers not in _PER_SERVER:
        message = f"the lab form takes 1, 2, 4, 8 or 16 devices on every server, not {num_devices} on {num_servers}"
        raise BuildError(message, "choose another dialect, or select servers of one size first")
