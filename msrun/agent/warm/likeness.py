"""What a process takes from its start and can hardly be given later: a warm server serves jobs that are alike in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrun.planning.environment import SET_LATE

_READ_AT_IMPORT = re.compile(
    r"(?:PYTHON|LD_|MALLOC|GLIBC|OMP_|GOMP_|KMP_|MKL_|OPENBLAS|BLIS_|NUMEXPR|TORCH|PYTORCH|ATEN|C10|CUDA|NVIDIA|NCCL|"
    r"ASCEND|HCCL|NPU|GLOO|TP_|XPU|TRITON|LC_)|(?:LANG|TZ|HOME|USER|LOGNAME|VIRTUAL_ENV|SOURCE_DATE_EPOCH)\Z"
)
"""Names, or their beginnings, of variables that the interpreter, the C library and torch read when they are loaded."""
_KEPT_STATUS = ("Umask:", "Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp:", "Mems_allowed:")
"""Lines of /proc/self/status that a child inherits."""


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that have their effect at import."""
    return {name: value for name, value in env.items() if _READ_AT_IMPORT.match(name) and name not in SET_LATE}


def likeness(env: Mapping[str, str], imports: Sequence[str], working_directory: str) -> str:
    """Return a short word that is equal for two jobs exactly when one warm server can serve both.

    It stands for interpreter, msrun's code, imported packages, variables that are read at import, user, capabilities,
    limits, cores, priority, control group and namespaces.

    Args:
        env: that of the fork server.
        imports: what it imports before it has a job. Of packages that one job names, others may find more imported.
    """
    search = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    value = {
        "python": [sys.version, sys.executable, sys.prefix],
        "code": str(Path(__file__).parents[2]),
        "packages": sorted({name.partition(":")[0].partition(".")[0] for name in imports}),
        "environment": read_at_import(env),
        "directory": working_directory if any(not Path(part).is_absolute() for part in search) else "",
        "status": [line for line in _lines("/proc/self/status") if line.startswith(_KEPT_STATUS)],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _limits()},
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # the hard limit
        "cores": sorted(os.sched_getaffinity(0)),
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), *_lines("/proc/self/oom_score_adj")],
        "control groups": _lines("/proc/self/cgroup"),
        "namespaces": _namespaces(),
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _limits() -> list[str]:
    of_each_job = {"RLIMIT_NOFILE", "RLIMIT_OFILE"}
    return sorted({name for name in dir(resource) if name.startswith("RLIMIT_")} - of_each_job)


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def _namespaces() -> dict[str, str]:
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for entry in sorted(Path("/proc/self/ns").iterdir()):
            if not entry.name.endswith("_for_children"):
                found[entry.name] = str(entry.readlink())
    return found


def loaded_files() -> dict[str, tuple[int, int]]:
    """Return the file of every imported module, with its time of change in ns and its size in bytes."""
    files = {str(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    return {path: stamp for path in sorted(files) if (stamp := _stamp(path)) is not None}


def changed_file(files: Mapping[str, tuple[int, int]]) -> str:
    """Return one of the files that is not as it was; empty when all are."""
    return next((path for path, stamp in files.items() if _stamp(path) != stamp), "")


def _stamp(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(path)  # noqa: PTH116 - thousands of them, before a job starts
        return found.st_mtime_ns, found.st_size
    return None
