"""What the planner must know of a host. Gathered by `msrun.agent.host_facts`; here only the value and its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msrun.errors import UsageError
from msrun.planning.spec import DeviceTarget


@dataclass(frozen=True)
class HostFacts:
    """One host as the planner sees it."""

    name: str
    address: str
    """Address towards the master; 127.0.0.1 for a one-host job."""
    cpus: tuple[int, ...]
    """Processors that this process may use."""
    gpus: tuple[str, ...] = ()
    """CUDA devices in visible order: indexes, or what CUDA_VISIBLE_DEVICES names."""
    npus: tuple[str, ...] = ()
    """Ascend devices in visible order."""


@dataclass(frozen=True)
class DevicePlacement:
    """Which kind of device the workers use and which one each gets."""

    target: DeviceTarget
    """cpu, gpu or ascend; never auto."""
    device_ids: tuple[int, ...]
    """Device index per local worker, as the worker sees it."""
    reason: str
    """Why this target: for the plan."""


def place_devices(target: DeviceTarget, local_worker_num: int, host: HostFacts) -> DevicePlacement:
    """Give every local worker one device; on a CPU host the device is only a number.

    Raises:
        UsageError: more workers than devices (CPU excepted), or no such device on the host.
    """
    if target == "auto":
        if host.npus:
            target, reason = "ascend", f"{len(host.npus)} Ascend devices on {host.name}"
        elif host.gpus:
            target, reason = "gpu", f"{len(host.gpus)} CUDA devices on {host.name}"
        else:
            target, reason = "cpu", f"no accelerator on {host.name}"
    else:
        reason = "--device_target"
    if target != "cpu":
        _check_enough(target, local_worker_num, host.gpus if target == "gpu" else host.npus, host.name)
    return DevicePlacement(target, tuple(range(local_worker_num)), reason)


def _check_enough(target: DeviceTarget, wanted: int, devices: Sequence[str], name: str) -> None:
    if len(devices) < wanted:
        raise UsageError(
            f"{wanted} workers but {len(devices)} {target} devices visible on {name}: "
            "start fewer workers or give --device_target cpu"
        )


def threads_per_worker(local_worker_num: int, cpus: Sequence[int]) -> int:
    """Return the number of compute threads of one worker: the host's processors shared evenly, at least one."""
    return max(1, len(cpus) // local_worker_num)
