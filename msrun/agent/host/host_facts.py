"""Look at this host: processors that may be used, accelerators that are visible."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from msrun.agent.host.cgroups import read_cgroup_limits
from msrun.planning.placement.host import (
    ASCEND_VARIABLE,
    CUDA_VARIABLE,
    Cpu,
    Device,
    HostFacts,
    Topology,
    parse_cpu_list,
    visible_ascend,
    visible_cuda,
)

_SIBLINGS = ("core_cpus_list", "thread_siblings_list")
"""Processors of one physical core: the name since Linux 5.3, and the one before."""


def read_topology(
    root: Path = Path("/"),
    *,
    affinity: Iterable[int] | None = None,
    device_nodes: Mapping[str, Mapping[str, int | None]] | None = None,
) -> Topology:
    """Return the processors of this host and what this process may use of them.

    What the kernel does not tell (a container without /sys, an old kernel) is taken as flat: one NUMA node, every
    processor a core of its own. `root`: the file system to read /proc and /sys of. `affinity`: processors that this
    process may run on; asked of the kernel when not given. `device_nodes`: NUMA nodes of accelerators, see
    `Topology.device_nodes`.
    """
    usable = set(os.sched_getaffinity(0) if affinity is None else affinity)
    limits = read_cgroup_limits(root)
    online = _cpu_list(root / "sys/devices/system/cpu/online") or tuple(sorted(usable))
    usable = (usable & set(online)) or usable
    if limits.cpus is not None:
        usable = (usable & set(limits.cpus)) or usable  # a set that leaves nothing is not the one of this process
    return Topology(
        cpus=_read_cpus(root / "sys/devices/system", sorted({*online, *usable})),
        allowed=tuple(sorted(usable)),
        quota_cores=limits.quota_cores,
        memory_nodes=_memory_nodes(root),
        device_nodes=device_nodes or {},
    )


def _read_cpus(system: Path, numbers: Iterable[int]) -> tuple[Cpu, ...]:
    node_of = {number: node for node, cpus in _nodes(system / "node") for number in cpus}
    cores: dict[int, tuple[int, int]] = {}
    for number in numbers:
        if number not in cores:  # one look per core: its hyper-threads are told with it
            folder = system / "cpu" / f"cpu{number}" / "topology"
            siblings = next((found for name in _SIBLINGS if (found := _cpu_list(folder / name))), ())
            package = _number(folder / "physical_package_id")
            cores |= dict.fromkeys({*siblings, number}, (package, min(siblings, default=number)))
    return tuple(Cpu(number, node_of.get(number, 0), *cores[number]) for number in numbers)


def _nodes(folder: Path) -> list[tuple[int, tuple[int, ...]]]:
    """Return every NUMA node with its processors, some of which may be offline."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            match = re.fullmatch(r"node(\d+)", entry.name)
            if match:
                found.append((int(match[1]), _cpu_list(Path(entry.path, "cpulist"))))
    return sorted(found)


def _memory_nodes(root: Path) -> tuple[int, ...]:
    """Return the NUMA nodes that have memory and that the cpuset allows."""
    with_memory = _cpu_list(root / "sys/devices/system/node/has_memory")
    allowed: tuple[int, ...] = ()
    with contextlib.suppress(OSError, ValueError):
        match = re.search(r"^Mems_allowed_list:\s*(\S+)$", (root / "proc/self/status").read_text(), re.MULTILINE)
        allowed = parse_cpu_list(match[1]) if match else ()
    if with_memory and allowed:
        return tuple(node for node in allowed if node in with_memory)
    return with_memory or allowed or (0,)


def _cpu_list(path: Path) -> tuple[int, ...]:
    with contextlib.suppress(OSError, ValueError):
        return parse_cpu_list(path.read_text())
    return ()


def _number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return max(0, int(path.read_text()))
    return 0


