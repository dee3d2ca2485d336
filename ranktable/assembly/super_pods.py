"""Puts hosts into super pods: the part of a version 1.2 table that says whose devices share one fabric.

Source: the A3 rank table page of the HCCL documentation: every server in one pod (R25), a super_device_id for every
device that is unique inside its pod (R24), ids of 1 to 127 characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ranktable.assembly.inventory import HostInventory
from ranktable.errors import BuildError
from ranktable.model import SuperPod
from ranktable.placeholder import name_placeholder

_MAX_POD_ID_LENGTH = 127
_MAX_SUPER_DEVICE_ID = 2**32 - 1
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")


def build_super_pods(
    hosts: Sequence[HostInventory], assigned: Mapping[str, Sequence[str]] | None
) -> tuple[SuperPod, ...]:
    """Return the super pods of `hosts` in the order of their first ranks.

    `assigned` maps super pod ids to server ids; without it each host says its own. Raises BuildError for a host
    without a pod or in two, and for a pod with an unknown host; super device ids are left to the rules (R24).
    """
    pod_of = _invert(assigned, hosts) if assigned is not None else _pods_of(hosts)
    members: dict[str, list[HostInventory]] = {}
    for host in hosts:
        members.setdefault(pod_of[host.server_id], []).append(host)
    for pod_id in members:
        _check_pod_id(pod_id)
    return tuple(SuperPod(pod_id, tuple(host.server_id for host in inside)) for pod_id, inside in members.items())


def is_super_device_id(text: str) -> bool:
    """Return whether a text is a decimal number of 32 bits, as `npu-smi info -t spod-info` prints an SDID."""
    return _DECIMAL.fullmatch(text) is not None and int(text) <= _MAX_SUPER_DEVICE_ID


def _pods_of(hosts: Iterable[HostInventory]) -> dict[str, str]:
    pod_of = {}
    for host in hosts:
        if host.super_pod_id is None:
            message = f"the super pod of server {host.server_id!r} is not known, which version 1.2 lists (R25)"
            remedy = "give --super_pods, or captures of npu-smi info -t spod-info; outside super pods use version 1.0"
            raise BuildError(message, remedy)
        pod_of[host.server_id] = host.super_pod_id
    return pod_of


def _invert(assigned: Mapping[str, Sequence[str]], hosts: Sequence[HostInventory]) -> dict[str, str]:
    known = {host.server_id: host for host in hosts}
    pod_of: dict[str, str] = {}
    for pod_id, server_ids in assigned.items():
        for server_id in server_ids:
            host = known.get(server_id)
            if host is None:
                message = f"super pod {pod_id!r} names server {server_id!r}, which is not one of the hosts (R25)"
                raise BuildError(message, "name hosts of the table")
            if server_id in pod_of:
                message = f"server {server_id!r} is in super pod {pod_of[server_id]!r} and in {pod_id!r} (R25)"
                raise BuildError(message, "put each server into one super pod")
            if host.super_pod_id not in (None, pod_id):
                message = f"server {server_id!r} is assigned to super pod {pod_id!r}, but {host.origin or 'its source'}"
                raise BuildError(f"{message} says {host.super_pod_id!r}", "leave --super_pods out, or correct it")
            pod_of[server_id] = pod_id
    missing = [server_id for server_id in known if server_id not in pod_of]
    if missing:
        more = f" and {len(missing) - 1} more servers are" if len(missing) > 1 else " is"
        raise BuildError(f"server {missing[0]!r}{more} in no super pod (R25)", "put every server into one super pod")
    return pod_of


def _check_pod_id(pod_id: str) -> None:
    if not 1 <= len(pod_id) <= _MAX_POD_ID_LENGTH or not pod_id.isprintable() or name_placeholder(pod_id):
        message = f"super pod id {pod_id!r} is no id of 1 to {_MAX_POD_ID_LENGTH} printable characters (R25)"
        raise BuildError(message, "give the id that npu-smi info -t spod-info says")
