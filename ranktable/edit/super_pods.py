"""Super pods and super device ids for a table that has none: from a person, checked against the table.

Source: the A3 rank table page of the HCCL documentation: with super_pod_list every server is in one super pod and
every device has its SDID, which `npu-smi info -t spod-info` tells and nobody can compute without the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ranktable.assembly.super_pods import is_super_device_id
from ranktable.errors import BuildError
from ranktable.model import RankTable, Server, SuperPod
from ranktable.report.words import count_noun


@dataclass(frozen=True, slots=True)
class SuperPodWishes:
    """The servers of each super pod, and the super device ids of each server in the order of its devices."""

    pods: Sequence[tuple[str, Sequence[str]]] = ()
    device_ids: Mapping[str, Sequence[str]] = field(default_factory=dict)


def add_super_pods(table: RankTable, wishes: SuperPodWishes) -> RankTable:
    """Return the table with super pods and super device ids, its own or those of `wishes`.

    Raises BuildError when either is missing, is there twice, or does not fit the servers.
    """
    pods = _choose_pods(table, wishes.pods)
    servers = _give_ids(table.servers, wishes.device_ids)
    missing = sum(device.super_device_id is None for server in servers for device in server.devices)
    if missing:
        message = (
            f"{count_noun(missing, 'device')} of the table have no super_device_id, which HCCL demands in a super pod"
        )
        raise BuildError(message, "give --super_device_ids with what npu-smi info -t spod-info says")
    return replace(table, servers=servers, super_pods=pods)


def _choose_pods(table: RankTable, wished: Sequence[tuple[str, Sequence[str]]]) -> tuple[SuperPod, ...]:
    if table.super_pods and wished:
        raise BuildError("the table has super pods of its own", "leave --super_pods out")
    if table.super_pods:
        return table.super_pods
    if not wished:
        message = "the table does not say which servers make a super pod, which version 1.2 is for"
        raise BuildError(message, "give --super_pods ID=SERVERS for each")
    server_ids = {server.server_id for server in table.servers}
    owners: dict[str, str] = {}
    for pod_id, members in wished:
        for server_id in members:
            if server_id not in server_ids:
                raise BuildError(f"super pod {pod_id} names server {server_id!r}, which the table does not have", "")
            if server_id in owners:
                message = f"server {server_id!r} is in super pod {owners[server_id]} and in super pod {pod_id}"
                raise BuildError(message, "a server is in one of them")
            owners[server_id] = pod_id
    if len({pod_id for pod_id, _ in wished}) < len(wished):
        raise BuildError("a super pod is given twice", "give each id once, with all its servers")
    outside = sorted(server_ids - owners.keys())
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise BuildError(f"server {outside[0]!r}{more} is in no super pod", "name every server in one")
    return tuple(SuperPod(pod_id, tuple(members)) for pod_id, members in wished)


def _give_ids(servers: tuple[Server, ...], wished: Mapping[str, Sequence[str]]) -> tuple[Server, ...]:
    strangers = sorted(wished.keys() - {server.server_id for server in servers})
    if strangers:
        raise BuildError(f"super device ids are given for {strangers[0]!r}, which the table does not have", "")
    return tuple(
        _give(server, wished[server.server_id]) if server.server_id in wished else server for server in servers
    )


def _give(server: Server, numbers: Sequence[str]) -> Server:
    if len(numbers) != len(server.devices):
        found = f"{count_noun(len(server.devices), 'device')} and {count_noun(len(numbers), 'super device id')}"
        raise BuildError(f"server {server.server_id!r} has {found}", "give one per device, in the order of the table")
    wrong = next((number for number in numbers if not is_super_device_id(number)), None)
    if wrong is not None:
        message = f"super device id {wrong!r} of server {server.server_id!r} is no decimal number of 32 bits"
        raise BuildError(message, "write what npu-smi info -t spod-info says")
    if len(set(numbers)) < len(numbers):
        raise BuildError(f"server {server.server_id!r} has a super device id twice", "each device has its own")
    pairs = zip(server.devices, numbers, strict=True)
    return replace(server, devices=tuple(replace(device, super_device_id=number) for device, number in pairs))
