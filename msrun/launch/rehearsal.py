"""What each host of a rehearsal gets of this machine: a bare login, devices and cores of its own."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msrun.agent.host.host_facts import read_host_facts
from msrun.errors import ClusterError, UsageError
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.placement.bind_options import CoreBinding
from msrun.planning.placement.binding import bind_workers
from msrun.planning.placement.host import ASCEND_VARIABLE, CUDA_VARIABLE, DevicePlacement, HostFacts, place_devices
from msrun.planning.spec import LaunchSpec

VISIBLE = {"gpu": CUDA_VARIABLE, "ascend": ASCEND_VARIABLE}
LOGIN = ("HOME", "LOGNAME", "PATH", "SHELL", "TMPDIR", "USER", *VISIBLE.values())
"""What an agent has before the launcher's variables come, as after a login over SSH; and which devices may be used."""
REACH_S = 2.0


@dataclass(frozen=True)
class HostShare:
    """One host's part of this machine."""

    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    """Processors of its agent and all that it starts; empty = all."""

    @property
    def home(self) -> str:
        """The directory that a login begins in."""
        home = self.environment.get("HOME", "")
        return home if home and Path(home).is_dir() else "/"


def share_machine(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[HostEntry, HostShare]:
    """Divide this machine among the hosts of a rehearsal.

    No device is given to two hosts. Cores are divided when there is one for each device; else all hosts use all.

    Args:
        environ: of the launcher.

    Raises:
        UsageError: there are more workers than devices, or --env would give all hosts the same ones.
    """
    for name in VISIBLE.values():
        if name in dict(spec.env):
            raise UsageError(
                f"--env {name}: a rehearsal gives each host devices of its own; set {name} for msrun itself"
            )
    hosts = sorted((*spec.host_entries, *spec.spares), key=lambda entry: ipaddress.ip_address(entry.address))
    sizes = [1 + max(entry.device_ids) for entry in hosts]  # a device that no worker has counts, too
    facts = read_host_facts(environ)
    devices = place_devices(spec.device_target, sum(sizes), facts)
    cpus = _divide_cores(spec, facts, devices)
    login = {name: environ[name] for name in LOGIN if name in environ}
    shares, first = {}, 0
    for entry, size in zip(hosts, sizes, strict=True):
        own = slice(first, first + size)
        visible = {VISIBLE[devices.target]: ",".join(devices.physical[own])} if devices.target in VISIBLE else {}
        shares[entry] = HostShare({**login, **visible}, tuple(sorted({cpu for each in cpus[own] for cpu in each})))
        first += size
    return shares


def _divide_cores(spec: LaunchSpec, facts: HostFacts, devices: DevicePlacement) -> list[tuple[int, ...]]:
    """Return the processors that go with each device; empty where hosts share them.

    A dict of --bind_core names processors of the machine, which every host then has to have.
    """
    topology = facts.known_topology()
    is_named = spec.bind_core is not None and not spec.bind_core.is_auto
    if is_named or len(topology.cores()) < len(devices.physical):
        return [()] * len(devices.physical)
    bound = bind_workers(topology, devices.physical, target=devices.target, core=CoreBinding(), numa=False)
    return [worker.cpus for worker in bound.workers]


def check_addresses(entries: tuple[HostEntry, ...]) -> None:
    """Listen at the address of each host, and connect to it.

    Raises:
        ClusterError: this system answers at 127.0.0.1 alone, as macOS does.
    """
    for entry in entries:
        try:
            with contextlib.closing(socket.create_server((entry.address, 0))) as listener:
                socket.create_connection(listener.getsockname(), REACH_S).close()
        except OSError as error:
            reason = error.strerror or str(error) or os.strerror(error.errno or 0)
            raise ClusterError(
                f"{entry.source}: {entry.name} is to be at {entry.address}, which does not answer here ({reason}); add "
                "it to the loopback interface (Linux has all of 127.0.0.0/8 there)"
            ) from None
