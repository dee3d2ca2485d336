"""CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES: which devices a process sees, by the vendors' own rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
ASCEND_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"

_LEADING_NUMBER = re.compile(r"\s*[+]?(\d+)")


@dataclass(frozen=True)
class Device:
    """One accelerator of the host."""

    number: str
    """Physical number, as nvidia-smi or npu-smi shows it."""
    uuid: str = ""
    """"GPU-..." when known."""
    node: int | None = None
    """NUMA node; None when not known."""


@dataclass(frozen=True)
class VisibleDevices:
    """What a process sees of the host's accelerators."""

    names: tuple[str, ...]
    """Physical numbers in the order in which the process counts them; a name where the number is not known."""
    reason: str = ""
    """Why fewer are visible than the variable names or the host has, in words."""


def visible_cuda(preset: str | None, present: Sequence[Device]) -> VisibleDevices:
    """Apply CUDA_VISIBLE_DEVICES.

    The rules (CUDA C++ Programming Guide, environment variables; MIG User Guide, device enumeration; for repeats and
    mixed forms what `torch.cuda` documents of the driver): indexes or UUIDs, which may be abbreviated while they stay
    unique; the first entry that is invalid hides itself and all after it; one entry twice hides everything; a process
    sees a single MIG device.
    """
    if preset is None or not present:
        return VisibleDevices(tuple(device.number for device in present))
    shown = f"{CUDA_VARIABLE}={preset}"
    names: list[str] = []
    for entry in preset.split(","):
        name = _resolve_cuda(entry, preset, present)
        if name is None:
            return VisibleDevices(tuple(names), _ended(shown, entry, preset, len(present)))
        if name in names:
            return VisibleDevices((), f"{shown}: {entry.strip()} is named twice, and CUDA then shows no device")
        names.append(name)
    if len(names) > 1 and names[0].startswith("MIG-"):
        return VisibleDevices(tuple(names[:1]), f"{shown}: CUDA shows a process one MIG device only")
    return VisibleDevices(tuple(names))


def _resolve_cuda(entry: str, preset: str, present: Sequence[Device]) -> str | None:
    """Return the physical number (or the name, when there is no telling) of an entry; None = invalid."""
    if preset.startswith("MIG-"):
        return entry if entry.startswith("MIG-") else None
    if preset.startswith("GPU-"):
        if not entry.startswith("GPU-"):
            return None
        if not all(device.uuid for device in present):
            return entry
        found = [device.number for device in present if device.uuid.lower().startswith(entry.strip().lower())]
        return found[0] if len(found) == 1 else None
    match = _LEADING_NUMBER.match(entry)  # the driver reads numbers as strtoul does
    index = int(match[1]) if match else len(present)
    return present[index].number if index < len(present) else None


def visible_ascend(preset: str | None, present: Sequence[Device]) -> VisibleDevices:
    """Apply ASCEND_RT_VISIBLE_DEVICES.

    The rule (CANN environment variable reference): logical device numbers between commas and nothing else; what is
    invalid, a blank included, hides itself and all after it.
    """
    if preset is None or not present:
        return VisibleDevices(tuple(device.number for device in present))
    names: list[str] = []
    for entry in preset.split(","):
        index = int(entry) if re.fullmatch(r"[0-9]+", entry) else len(present)
        if index >= len(present) or present[index].number in names:
            return VisibleDevices(tuple(names), _ended(f"{ASCEND_VARIABLE}={preset}", entry, preset, len(present)))
        names.append(present[index].number)
    return VisibleDevices(tuple(names))


def _ended(shown: str, entry: str, preset: str, count: int) -> str:
    if not preset:
        return f"{shown.rstrip('=')} is empty"
    return f"{shown}: {entry!r} is none of the host's {count} devices or not allowed there, and hides all from it on"
