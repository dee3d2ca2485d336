"""Accelerators, found in trees of files that look like /dev, /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrun.agent.host.host_facts import read_gpus, read_npus
from msrun.planning.placement.host import Device

INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 16
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.61.00.01
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Excluded:\t No
"""
UUIDS = ["GPU-aaaaaaaa-1111", "GPU-bbbbbbbb-2222"]


def add_gpu(root: Path, minor: int, address: str = "", uuid: str = "", node: str | None = None) -> None:
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev" / f"nvidia{minor}").touch()
    if address:
        folder = root / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION.format(uuid=uuid, address=address, minor=minor))
    if node is not None:
        folder = root / "sys/bus/pci/devices" / address.lower()
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")


def test_gpus_with_their_nodes_in_the_order_of_the_bus(tmp_path: Path) -> None:
    add_gpu(tmp_path, 0, "0000:9A:00.0", UUIDS[0], "1")
    add_gpu(tmp_path, 1, "0000:3b:00.0", UUIDS[1], "0")
    assert read_gpus(tmp_path) == (Device("0", UUIDS[1], 0), Device("1", UUIDS[0], 1))


def test_a_container_counts_the_gpus_that_it_has(tmp_path: Path) -> None:
    add_gpu(tmp_path, 6, "0000:aa:00.0", UUIDS[1], "-1")
    add_gpu(tmp_path, 3, "0000:3b:00.0", UUIDS[0])
    assert read_gpus(tmp_path) == (Device("0", UUIDS[0], None), Device("1", UUIDS[1], None))


def test_gpus_that_the_driver_tells_of_but_that_are_not_here_do_not_count(tmp_path: Path) -> None:
    add_gpu(tmp_path, 0, "0000:3b:00.0", UUIDS[0], "0")
    add_gpu(tmp_path, 1, "0000:9a:00.0", UUIDS[1], "1")
    (tmp_path / "dev/nvidia0").unlink()
    assert read_gpus(tmp_path) == (Device("0", UUIDS[1], 1),)


@pytest.mark.parametrize("uuid", ["GPU-????????-????", "", "N/A"])
def test_a_uuid_that_is_not_known_yet_is_none(tmp_path: Path, uuid: str) -> None:
    add_gpu(tmp_path, 0, "0000:3b:00.0", uuid, "x")
    assert read_gpus(tmp_path) == (Device("0"),)


def test_device_files_alone_do(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "davinci5", "davinci4", "davinci_manager"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert read_gpus(tmp_path) == (Device("0"), Device("1"))
    assert read_npus(tmp_path) == (Device("4"), Device("5"))


def test_a_host_without_accelerators(tmp_path: Path) -> None:
    assert read_gpus(tmp_path) == read_npus(tmp_path) == ()
