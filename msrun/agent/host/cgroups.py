"""The control groups of this process: folders of their limits and counters, and what they leave it of the processors.

Versions 1 and 2, and both at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msrun.planning.placement.host import parse_cpu_list


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, ...]]:
    """Yield the folders of each mounted tree of groups that has a controller, as version 2 has all of them.

    They lead from the group of this process up to the mount point: a limit above holds below. `root`: the file system
    to read /proc and /sys of.
    """
    paths = _own_paths(root)
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, source = line.partition(" - ")
        kind, _, options = source.partition(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset() if kind == "cgroup2" else frozenset(options.rpartition(" ")[2].split(","))
        own = next((path for names, path in paths if (names <= controllers if names else not controllers)), None)
        if own is not None and (not controllers or controller in controllers):
            top, mount_point = (_unescape(text) for text in fields.split()[3:5])
            yield _folders(root / mount_point.lstrip("/"), top, own)


def _own_paths(root: Path) -> list[tuple[frozenset[str], str]]:
    """Return (controllers, path of the group) of each hierarchy; version 2 names no controllers."""
    paths = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        paths.append((frozenset(filter(None, names.split(","))), path))
    return paths


def _folders(mount_point: Path, top: str, own: str) -> tuple[Path, ...]:
    """Return the folders from a group up to the mount point, which may show only a part of the tree (`top`).

    A group outside what is mounted here, as in a container that has its own view, leaves the mount point alone.
    """
    group = Path(own)
    relative = Path()
    if ".." not in group.parts and group.is_relative_to(top):
        relative = group.relative_to(top)
    below = [mount_point / parent for parent in [relative, *relative.parents] if parent != Path()]
    return (*below, mount_point)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes for blanks in paths."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


CPUSET_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
"""Version 2, version 1, and version 1 of old kernels; the effective sets leave out processors that are offline."""


@dataclass(frozen=True)
class CgroupLimits:
    """Limits on processors; None = no limit."""

    quota_cores: float | None  # processor time per time, so 1.5 = one and a half processors
    cpus: tuple[int, ...] | None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of this process's groups and all above them that can be seen. `root`: the file system to read
    /proc and /sys of.
    """
    trees = group_folders("cpu", root)
    quotas = [quota for folders in trees for folder in folders if (quota := _quota(folder)) is not None]
    sets = (_cpuset(folders) for folders in group_folders("cpuset", root))
    return CgroupLimits(min(quotas, default=None), next((found for found in sets if found is not None), None))


def _quota(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota not in ("max", "-1") and int(period) > 0:
            return int(quota) / int(period)
    return None


def _cpuset(folders: tuple[Path, ...]) -> tuple[int, ...] | None:
    for folder in folders:
        for name in CPUSET_FILES:
            with contextlib.suppress(OSError, ValueError):
                cpus = parse_cpu_list((folder / name).read_text())
                if cpus:
                    return cpus
    return None
