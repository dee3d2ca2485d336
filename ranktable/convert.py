"""A table as version 1.0 or 1.2, or as a host file, and what is lost in it; nothing is made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ranktable.errors import BuildError
from ranktable.generate import give_super_device_ids
from ranktable.hosts.names import check_host_name
from ranktable.kinds import dialect_of, join_servers, written_names
from ranktable.merge import Edited
from ranktable.model import NOTHING, RankTable, SuperPod
from ranktable.profile import ANY_TARGET
from ranktable.validate import hold_to_rules
from ranktable.values import count_noun, plain

_OWN = ("cluster_list", "data_version")
"""Keys at the top that belong to the dialect that is left."""


def convert_table(
    table: RankTable,
    to: str,
    *,
    super_pods: Mapping[str, Sequence[str]] = NOTHING,  # type: ignore[assignment]
    super_device_ids: Mapping[str, Sequence[str]] = NOTHING,  # type: ignore[assignment]
) -> Edited:
    """Return `table` in the dialect `to`, "1.0" or "1.2"; in its own dialect it is returned as it is.

    The notes are what the table said and the dialect cannot, such as `device_ip of 16 devices`.
    What only a person knows, for 1.2: the servers of each super pod, and the super device ids of each server, in the
    order of its devices. Raises BuildError for other dialects, for ranks that are not 0 to n-1, and for what `to`
    demands and neither the table nor the caller say.
    """
    if to == table.dialect:
        return Edited(table)
    if to not in written_names():
        raise BuildError(f"nothing can be converted to {to}", f"choose one of {', '.join(written_names())}")
    _check_ranks(table)
    has_pods = dialect_of(to).reads_super_pods
    keeps_others = "server_count" in dialect_of(table.dialect).known_schema.by_name
    if has_pods:
        table = _add_super_pods(table, super_pods, super_device_ids)
    left: dict[str, Any] = {} if keeps_others else {"extra": NOTHING}
    of_pods: dict[str, Any] = {} if has_pods else {"super_device_id": None}
    servers = tuple(
        replace(server, group=None, devices=tuple(replace(each, **of_pods, **left) for each in server.devices), **left)
        for server in join_servers(table.servers)  # two pods of one host are one server to HCCL
    )
    extra = {key: value for key, value in table.extra.items() if keeps_others and key not in _OWN}
    pods = table.super_pods if has_pods else ()
    converted = RankTable(to, servers, table.status, len(servers), pods, extra)
    return Edited(converted, _list_losses(table, converted))


def write_hostfile(table: RankTable) -> tuple[str, tuple[str, ...]]:
    """Return `host slots=8` lines, and what they cannot hold; raises BuildError for ranks that are not host by host."""
    _check_ranks(table)
    servers = [server for server in table.servers_by_rank if server.devices]
    for server in servers:
        check_host_name(server.server_id)
    if [rank for server in servers for rank in server.ranks] != list(range(table.world_size)):
        message = "a host file numbers the ranks host by host, which the ranks of this table do not follow"
        raise BuildError(message, "merge the table alone, which numbers them so: ranktable merge FILE")
    text = "".join(f"{server.server_id} slots={len(server.devices)}\n" for server in servers)
    ids = [[device.device_id for device in sorted(s.devices, key=lambda device: device.rank_id)] for s in servers]
    odd = sum(numbers != list(range(len(numbers))) for numbers in ids)
    lost = [f"device_id of the devices of {count_noun(odd, 'server')}"] if odd else []
    return text, (*lost, *_list_losses(table, RankTable(table.dialect, ())))


def _list_losses(before: RankTable, after: RankTable) -> tuple[str, ...]:
    kept = _count_keys(after)
    return tuple(
        f"{plain(key)} of {'the table' if noun == 'table' else count_noun(number, noun)}"
        for (key, noun), number in _count_keys(before).items()
        if not kept[key, noun]
    )


def _count_keys(table: RankTable) -> Counter[tuple[str, str]]:
    """Return how many devices, servers and super pods have each key beside ids and ranks."""
    found: Counter[tuple[str, str]] = Counter()
    for server in table.servers:
        named = {"host_ip": server.host_ip, "pod_ip": server.pod_ip}
        found.update((key, "server") for key in [*(key for key, value in named.items() if value), *server.extra])
        for device in server.devices:
            own = {"device_ip": device.device_ip, "super_device_id": device.super_device_id}
            found.update((key, "device") for key in [*(key for key, value in own.items() if value), *device.extra])
    found.update(("super_pod_list", "super pod") for _ in table.super_pods)
    found.update((key, "table") for key in table.extra)
    return found


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


def _add_super_pods(
    table: RankTable, super_pods: Mapping[str, Sequence[str]], numbers: Mapping[str, Sequence[str]]
) -> RankTable:
    """Return the table with super pods and super device ids, its own or those that are given, held to R24 and R25."""
    if table.super_pods and super_pods:
        raise BuildError("the table has super pods of its own", "leave --super_pods out")
    if not table.super_pods and not super_pods:
        message = "the table does not say which servers make a super pod, which version 1.2 is for"
        raise BuildError(message, "give --super_pods ID=SERVERS for each")
    pods = tuple(SuperPod(pod_id, tuple(members)) for pod_id, members in super_pods.items())
    servers = give_super_device_ids(table.servers, numbers)
    missing = sum(device.super_device_id is None for server in servers for device in server.devices)
    if missing:
        what = f"{count_noun(missing, 'device')} of the table have no super_device_id"
        remedy = "give --super_device_ids with what npu-smi info -t spod-info says"
        raise BuildError(f"{what}, which HCCL demands in a super pod", remedy)
    added = replace(table, servers=servers, super_pods=pods or table.super_pods)
    if super_pods or numbers:  # a table's own super pods are noted as its own fault
        plain_servers = tuple(replace(server, group=None, extra={}) for server in join_servers(servers))
        held = RankTable(written_names()[-1], plain_servers, super_pods=added.super_pods)
        hold_to_rules(held, ANY_TARGET, only=("R24", "R25"))
    return added
