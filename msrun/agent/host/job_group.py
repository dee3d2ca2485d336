"""A control group for the processes of a job, where this user may make one: what a worker starts is in it for good,
whatever becomes of its environment, its session and its parents.

The group lies below that of this process, so that all limits hold as before, and sets none of its own: it is made in
the tree of version 2 or in one without controllers. Source: cgroups(7).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from msrun.agent.host.cgroups import group_folders

PREFIX = "msrun-"
"""What the names of all groups begin with."""
STALE_S = 60.0
"""An empty group of this age is one of a job whose processes were all killed at once."""
_PROCESSES = "cgroup.procs"
_WITHOUT_LIMITS = "name=systemd"
"""Has no controllers, in version 1."""


def make_group(name: str, root: Path = Path("/")) -> str:
    """Return the folder of a group of this name below the one of this process; empty where none may be made.

    Args:
        name: begins with PREFIX.
        root: the file system to read /proc and /sys of.
    """
    for folders in group_folders(_WITHOUT_LIMITS, root):
        own, group = folders[0], folders[0] / name
        with contextlib.suppress(OSError, ValueError):
            if os.getpid() not in _read_pids(own):  # not its own, but what is mounted here of another one
                continue
            _remove_stale(own)
            group.mkdir(exist_ok=True)
            kind = group / "cgroup.type"
            if (group / _PROCESSES).exists() and (not kind.exists() or kind.read_text().strip() == "domain"):
                return str(group)
            group.rmdir()
    return ""


def enter_group(folder: str, pid: int) -> bool:
    """Move a process into a group, and so all that it will start; False when that is not possible."""
    try:
        Path(folder, _PROCESSES).write_text(str(pid))
    except OSError:
        return False
    return True


def group_members(folder: str) -> list[int]:
    """Return the processes in a group; none when there is no group."""
    with contextlib.suppress(OSError, ValueError):
        return _read_pids(Path(folder)) if folder else []
    return []


def remove_group(folder: str) -> None:
    """Remove a group that is empty but for this process, which goes back to where the group was made."""
    if folder:
        with contextlib.suppress(OSError):
            if os.getpid() in group_members(folder):
                enter_group(str(Path(folder).parent), os.getpid())
            Path(folder).rmdir()


def _remove_stale(own: Path) -> None:
    for group in own.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody is in it
            if time.time() - group.stat().st_mtime > STALE_S:
                group.rmdir()


def _read_pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / _PROCESSES).read_text().split()]
