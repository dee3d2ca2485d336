"""A table as version 1.0 or 1.2, or as a host file, and what is lost in it.

Ranks, device ids and addresses are carried over as they are; no address, device id or super device id is made up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ranktable.errors import BuildError
from ranktable.generate import give_super_device_ids
from ranktable.hosts.names import check_host_name
from ranktable.kinds import dialect_of, written_names
from ranktable.model import COMPLETED, Device, RankTable, Server, SuperPod, number_devices
from ranktable.profile import ANY_TARGET
from ranktable.tables import encode_document, parse_table
from ranktable.validate import hold_to_rules
from ranktable.values import count_noun, plain, render_json

_SERVER_KEYS, _EXTRAS = frozenset({"device_id", "device_ip", "host_ip", "pod_ip"}), "extra"
_OWN = ("cluster_list", "data_version")
"""Keys at the top that belong to the dialect that is left."""


@dataclass(frozen=True, slots=True)
class ConvertWishes:
    """What only a person knows, for version 1.2."""

    super_pods: Sequence[tuple[str, Sequence[str]]] = ()
    """The servers of each super pod."""
    super_device_ids: dict[str, list[str]] = field(default_factory=dict)
    """Those of each server, in the order of its devices."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A table in another dialect."""

    table: RankTable
    lost: tuple[str, ...] = ()
    """What the table said and the dialect cannot, in words."""
    is_renumbered: bool = False
    """True when the ranks are not those of the table."""


def convert_table(table: RankTable, to: str, wishes: ConvertWishes | None = None) -> Converted:
    """Return `table` in the dialect `to`, "1.0" or "1.2"; in its own dialect it is returned as it is.

    Raises BuildError for other dialects, for ranks that are not 0 to n-1, and for what `to` demands and neither the
    table nor `wishes` say.
    """
    if to == table.dialect:
        return Converted(table)
    if to not in written_names():
        raise BuildError(f"nothing can be converted to {to}", f"choose one of {', '.join(written_names())}")
    _check_ranks(table)
    host_rank = next((device.rank_id for _, device in table.placements if device.device_id < 0), None)
    if host_rank is not None:
        message = f"rank {host_rank} runs on its host and not on a device"
        raise BuildError(message, "only version 1.1 has such ranks")
    has_pods, is_family = (
        dialect_of(to).reads_super_pods,
        "server_count" in dialect_of(table.dialect).known_schema.by_name,
    )
    table = _add_super_pods(_read_raw_super_pods(table), wishes or ConvertWishes()) if has_pods else table
    keeps = _SERVER_KEYS | ({"super_device_id", "super_pod_list"} if has_pods else set())
    keeps |= {_EXTRAS} if is_family else set()
    lost = list_losses(replace(table, status=COMPLETED), keeps)
    extra = {key: value for key, value in table.extra.items() if is_family and key not in _OWN}
    servers = tuple(_plain_server(server, keeps) for server in _join_servers(table.servers))
    pods = table.super_pods if has_pods else ()
    return Converted(RankTable(to, servers, table.status, len(servers), pods, extra), lost)


def write_hostfile(table: RankTable, *, renumber: bool = False) -> tuple[str, Converted]:
    """Return `host slots=8` lines, and what they cannot hold: launchers number the ranks host by host in their order.

    Raises BuildError for other ranks, unless they may be numbered anew; HostListError for an id that is no host.
    """
    _check_ranks(table)
    servers = [
        replace(server, devices=tuple(sorted(server.devices, key=lambda device: device.rank_id)))
        for server in table.servers_by_rank
        if server.devices
    ]
    for server in servers:
        check_host_name(server.server_id)
    ordered = number_devices(servers, lambda place, device: (place, device.rank_id))
    is_moved = [server.ranks for server in servers] != [server.ranks for server in ordered]
    if is_moved and not renumber:
        message = "a host file numbers the ranks host by host, which the ranks of this table do not follow"
        raise BuildError(message, "give --renumber to have them numbered so")
    text = "".join(f"{server.server_id} slots={len(server.devices)}\n" for server in ordered)
    listed = replace(table, servers=ordered)
    return text, Converted(listed, list_losses(listed, ()), is_renumbered=is_moved)


