"""A user's package of the name msrun: workers that are forked from a process of ours have ours, and are told so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msrun.planning.spec import LaunchSpec

_ROOT = Path(__file__).parents[2]


def describe_shadowed_package(spec: LaunchSpec, environment: Mapping[str, str]) -> str:
    """Return which package or module of the user's cannot be imported by its name msrun, in one line; else nothing.

    Args:
        environment: of the workers.
    """
    if not spec.program.is_python or spec.start_method == "exec":
        return ""
    at, paths = spec.working_directory, environment.get("PYTHONPATH", "").split(os.pathsep)
    first = (at / spec.program.target).parent if spec.program.kind == "script" else at
    folders = [*([] if environment.get("PYTHONSAFEPATH") else [first]), *(at / path for path in paths if path)]
    for folder in folders:
        if folder.resolve() == _ROOT:
            return ""
        for found in (folder / "msrun", folder / "msrun.py"):
            if (found / "__init__.py").is_file() or (found.suffix and found.is_file()):
                return (
                    f"{found.resolve()}: workers import msrun's own package of that name, not this one; rename it, or "
                    "give --start_method exec, with which they import it and not msrun.runtime"
                )
    return ""
