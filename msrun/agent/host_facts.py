"""Look at this host: processors that may be used, accelerators that are visible."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from msrun.planning.host import HostFacts

LOOPBACK = "127.0.0.1"


def read_host_facts(environ: Mapping[str, str]) -> HostFacts:
    """Return what the planner needs of this host. Opens no device and imports no vendor library.

    A preset CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES is honoured: only what it names counts.
    """
    return HostFacts(
        name=socket.gethostname(),
        address=LOOPBACK,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        gpus=_visible(environ.get("CUDA_VISIBLE_DEVICES"), _device_files("nvidia")),
        npus=_visible(environ.get("ASCEND_RT_VISIBLE_DEVICES"), _device_files("davinci")),
    )


def _device_files(stem: str) -> tuple[str, ...]:
    """Return the numbers of /dev/<stem><number>, ascending."""
    pattern = re.compile(rf"{stem}(\d+)\Z")
    numbers = [int(match[1]) for entry in Path("/dev").iterdir() if (match := pattern.match(entry.name))]
    return tuple(str(number) for number in sorted(numbers))


def _visible(preset: str | None, present: tuple[str, ...]) -> tuple[str, ...]:
    if preset is None or not present:
        return present
    return tuple(piece.strip() for piece in preset.split(",") if piece.strip() and piece.strip() != "-1")