def list_losses(table: RankTable, keeps: Collection[str]) -> tuple[str, ...]:
    """Return what `table` says and a format that keeps the keys `keeps` does not, such as `device_ip of 16 devices`.

    Servers, their devices in the order of rank, and the version are no loss anywhere. Device ids are one only where a
    server's are not 0, 1, 2, ... in the order of rank, which is what a format without ids stands for.
    """
    devices = [device for _, device in table.placements]
    odd = [s for s in table.servers if any(d.device_id != place for place, d in enumerate(s.devices))]
    counts = {
        "device_id": (f"device_id of the devices of {count_noun(len(odd), 'server')}", len(odd)),
        **{key: _counted(key, devices, "device") for key in ("device_ip", "super_device_id")},
        **{key: _counted(key, table.servers, "server") for key in ("host_ip", "pod_ip")},
        "super_pod_list": (f"super_pod_list ({count_noun(len(table.super_pods), 'super pod')})", len(table.super_pods)),
    }
    lost = [f"the status {plain(table.status)}"] if table.status != COMPLETED else []
    lost += [text for key, (text, number) in counts.items() if number and key not in keeps]
    own = _OWN if _EXTRAS in keeps else tuple(table.extra)
    lost += [f"{plain(key)} of the table" for key in own if key in table.extra]
    return (*lost, *([] if _EXTRAS in keeps else _describe_extras(table)))


def _counted(key: str, holders: Sequence[Server] | Sequence[Device], noun: str) -> tuple[str, int]:
    number = sum(bool(getattr(holder, key)) for holder in holders)
    return f"{key} of {count_noun(number, noun)}", number


def _describe_extras(table: RankTable) -> Iterator[str]:
    held: tuple[tuple[str, Iterable[Mapping[str, object]]], ...] = (
        ("super pod", (pod.extra for pod in table.super_pods)),
        ("server", (server.extra for server in table.servers)),
        ("device", (device.extra for _, device in table.placements)),
    )
    for noun, extras in held:
        for key, number in Counter(key for extra in extras for key in extra).items():
            yield f"{plain(key)} of {count_noun(number, noun)}"


def _check_ranks(table: RankTable) -> None:
    """Raise BuildError for a table without devices, and for one whose ranks are not 0 to n-1, each once."""
    ranks = sorted(device.rank_id for _, device in table.placements)
    if not ranks:
        raise BuildError("the table has no devices", "nothing can be started from it")
    if ranks == list(range(len(ranks))):
        return
    if any(server.group is not None for server in table.servers):
        raise BuildError("the ranks of the table start again in each of its groups", "it is no table of one job")
    message = f"the ranks of the table are not 0 to {len(ranks) - 1}, each once"
    raise BuildError(message, "run ranktable validate on it first")


def _join_servers(servers: tuple[Server, ...]) -> tuple[Server, ...]:
    """Put the entries of one server_id together, as HCCL does with the instances of template 2; groups are left out."""
    joined: dict[str, Server] = {}
    for server in servers:
        first = joined.get(server.server_id)
        devices = (*first.devices, *server.devices) if first else server.devices
        joined[server.server_id] = replace(first or server, devices=devices, group=None)
    return tuple(joined.values())


def _plain_server(server: Server, keeps: Collection[str]) -> Server:
    devices = tuple(
        replace(
            device,
            super_device_id=device.super_device_id if "super_device_id" in keeps else None,
            extra=device.extra if _EXTRAS in keeps else {},
        )
        for device in server.devices
    )
    return replace(server, devices=devices, extra=server.extra if _EXTRAS in keeps else {})


def _add_super_pods(table: RankTable, wishes: ConvertWishes) -> RankTable:
    """Return the table with super pods and super device ids, its own or those of `wishes`, held to R24 and R25."""
    if table.super_pods and wishes.super_pods:
        raise BuildError("the table has super pods of its own", "leave --super_pods out")
    if not table.super_pods and not wishes.super_pods:
        message = "the table does not say which servers make a super pod, which version 1.2 is for"
        raise BuildError(message, "give --super_pods ID=SERVERS for each")
    pods = tuple(SuperPod(pod_id, tuple(members)) for pod_id, members in wishes.super_pods)
    servers = give_super_device_ids(table.servers, wishes.super_device_ids)
    missing = sum(device.super_device_id is None for server in servers for device in server.devices)
    if missing:
        what = f"{count_noun(missing, 'device')} of the table have no super_device_id"
        remedy = "give --super_device_ids with what npu-smi info -t spod-info says"
        raise BuildError(f"{what}, which HCCL demands in a super pod", remedy)
    added = replace(table, servers=servers, super_pods=pods or table.super_pods)
    if wishes.super_pods or wishes.super_device_ids:  # a table's own super pods are noted as its own fault
        plain_servers = tuple(replace(server, group=None, extra={}) for server in _join_servers(servers))
        held = RankTable(written_names()[-1], plain_servers, super_pods=added.super_pods)
        hold_to_rules(held, ANY_TARGET, only=("R24", "R25"))
    return added


def _read_raw_super_pods(table: RankTable) -> RankTable:
    """Read super pods that stand in a table whose version does not have them: there they are kept, but not read."""
    if "super_pod_list" not in table.extra or table.dialect not in written_names():
        return table
    value = {**encode_document(table), "version": written_names()[-1]}
    return parse_table(render_json(value), "the table with its super pods")
