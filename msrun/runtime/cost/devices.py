"""Device profiles: what one device computes, holds and sends in a second.

Peaks are those of dense matrix products, without sparsity. A step never reaches them: they rank choices.

| profile | peaks and memory | links |
| --- | --- | --- |
| ascend910a | 256 TFLOPS float16, 3 HCCS ports of 240 Gbit/s, 100 Gbit/s RoCE (Hot Chips 31, 2019, "DaVinci"; Atlas 900 data sheet); 32 GB HBM2 (Microprocessor Report, October 2019) at 1.2 TB/s (Liao et al., HPCA 2021); float32 on the vector units: 32 cores x 128 operations x 1 GHz | as left |
| ascend910b | 313 TFLOPS float16, 78 float32, 64 GB at 1.6 TB/s (Atlas 800T A2 data sheet, 910B3) | HCCS 392 GB/s both ways, half each way; 200 Gbit/s RoCE (same sheet) |
| a100 | 312 TFLOPS float16, 19.5 float32 and float64 (tensor cores), 80 GB at 2039 GB/s (NVIDIA A100 SXM data sheet, 2021) | NVLink 600 GB/s both ways; DGX A100: one 200 Gbit/s port a device |
| h100 | 989.4 TFLOPS float16, 67 float32 and float64, 80 GB at 3.35 TB/s (NVIDIA H100 SXM data sheet, 2023) | NVLink 900 GB/s both ways; DGX H100: one 400 Gbit/s port a device |
| h200 | as h100, 141 GB at 4.8 TB/s (NVIDIA H200 data sheet, 2024) | as h100 |
| cpu | one core of an AMD EPYC virtual machine: matrix products of 768 x 768, a copy of 64 MB, an addition of 4 numbers, all measured with torch 2.13 on one thread | shared memory of msrun on one host, measured with two ranks; between hosts 1 Gbit/s Ethernet |

Latencies: NCCL's for a ring with its low-latency protocol, 6.6 us and 0.6 us a hop in a host, 2.7 us between hosts
(`torch/distributed/tensor/_collective_utils.py`, after NCCL's tuning.cc); nobody publishes HCCL's, which are taken as
equal. The launch floor of accelerators is 7 us, that of torch's operators without graphs (meta-pytorch/autoparallel).
"""  # noqa: E501 - a table

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from msrun.errors import StrategyError, near_miss

GB = 10**9
Point = Sequence[float]
"""Something measured: two numbers that say how large it was, and its seconds."""


@dataclass(frozen=True)
class Link:
    """One class of links: a message of n bytes takes `alpha_s + n / bytes_per_s`, each way at the same time."""

    alpha_s: float
    """Seconds before the first byte arrives, for each step of a collective."""
    bytes_per_s: float
    """Of one device in one direction."""
    start_s: float = 0.0
    """Seconds that a collective takes before its first step."""


