"""This host's place in a job of several, as far as the variables around msrun tell it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msrun.agent.host.host_facts import read_gpus, read_npus
from msrun.cluster.rendezvous import own_addresses
from msrun.errors import UsageError
from msrun.planning.host_options import HostOptions, find_host_options, is_place_open
from msrun.planning.placement.host import ASCEND_VARIABLE, CUDA_VARIABLE, visible_ascend, visible_cuda
from msrun.planning.schedulers import (
    BY_HAND,
    HOSTS_FILE,
    IN_POD,
    PBS_HOSTS,
    TORCHRUN,
    HostView,
    find_surroundings,
    read_domain,
)


def discover_host(options: Mapping[str, Any], given: Collection[str], environ: Mapping[str, str]) -> HostOptions:
    """Return what Slurm, mpirun, Kubernetes or torchrun's variables say of this host, for options that are not given.

    Args:
        options: of the command.
        given: names of those that were set.
        environ: of msrun.

    Raises:
        UsageError: variables that contradict each other or the options, or that leave out what is needed.
    """
    job = find_surroundings(environ, view_host(environ)) if is_place_open(options, given) else None
    if job is None:
        return HostOptions({})
    found = find_host_options(job, options, given, lambda: count_devices(options["device_target"], environ))
    is_node_0 = {**options, **found.options}["node_rank"] == 0
    return with_own_address(found) if is_node_0 and "master_addr" in found.options else found


def is_under_scheduler(environ: Mapping[str, str]) -> bool:
    """Return whether a cluster manager or another launcher has started msrun here, and nobody by hand."""
    if environ.get(IN_POD):
        return True
    with contextlib.suppress(UsageError):
        job = find_surroundings(environ, view_host(environ))
        return job is not None and job.name not in (BY_HAND, TORCHRUN)
    return False


def with_own_address(found: HostOptions) -> HostOptions:
    """Return the options of node 0 with its address where its name, which the others know, is loopback here.

    Many systems have their own name in /etc/hosts as 127.0.1.1. With several addresses there is no telling which one
    the others know, and the name stays: that it is loopback is then found, and refused, when the hosts meet.
    """
    name = str(found.options["master_addr"])
    try:
        known = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return found
    outward = [text for text in own_addresses() if _is_outward(text)]
    if not all(ipaddress.ip_address(text).is_loopback for text in known) or len(outward) != 1:
        return found
    settings = (
        replace(setting, value=outward[0], source=f"own address; {setting.source} says {name}")
        if setting.name == "master_addr"
        else setting
        for setting in found.settings
    )
    return replace(found, options={**found.options, "master_addr": outward[0]}, settings=tuple(settings))


def _is_outward(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return address.version == 4 and not address.is_loopback and not address.is_link_local


def view_host(environ: Mapping[str, str]) -> HostView:
    """Look at what of this host decides on the meaning of its variables. Asks no name server."""
    name, _, domain = socket.gethostname().partition(".")
    listed = _read(environ[PBS_HOSTS]).split() if environ.get(PBS_HOSTS) else ()
    return HostView(name, domain or read_domain(_read(HOSTS_FILE), name), len(os.sched_getaffinity(0)), tuple(listed))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def count_devices(target: str, environ: Mapping[str, str]) -> int:
    """Return how many accelerators of the target are visible; `auto` takes Ascend devices before GPUs, as jobs do."""
    npus = len(visible_ascend(environ.get(ASCEND_VARIABLE), read_npus()).names) if target in ("auto", "ascend") else 0
    gpus = len(visible_cuda(environ.get(CUDA_VARIABLE), read_gpus()).names) if target in ("auto", "gpu") else 0
    return npus or gpus
