"""What the planner must know of a host. Gathered by `msrun.agent.host`; here only the value and its rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msrun.errors import UsageError
from msrun.planning.program import DeviceTarget
from msrun.planning.ranks import count_workers
from msrun.planning.spec import parse_cpu_range


@dataclass(frozen=True)
class Cpu:
    """One processor as the kernel numbers them: a hardware thread."""

    number: int
    node: int
    """NUMA node."""
    package: int
    core: int
    """Lowest processor number of its physical core: equal for hyper-threads of one core, unique on the host."""


@dataclass(frozen=True)
class Topology:
    """The processors of a host and what this process may use of them."""

    cpus: tuple[Cpu, ...]
    """Every processor that is online."""
    allowed: tuple[int, ...]
    """Processors that this process may use: its affinity within the cgroup's cpuset."""
    quota_cores: float | None = None
    """The cgroup's limit of processor time, in processors; None = no limit."""
    memory_nodes: tuple[int, ...] = (0,)
    """NUMA nodes with memory that this process may use."""
    device_nodes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """Per device target: every accelerator of the host by its number, and its NUMA node, None when not known."""

    def cores(self) -> list[tuple[Cpu, ...]]:
        """Return the allowed processors by physical core, neighbours next to each other."""
        allowed = set(self.allowed)
        groups: dict[int, list[Cpu]] = {}
        for cpu in sorted(self.cpus, key=lambda cpu: (cpu.node, cpu.package, cpu.core, cpu.number)):
            if cpu.number in allowed:
                groups.setdefault(cpu.core, []).append(cpu)
        return [tuple(group) for group in groups.values()]

    def nodes(self) -> tuple[int, ...]:
        allowed = set(self.allowed)
        return tuple(sorted({cpu.node for cpu in self.cpus if cpu.number in allowed}))


def flat_topology(cpus: Iterable[int]) -> Topology:
    numbers = tuple(sorted(cpus))
    return Topology(tuple(Cpu(number, 0, 0, number) for number in numbers), numbers)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Turn the kernel's `0-3,8` into numbers, ascending; blank text is the empty set (ValueError: not such a list)."""
    pieces = [piece for piece in text.strip().split(",") if piece.strip()]
    return tuple(sorted({number for piece in pieces for number in parse_cpu_range(piece)}))


CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
ASCEND_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"

_LEADING_NUMBER = re.compile(r"\s*[+]?(\d+)")


@dataclass(frozen=True)
class Device:
    """One accelerator of the host."""

    number: str
    """Physical number, as nvidia-smi or npu-smi shows it."""
    uuid: str = ""
    """"GPU-..." when known."""
    node: int | None = None
    """NUMA node; None when not known."""


@dataclass(frozen=True)
class VisibleDevices:
    """What a process sees of the host's accelerators."""

    names: tuple[str, ...]
    """Physical numbers in the order in which the process counts them; a name where the number is not known."""
    reason: str = ""
    """Why fewer are visible than the variable names or the host has, in words."""


def visible_cuda(preset: str | None, present: Sequence[Device]) -> VisibleDevices:
    """Apply CUDA_VISIBLE_DEVICES: indexes or UUIDs, abbreviated while unique; the first invalid entry hides itself and
    all after it; one twice hides everything; a process sees one MIG device. Sources: CUDA C++ Programming Guide; MIG
    User Guide; `torch.cuda` for repeats and mixed forms.
    """
    shown, names = f"{CUDA_VARIABLE}={preset}", list[str]()
    if preset is None or not present:
        return VisibleDevices(tuple(device.number for device in present))
    for entry in preset.split(","):
        name = _resolve_cuda(entry, preset, present)
        if name is None:
            return _ended(shown, entry, names, len(present))
        if name in names:
            return VisibleDevices((), f"{shown}: {entry.strip()} is named twice, and CUDA then shows no device")
        names.append(name)
    if len(names) > 1 and names[0].startswith("MIG-"):
        return VisibleDevices(tuple(names[:1]), f"{shown}: CUDA shows a process one MIG device only")
    return VisibleDevices(tuple(names))


def _resolve_cuda(entry: str, preset: str, present: Sequence[Device]) -> str | None:
    """Return the physical number (or the name, when there is no telling) of an entry; None = invalid."""
    if preset.startswith("MIG-"):
        return entry if entry.startswith("MIG-") else None
    if not preset.startswith("GPU-"):
        match = _LEADING_NUMBER.match(entry)  # the driver reads numbers as strtoul does
        index = int(match[1]) if match else len(present)
        return present[index].number if index < len(present) else None
    if not entry.startswith("GPU-") or not all(device.uuid for device in present):
        return entry if entry.startswith("GPU-") else None
    found = [device.number for device in present if device.uuid.lower().startswith(entry.strip().lower())]
    return found[0] if len(found) == 1 else None


def visible_ascend(preset: str | None, present: Sequence[Device]) -> VisibleDevices:
    """Apply ASCEND_RT_VISIBLE_DEVICES: device numbers between commas and nothing else; what is invalid, a blank
    included, hides itself and all after it. Source: CANN environment variable reference.
    """
    names: list[str] = []
    if preset is None or not present:
        return VisibleDevices(tuple(device.number for device in present))
    for entry in preset.split(","):
        index = int(entry) if re.fullmatch(r"[0-9]+", entry) else len(present)
        if index >= len(present) or present[index].number in names:
            return _ended(f"{ASCEND_VARIABLE}={preset}", entry, names, len(present))
        names.append(present[index].number)
    return VisibleDevices(tuple(names))


def _ended(shown: str, entry: str, names: Sequence[str], count: int) -> VisibleDevices:
    why = f"{shown}: {entry!r} is none of the host's {count} devices or not allowed there, and hides all from it on"
    return VisibleDevices(tuple(names), f"{shown[:-1]} is empty" if not shown.partition("=")[2] else why)


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
    """Give every local worker a device, on a CPU host a number; `wanted`: of a table (UsageError: there is none)."""
    ids, reason = wanted or tuple(range(local_worker_num)), "--device_target"
    hidden = tuple(filter(None, (host.gpus_reason, host.npus_reason)))
    if target == "auto":
        target, reason = "cpu", f"no accelerator {'visible ' if hidden else ''}on {host.name}"
        if host.npus:
            target, reason = "ascend", f"{len(host.npus)} Ascend devices on {host.name}"
        elif host.gpus:
            target, reason = "gpu", f"{len(host.gpus)} CUDA devices on {host.name}"
    if target == "cpu":  # why accelerators that are there are not used, unless the user asked for CPU
        notes = () if reason == "--device_target" else hidden
        return DevicePlacement(target, ids, tuple(map(str, ids)), reason, notes)
    devices, why = (host.gpus, host.gpus_reason) if target == "gpu" else (host.npus, host.npus_reason)
    because = f" ({why})" if why else ""
    if wanted and max(wanted) >= len(devices):
        raise UsageError(
            f"the rank table or the host list gives {host.name} the device {max(wanted)}, but {len(devices)} {target} "
            f"devices are visible there{because}: correct it or give --device_target cpu"
        )
    if len(devices) < local_worker_num:
        raise UsageError(
            f"{count_workers(local_worker_num)} but {len(devices)} {target} devices visible on {host.name}{because}: "
            "start fewer workers or give --device_target cpu"
        )
    return DevicePlacement(target, ids, tuple(devices[index] for index in ids), reason, (why,) if why else ())