@dataclass(frozen=True)
class DeviceProfile:
    """What one device, and the links between devices, can do.

    Raises:
        StrategyError: a number that is not above 0 (latencies may be 0).
    """

    name: str
    peak_flops: Mapping[str, float]
    """Type without "torch.", such as "float32" -> operations in a second. Others count as float32."""
    memory_bandwidth: float
    """Bytes in a second, read and written together."""
    memory_bytes: int
    launch_s: float
    """The least that an operator takes."""
    in_host: Link
    between_hosts: Link
    to_host: Link
    """Between the memories of a device and of its host."""
    devices_per_host: int = 8
    has_streams: bool = True
    """Whether messages travel beside operators where the program only orders them one after the other."""
    overhead_s: float = 0.0
    """Added to every operator: what the caller needs to start it where nothing hides that."""
    wait_s: float = 0.0
    """Added to every collective of priced strategies: what a step waits for it beside its own seconds, because ranks
    come to it at different times and Python divides its program there. Of a dry run, which has both, it is no part."""
    fsdp_s: float = 0.0
    """Added in a dry run to every collective of torch's FSDP2: what its Python takes around it, and what ranks that
    come at different times wait, where nothing hides that."""
    operators: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    """"aten.mm.default float32" -> operations, bytes, seconds: measured, see `msrun.runtime.cost.operators`"""
    collectives: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    """operation -> ranks, bytes on each, seconds: measured inside a host"""

    def __post_init__(self) -> None:
        numbers = {"memory_bandwidth": self.memory_bandwidth, "memory_bytes": self.memory_bytes}
        numbers |= {"devices_per_host": self.devices_per_host}
        numbers |= {f"peak_flops[{name!r}]": value for name, value in self.peak_flops.items()}
        least: dict[str, float] = {"launch_s": self.launch_s, "overhead_s": self.overhead_s, "wait_s": self.wait_s}
        least |= {"fsdp_s": self.fsdp_s}
        for name, link in self.links.items():
            numbers[f"{name}.bytes_per_s"] = link.bytes_per_s
            least |= {f"{name}.alpha_s": link.alpha_s, f"{name}.start_s": link.start_s}
        for kind, table in (("operators", self.operators), ("collectives", self.collectives)):
            for name, points in table.items():
                numbers |= {f"{kind}[{name!r}] seconds": seconds for _, _, seconds in points}
        wrong = [n for n, value in numbers.items() if not value > 0] + [n for n, value in least.items() if value < 0]
        if wrong or "float32" not in self.peak_flops:
            what = f"{wrong[0]} = {(numbers | least)[wrong[0]]!r}" if wrong else "peak_flops has no float32"
            raise StrategyError(f"device profile {self.name}: {what}; give numbers above 0, and the peak of float32")

    @property
    def links(self) -> dict[str, Link]:
        """The classes of links by name."""
        return {"in_host": self.in_host, "between_hosts": self.between_hosts, "to_host": self.to_host}

    def flops(self, dtype: torch.dtype) -> float:
        """Return the operations in a second of a type."""
        name = str(dtype).removeprefix("torch.")
        return self.peak_flops.get(name, self.peak_flops["float32"])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict, that `from_json` reads."""
        return {**asdict(self), "peak_flops": dict(self.peak_flops)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> DeviceProfile:
        """Return the profile that `to_json` made, as a dict or as text.

        Raises:
            StrategyError: a field is missing or unknown, or a number out of its range.
        """
        try:
            given = dict(json.loads(value) if isinstance(value, str) else value)
            for name in ("in_host", "between_hosts", "to_host"):
                given[name] = Link(**given[name])
            return cls(**given)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            known = ", ".join(field.name for field in fields(cls))
            raise StrategyError(f"device profile: {type(error).__name__}: {error}; its fields are {known}") from None


def _links(bytes_per_s: float, network_bytes_per_s: float) -> tuple[Link, Link]:
    """Return links in a host and between hosts with NCCL's latencies."""
    return Link(0.6e-6, bytes_per_s, 6.6e-6), Link(2.7e-6, network_bytes_per_s, 6.6e-6)


_PCIE_4, _PCIE_5 = Link(10e-6, 32 * GB), Link(10e-6, 64 * GB)
"""16 lanes, each way (PCI-SIG)."""
PROFILES: Mapping[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            "ascend910a",
            {"float16": 256e12, "bfloat16": 4.1e12, "float32": 4.1e12},
            1.2e12,
            32 * 2**30,
            7e-6,
            *_links(90 * GB, 12.5 * GB),
            _PCIE_4,
        ),
        DeviceProfile(
            "ascend910b",
            {"float16": 313e12, "bfloat16": 313e12, "float32": 78e12},
            1.6e12,
            64 * 2**30,
            7e-6,
            *_links(196 * GB, 25 * GB),
            _PCIE_5,
        ),
        DeviceProfile(
            "a100",
            {"float16": 312e12, "bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
            2.039e12,
            80 * 2**30,
            7e-6,
            *_links(300 * GB, 25 * GB),
            _PCIE_4,
        ),
        DeviceProfile(
            "h100",
            {"float16": 989.4e12, "bfloat16": 989.4e12, "float32": 67e12, "float64": 67e12},
            3.35e12,
            80 * 2**30,
            7e-6,
            *_links(450 * GB, 50 * GB),
            _PCIE_5,
        ),
        DeviceProfile(
            "h200",
            {"float16": 989.4e12, "bfloat16": 989.4e12, "float32": 67e12, "float64": 67e12},
            4.8e12,
            141 * GB,
            7e-6,
            *_links(450 * GB, 50 * GB),
            _PCIE_5,
        ),
        DeviceProfile(
            "cpu",
            {"float32": 76e9, "float64": 44e9, "bfloat16": 53e9, "float16": 2.2e9},
            18.6e9,
            8 * 2**30,
            5e-6,
            in_host=Link(20e-6, 2.5 * GB, 20e-6),
            between_hosts=Link(100e-6, 0.125 * GB, 100e-6),
            to_host=Link(1e-6, 9.3 * GB),
            has_streams=False,
        ),
    )
}


def find_profile(device: str | os.PathLike[str] | DeviceProfile) -> DeviceProfile:
    """Return a profile by its name, or from a JSON file."""
    if isinstance(device, DeviceProfile):
        return device
    if isinstance(device, str) and device.lower() in PROFILES:
        return PROFILES[device.lower()]
    path = Path(device)
    if path.suffix == ".json":
        try:
            return DeviceProfile.from_json(path.read_text())
        except OSError as error:
            raise StrategyError(f"device profile {path} cannot be read: {error.strerror}; give another file") from None
    raise StrategyError(
        f"device {str(device)!r}{near_miss(str(device), PROFILES)}: must be one of {', '.join(PROFILES)}, "
        "a DeviceProfile, or a file of one that ends in .json"
    )
