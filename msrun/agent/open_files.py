"""How many files processes of msrun may open: as many as the system lets them. Workers keep what the user has set.

A program that calls select(2) cannot use descriptors from 1024 on, which is why the soft limit is as low as that; msrun
does not call it. Source: getrlimit(2), select(2).
"""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """Raise this process's limit to the hard one, and return what it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def set_open_files(limit: int, pid: int = 0) -> None:
    """Set the soft limit of a process, by default of this one."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
