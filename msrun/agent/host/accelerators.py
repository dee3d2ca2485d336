"""Look for accelerators in /dev, /proc and sysfs. Opens no device and imports no vendor library."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from msrun.planning.placement.visible_devices import Device


def read_gpus(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the NVIDIA GPUs in the order of their PCI addresses, numbered as nvidia-smi does: within what is here.

    CUDA itself counts in this order with CUDA_DEVICE_ORDER=PCI_BUS_ID, and on hosts with equal GPUs by default.
    """
    minors = _device_numbers(root, "nvidia")
    told = {minor: (address, uuid) for minor, address, uuid in _nvidia_information(root) if minor in minors}
    if len(told) == len(minors):
        minors.sort(key=lambda minor: told[minor][0])
    devices = []
    for number, minor in enumerate(minors):
        address, uuid = told.get(minor, ("", ""))
        devices.append(Device(str(number), uuid, _numa_node(root, address) if address else None))
    return tuple(devices)


def read_npus(root: Path = Path("/")) -> tuple[Device, ...]:
    """Return the Ascend devices by the numbers of their device files. The kernel does not tell their NUMA nodes."""
    return tuple(Device(str(number)) for number in _device_numbers(root, "davinci"))


def _device_numbers(root: Path, stem: str) -> list[int]:
    """Return the numbers of /dev/<stem><number>, ascending."""
    pattern = re.compile(rf"{stem}(\d+)\Z")
    with contextlib.suppress(OSError):
        return sorted(int(match[1]) for entry in (root / "dev").iterdir() if (match := pattern.match(entry.name)))
    return []


def _nvidia_information(root: Path) -> list[tuple[int, str, str]]:
    """Return (device minor, PCI address, UUID) of every GPU that the driver tells of."""
    found = []
    with contextlib.suppress(OSError):
        for folder in (root / "proc/driver/nvidia/gpus").iterdir():
            with contextlib.suppress(OSError):
                text = (folder / "information").read_text(errors="replace")
                fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
                if fields.get("Device Minor", "").isdigit():
                    uuid = fields.get("GPU UUID", "")
                    uuid = uuid if re.fullmatch(r"GPU-[0-9a-fA-F-]+", uuid) else ""  # "GPU-????..." until first used
                    found.append((int(fields["Device Minor"]), folder.name.lower(), uuid))
    return found


def _numa_node(root: Path, address: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        return node if node >= 0 else None
    return None
