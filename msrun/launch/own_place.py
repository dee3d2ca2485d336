"""This host's place in a job of several, as far as the variables around msrun tell it."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msrun.agent.host.accelerators import read_gpus, read_npus
from msrun.planning.discovery.kubernetes_job import HOSTS_FILE, read_domain
from msrun.planning.discovery.register import find_surroundings
from msrun.planning.discovery.seat import FoundSeat, find_seat, is_seat_open
from msrun.planning.discovery.surroundings import HostView
from msrun.planning.placement.visible_devices import ASCEND_VARIABLE, CUDA_VARIABLE, visible_ascend, visible_cuda


def find_own_place(options: Mapping[str, Any], given: Collection[str], environ: Mapping[str, str]) -> FoundSeat:
    """Return what Slurm, mpirun, Kubernetes or torchrun's variables say of this host, for options that are not given.

    Args:
        options: of the command.
        given: names of those that were set.
        environ: of msrun.

    Raises:
        UsageError: variables that contradict each other or the options, or that leave out what is needed.
    """
    job = find_surroundings(environ, view_host()) if is_seat_open(options, given) else None
    if job is None:
        return FoundSeat({})
    return find_seat(job, options, given, lambda: count_devices(options["device_target"], environ))


def view_host() -> HostView:
    """Look at what of this host decides on the meaning of its variables. Asks no name server."""
    name, _, domain = socket.gethostname().partition(".")
    try:
        text = Path(HOSTS_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return HostView(name, domain or read_domain(text, name), len(os.sched_getaffinity(0)))


def count_devices(target: str, environ: Mapping[str, str]) -> int:
    """Return how many accelerators of the target are visible; `auto` takes Ascend devices before GPUs, as jobs do."""
    npus = len(visible_ascend(environ.get(ASCEND_VARIABLE), read_npus()).names) if target in ("auto", "ascend") else 0
    gpus = len(visible_cuda(environ.get(CUDA_VARIABLE), read_gpus()).names) if target in ("auto", "gpu") else 0
    return npus or gpus
