"""The backend `shm` as torch knows it: which group it makes of which ranks."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from msrun import contract
from msrun.shm.hosts_group import HostsGroup
from msrun.shm.memory import this_machine
from msrun.shm.process_group import ShmGroup
from msrun.shm.segment import NotSharedError

_said: list[str] = []


def register() -> None:
    """Let torch know the backend; once in a process."""
    if "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _create, devices=["cpu"])
    # From 2.15 on torch hooks a recorder into groups of other backends than these; it fails on groups in Python.
    recording = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        recording.add("shm")


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the group: of one host, of several, or gloo's where no two ranks can share memory."""
    hosts = _hosts(store, rank, size)
    try:
        if len(hosts) == 1:
            return ShmGroup(store, rank, size, timeout)
        if len(hosts) < size:
            return HostsGroup(store, rank, size, timeout, hosts)
    except NotSharedError as error:
        _say_once(rank, str(error))
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _say_once(rank: int, reason: str) -> None:
    """Say in one rank, of the first group, that gloo is used."""
    if rank == 0 and not _said:
        _said.append(reason)
        text = f"msrun.runtime: the backend shm cannot run here ({reason}): gloo is used"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - stderr is the log


def _hosts(store: Any, rank: int, size: int) -> list[list[int]]:
    """Return the ranks of the group on each host, by first rank; all ranks say where they are."""
    world = os.environ.get(contract.WORLD_SIZE)
    if world is not None and world == os.environ.get(contract.LOCAL_WORLD_SIZE):
        return [list(range(size))]
    store.set(f"host {rank}", _this_host())
    found: dict[bytes, list[int]] = {}
    for other, host in enumerate(store.multi_get([f"host {other}" for other in range(size)])):
        found.setdefault(bytes(host), []).append(other)
    return list(found.values())


def _this_host() -> str:
    """Return what tells this host from others: the machine, its view of processes, and the launcher's host number."""
    return " ".join([*this_machine(), os.environ.get(contract.GROUP_RANK, "0")])
