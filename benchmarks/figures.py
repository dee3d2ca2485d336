"""Figures of a benchmark as a file, with what they depend on: commit, date, machine and versions.

    python benchmarks/launch.py --json FILE

Such files lie in benchmarks/results/; what the documents show is taken from them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = (
    *("msrun", "torch", "numpy", "click", "cryptography", "paramiko", "psutil", "PyYAML", "mpi4py"),
    *("torchvision", "pillow", "mindspore"),
)
PROGRAMS = {"mpirun": ["mpirun", "--version"], "ssh": ["ssh", "-V"], "pdsh": ["pdsh", "-V"]}

_figures: list[dict[str, Any]] = []


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option --json."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures and what they depend on")


def record(part: str, **values: Any) -> None:
    """Keep the figures of one line of a table; times are in seconds unless the name says otherwise."""
    _figures.append({"part": part, **values})


@contextlib.contextmanager
def kept(path: Path | None) -> Iterator[None]:
    """Write what was recorded in this block to a file, also when the benchmark is interrupted."""
    begin = datetime.now(UTC)
    load = os.getloadavg()[0]
    try:
        yield
    finally:
        if path is not None and _figures:
            surroundings = {**describe_run(begin), "load": round(load, 2)}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**surroundings, "figures": _figures}, indent=2) + "\n", encoding="utf-8")


def describe_run(begin: datetime) -> dict[str, Any]:
    """Return what was run, when, from which commit, on which machine and with which versions."""
    script = Path(sys.argv[0]).resolve()
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_json_option(where)
    words = where.parse_known_args()[1]  # where the figures go is no setting of theirs
    command = shlex.join(["python", f"benchmarks/{script.name}", *words])
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "benchmark": script.stem,
        "command": command,
        "commit": _output("git", "rev-parse", "HEAD"),
        "is_changed": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
        "date": begin.isoformat(timespec="seconds"),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": _processor(),
            "memory_gib": round(memory_bytes / 2**30, 1),
            "kernel": platform.release(),
        },
        "versions": {"python": platform.python_version(), **_libraries(), **_programs()},
    }


def _output(*command: str) -> str | None:
    """Return what a command prints, None when it fails or is not installed."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _programs() -> dict[str, str]:
    found = {}
    for name, command in PROGRAMS.items():
        if shutil.which(name):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found[name] = (done.stdout or done.stderr).splitlines()[0]
    return found
