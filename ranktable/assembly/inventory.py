"""What the sources find out about a host: the neutral input of the generator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """One accelerator (or process slot) of a host."""

    device_id: int
    """Physical number of the device on its host."""
    device_ip: str | None = None
    """Address of the device's own network port, as its source gives it; None where none is known. Never invented."""
    super_device_id: str | None = None
    """Number of the device in its super pod, a decimal of 32 bits; None where none is known."""


@dataclass(frozen=True, slots=True)
class HostInventory:
    """One host with the devices that a job is to use on it, in the order in which they are to be numbered."""

    server_id: str
    devices: tuple[FoundDevice, ...]
    host_ip: str | None = None
    """Address of the host's own network port."""
    pod_ip: str | None = None
    """Address of the pod that runs on the host."""
    super_pod_id: str | None = None
    """The super pod that the host stands in."""
    rank_index: int | None = None
    """Place of the host among the others as its scheduler says (`hccl/rankIndex`)."""
    origin: str = ""
    """Where the host was found, such as `hosts.txt:3`, for messages."""
