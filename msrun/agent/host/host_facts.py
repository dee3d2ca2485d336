"""Look at this host: processors that may be used, control groups that limit them, accelerators that are visible."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from msrun.agent.own_file import text_of
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
from msrun.planning.record import Record
from msrun.planning.spec import LOOPBACK

_SIBLINGS = ("core_cpus_list", "thread_siblings_list")  # the name since Linux 5.3, and the one before
CPUSET_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
"""Version 2, version 1, and version 1 of old kernels; the effective sets leave out processors that are offline."""


def _cpu_list(path: Path) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        return parse_cpu_list(text_of(path))
    return ()


def _number(path: Path) -> int:
    """Return a number, or -1."""
    with contextlib.suppress(ValueError):
        return int(text_of(path))
    return -1


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, ...]]:
    """Yield the folders of each mounted tree of control groups that has a controller, as version 2 has all of them:
    from the group of this process up to the mount point, as a limit above holds below. `root`: the file system to read
    /proc and /sys of."""
    hierarchies = [line.split(":", 2)[1:] for line in text_of(root / "proc/self/cgroup").splitlines() if ":" in line]
    paths = [(frozenset(filter(None, names.split(","))), path) for names, path in hierarchies]  # version 2 has no names
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        fields, _, source = line.partition(" - ")
        kind, _, options = source.partition(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset() if kind == "cgroup2" else frozenset(options.rpartition(" ")[2].split(","))
        own = next((path for names, path in paths if (names <= controllers if names else not controllers)), None)
        if own is not None and (not controllers or controller in controllers):
            top, mount_point = (  # the kernel writes blanks in octal
                re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text) for text in fields.split()[3:5]
            )
            # a group outside what is mounted here, as a container's own view may have it, leaves the mount point alone.
            is_below = ".." not in Path(own).parts and Path(own).is_relative_to(top)
            relative = Path(own).relative_to(top) if is_below else Path()
            base = root / mount_point.lstrip("/")
            yield (*(base / one for one in [relative, *relative.parents] if one != Path()), base)


class CgroupLimits(Record):
    """Limits on processors; None = no limit."""

    quota_cores: float | None  # processor time per time, so 1.5 = one and a half processors
    cpus: tuple[int, ...] | None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of this process's groups and all above them that can be seen. `root`: see `group_folders`."""
    folders = [folder for tree in group_folders("cpu", root) for folder in tree]
    quotas = [quota for folder in folders if (quota := _quota(folder)) is not None]
    files = (folder / name for tree in group_folders("cpuset", root) for folder in tree for name in CPUSET_FILES)
    return CgroupLimits(min(quotas, default=None), next((cpus for file in files if (cpus := _cpu_list(file))), None))


def _quota(folder: Path) -> float | None:
    both = (
        text_of(folder / "cpu.max") or f"{text_of(folder / 'cpu.cfs_quota_us')} {text_of(folder / 'cpu.cfs_period_us')}"
    )
    with contextlib.suppress(ValueError):
        quota, period = both.split()
        if quota not in ("max", "-1") and int(period) > 0:
            return int(quota) / int(period)
    return None


def read_topology(
    root: Path = Path("/"),
    *,
    affinity: Iterable[int] | None = None,
    device_nodes: Mapping[str, Mapping[str, int | None]] | None = None,
) -> Topology:
    """Return the processors of this host and what this process may use of them. What the kernel does not tell (a
    container without /sys, an old kernel) is taken as flat: one NUMA node, every processor a core of its own. `root`:
    the file system to read /proc and /sys of. `affinity`: processors that this process may run on; asked of the kernel
    when not given. `device_nodes`: NUMA nodes of accelerators, see `Topology.device_nodes`."""
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
    node_of: dict[int, int] = {}
    nodes = [
        (int(folder.name[4:]), folder) for folder in (system / "node").glob("node[0-9]*") if folder.name[4:].isdigit()
    ]
    for node, folder in sorted(nodes):
        node_of |= dict.fromkeys(_cpu_list(folder / "cpulist"), node)  # some of which may be offline
    cores: dict[int, tuple[int, int]] = {}
    for number in numbers:
        if number not in cores:  # one look per core: its hyper-threads are told with it
            folder = system / "cpu" / f"cpu{number}" / "topology"
            siblings = next((found for name in _SIBLINGS if (found := _cpu_list(folder / name))), ())
            package = max(0, _number(folder / "physical_package_id"))
            cores |= dict.fromkeys({*siblings, number}, (package, min(siblings, default=number)))
    return tuple(Cpu(number, node_of.get(number, 0), *cores[number]) for number in numbers)


