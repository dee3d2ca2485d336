"""What the planner must know of a host. Gathered by `msrun.agent.host`; here only the value and its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msrun.errors import UsageError
from msrun.planning.placement.topology import Topology, flat_topology

DeviceTarget = Literal["auto", "cpu", "gpu", "ascend"]


@dataclass(frozen=True)
class HostFacts:
    """One host as the planner sees it."""

    name: str
    address: str
    """Address towards the master; 127.0.0.1 for a one-host job."""
    cpus: tuple[int, ...]
    """Processors that this process may use."""
    gpus: tuple[str, ...] = ()
    """CUDA devices in visible order by physical number, or by the name in CUDA_VISIBLE_DEVICES."""
    npus: tuple[str, ...] = ()
    """Ascend devices in visible order by physical number."""
    gpus_reason: str = ""
    """Why fewer GPUs are visible than CUDA_VISIBLE_DEVICES names, in words."""
    npus_reason: str = ""
    """The same for ASCEND_RT_VISIBLE_DEVICES."""
    topology: Topology | None = None
    """Cores and NUMA nodes; None when only `cpus` is known."""
    has_torch: bool = True
    """Whether msrun's own Python has torch: without it the scheduler cannot serve torch's store."""

    mindspore_version: str = ""
    """Of MindSpore in msrun's own Python; empty = it has none."""

    def known_topology(self) -> Topology:
        """Return the topology, flat when nothing is known of it."""
        return self.topology or flat_topology(self.cpus)


@dataclass(frozen=True)
class DevicePlacement:
    """Which kind of device the workers use and which one each gets."""

    target: DeviceTarget
    """cpu, gpu or ascend; never auto."""
    device_ids: tuple[int, ...]
    """Device index per local worker, as the worker sees it."""
    physical: tuple[str, ...]
    """The same devices by physical number; what the worker sees as 0 may be the host's 3."""
    reason: str
    """Why this target: for the plan."""
    notes: tuple[str, ...] = ()
    """What the user should know of it, one line each."""


def place_devices(
    target: DeviceTarget, local_worker_num: int, host: HostFacts, wanted: tuple[int, ...] = ()
) -> DevicePlacement:
    """Give every local worker one device; on a CPU host the device is only a number.

    Args:
        wanted: device index per local worker, as a rank table gives it; empty = 0, 1, 2, ...

    Raises:
        UsageError: more workers than devices (CPU excepted), or no such device on the host.
    """
    if target == "auto":
        target, reason = _best_target(host)
    else:
        reason = "--device_target"
    ids = wanted or tuple(range(local_worker_num))
    if target == "cpu":
        return DevicePlacement(target, ids, tuple(map(str, ids)), reason, _why_no_accelerator(host, reason))
    devices, why = (host.gpus, host.gpus_reason) if target == "gpu" else (host.npus, host.npus_reason)
    if wanted and max(wanted) >= len(devices):
        raise UsageError(
            f"the rank table or the host list gives {host.name} the device {max(wanted)}, but {len(devices)} {target} "
            f"devices are visible there{f' ({why})' if why else ''}: correct it or give --device_target cpu"
        )
    if len(devices) < local_worker_num:
        raise UsageError(
            f"{local_worker_num} workers but {len(devices)} {target} devices visible on {host.name}"
            f"{f' ({why})' if why else ''}: start fewer workers or give --device_target cpu"
        )
    return DevicePlacement(target, ids, tuple(devices[index] for index in ids), reason, (why,) if why else ())


def _best_target(host: HostFacts) -> tuple[DeviceTarget, str]:
    if host.npus:
        return "ascend", f"{len(host.npus)} Ascend devices on {host.name}"
    if host.gpus:
        return "gpu", f"{len(host.gpus)} CUDA devices on {host.name}"
    hidden = host.gpus_reason or host.npus_reason
    return "cpu", f"no accelerator {'visible ' if hidden else ''}on {host.name}"


def _why_no_accelerator(host: HostFacts, reason: str) -> tuple[str, ...]:
    """Say why accelerators that are there are not used, unless the user asked for CPU."""
    return () if reason == "--device_target" else tuple(filter(None, (host.gpus_reason, host.npus_reason)))
