"""What the control groups of this process leave it of the host's processors. Versions 1 and 2, and both at once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from msrun.agent.host.cgroups import group_folders
from msrun.planning.placement.topology import parse_cpu_list

CPUSET_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
"""Version 2, version 1, and version 1 of old kernels; the effective sets leave out processors that are offline."""


@dataclass(frozen=True)
class CgroupLimits:
    """Limits on processors; None = no limit."""

    quota_cores: float | None
    """Processor time per time, so 1.5 = one and a half processors."""
    cpus: tuple[int, ...] | None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of this process's groups and all above them that can be seen.

    Args:
        root: the file system to read /proc and /sys of.
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