def read_gpus(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the NVIDIA GPUs in the order of their PCI addresses, numbered as nvidia-smi does: within what is here.

    CUDA itself counts in this order with CUDA_DEVICE_ORDER=PCI_BUS_ID, and on hosts with equal GPUs by default.
    """
    minors = _device_numbers(root, "nvidia")
    told = {minor: (address, uuid) for minor, address, uuid in _nvidia_information(root) if minor in minors}
    if len(told) == len(minors):
        minors.sort(key=lambda minor: told[minor][0])
    devices = []
    for number, minor in enumerate(minors):
        address, uuid = told.get(minor, ("", ""))
        devices.append(Device(str(number), uuid, _numa_node(root, address) if address else None))
    return tuple(devices)


def read_npus(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the Ascend devices by the numbers of their device files. The kernel does not tell their NUMA nodes."""
    return tuple(Device(str(number)) for number in _device_numbers(root, "davinci"))


def _device_numbers(root: Path, stem: str) -> list[int]:
    """Return the numbers of /dev/<stem><number>, ascending."""
    pattern = re.compile(rf"{stem}(\d+)\Z")
    with contextlib.suppress(OSError):
        return sorted(int(match[1]) for entry in (root / "dev").iterdir() if (match := pattern.match(entry.name)))
    return []


def _nvidia_information(root: Path) -> list[tuple[int, str, str]]:
    """Return (device minor, PCI address, UUID) of every GPU that the driver tells of."""
    found = []
    with contextlib.suppress(OSError):
        for folder in (root / "proc/driver/nvidia/gpus").iterdir():
            with contextlib.suppress(OSError):
                text = (folder / "information").read_text(errors="replace")
                fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
                if fields.get("Device Minor", "").isdigit():
                    uuid = fields.get("GPU UUID", "")
                    uuid = uuid if re.fullmatch(r"GPU-[0-9a-fA-F-]+", uuid) else ""  # "GPU-????..." until first used
                    found.append((int(fields["Device Minor"]), folder.name.lower(), uuid))
    return found


def _numa_node(root: Path, address: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        return node if node >= 0 else None
    return None


_FOLDER = ".dist-info"


def installed_version(package: str) -> str:
    """Return the version, such as 2.13.0+cpu; empty when the package is not installed.

    It stands in the name of the metadata's folder (`torch-2.13.0+cpu.dist-info`, PyPA's "Recording installed
    projects"). importlib.metadata would parse what is inside, and itself costs more than the rest of a look at a host;
    it is asked where there is no such folder.
    """
    for path in sys.path:
        with contextlib.suppress(OSError):  # an archive, or nothing
            for name in os.listdir(path or "."):  # noqa: PTH208 - site-packages is long
                if name.startswith(f"{package}-") and name.endswith(_FOLDER):
                    return name[len(package) + 1 : -len(_FOLDER)]
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package) or ""
    except PackageNotFoundError:
        return ""


LOOPBACK = "127.0.0.1"


def read_host_facts(environ: Mapping[str, str], root: Path = Path("/")) -> HostFacts:
    """Return what the planner needs of this host. Opens no device and imports no vendor library.

    A preset CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES is honoured: only what it makes visible counts.
    `environ`: the environment of the workers, as far as it is known. `root`: the file system to read /dev, /proc and
    /sys of.
    """
    gpus, npus = read_gpus(root), read_npus(root)
    visible_gpus = visible_cuda(environ.get(CUDA_VARIABLE), gpus)
    visible_npus = visible_ascend(environ.get(ASCEND_VARIABLE), npus)
    nodes = {target: {d.number: d.node for d in found} for target, found in (("gpu", gpus), ("ascend", npus)) if found}
    topology = read_topology(root, device_nodes=nodes)
    return HostFacts(
        name=socket.gethostname(),
        address=LOOPBACK,
        cpus=topology.allowed,
        gpus=visible_gpus.names,
        npus=visible_npus.names,
        gpus_reason=visible_gpus.reason,
        npus_reason=visible_npus.reason,
        topology=topology,
        has_torch=find_spec("torch") is not None,
        mindspore_version=installed_version("mindspore"),
    )
