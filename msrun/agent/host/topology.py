"""Read this host's processors from sysfs and the control groups."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from msrun.agent.host.cgroup_limits import read_cgroup_limits
from msrun.planning.placement.topology import Cpu, Topology, parse_cpu_list

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
    processor a core of its own.

    Args:
        root: the file system to read /proc and /sys of.
        affinity: processors that this process may run on; asked of the kernel when not given.
        device_nodes: NUMA nodes of accelerators, see `Topology.device_nodes`.
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