def _memory_nodes(root: Path) -> tuple[int, ...]:
    with_memory = _cpu_list(root / "sys/devices/system/node/has_memory")
    allowed: tuple[int, ...] = ()
    match = re.search(r"^Mems_allowed_list:\s*(\S+)$", text_of(root / "proc/self/status"), re.MULTILINE)
    with contextlib.suppress(ValueError):
        allowed = parse_cpu_list(match[1]) if match else ()
    if with_memory and allowed:
        return tuple(node for node in allowed if node in with_memory)
    return with_memory or allowed or (0,)


def read_gpus(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the NVIDIA GPUs in the order of their PCI addresses, numbered as nvidia-smi does: within what is here."""
    minors = _device_numbers(root, "nvidia")
    told = {minor: (address, uuid) for minor, address, uuid in _nvidia_information(root) if minor in minors}
    if len(told) == len(minors):
        minors.sort(key=lambda minor: told[minor][0])
    devices = []
    for number, minor in enumerate(minors):
        address, uuid = told.get(minor, ("", ""))
        node = _number(root / "sys/bus/pci/devices" / address / "numa_node")  # none of a GPU without an address
        devices.append(Device(str(number), uuid, node if node >= 0 else None))
    return tuple(devices)


def read_npus(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the Ascend devices by the numbers of their device files. The kernel does not tell their NUMA nodes."""
    return tuple(Device(str(number)) for number in _device_numbers(root, "davinci"))


def _device_numbers(root: Path, stem: str) -> list[int]:
    pattern = re.compile(rf"{stem}(\d+)\Z")
    found = (pattern.match(path.name) for path in (root / "dev").glob(f"{stem}*"))
    return sorted(int(match[1]) for match in found if match)


def _nvidia_information(root: Path) -> list[tuple[int, str, str]]:
    found = []
    for folder in (root / "proc/driver/nvidia/gpus").glob("*"):
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text_of(folder / "information"), re.MULTILINE))
        if fields.get("Device Minor", "").isdigit():
            uuid = fields.get("GPU UUID", "")
            uuid = uuid if re.fullmatch(r"GPU-[0-9a-fA-F-]+", uuid) else ""  # "GPU-????..." until first used
            found.append((int(fields["Device Minor"]), folder.name.lower(), uuid))
    return found


_FOLDER = ".dist-info"


def installed_version(package: str) -> str:
    """Return the version, such as 2.13.0+cpu; empty when the package is not installed. It stands in the name of the
    metadata's folder (PyPA's "Recording installed projects"): importlib.metadata costs more than the rest of a look at
    a host, and is only asked of a package that can be imported."""
    for path in sys.path:
        with contextlib.suppress(OSError):  # an archive, or nothing
            for name in os.listdir(path or "."):  # noqa: PTH208 - site-packages is long
                if name.startswith(f"{package}-") and name.endswith(_FOLDER):
                    return name[len(package) + 1 : -len(_FOLDER)]
    if find_spec(package) is None:
        return ""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package) or ""
    except PackageNotFoundError:
        return ""


def read_host_facts(environ: Mapping[str, str], root: Path = Path("/")) -> HostFacts:
    """Return what the planner needs of this host. Opens no device and imports no vendor library. A preset
    CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES is honoured: only what it makes visible counts. `environ`: the
    environment of the workers, as far as it is known. `root`: the file system to read /dev, /proc and /sys of."""
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
