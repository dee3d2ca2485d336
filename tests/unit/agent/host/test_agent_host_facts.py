"""What the planner is told of this host: accelerators, visible devices and versions of packages."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from pathlib import Path

import pytest

from msrun.agent.host.host_facts import installed_version, read_gpus, read_host_facts, read_npus
from msrun.planning.placement.host import Device

NAMES = ["nvidia0", "nvidia1", "davinci0", "davinci1"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with two devices of each kind."""
    (tmp_path / "dev").mkdir()
    for name in NAMES:
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("preset", "seen"),
    [(None, ("0", "1")), ("", ()), ("-1", ()), ("1", ("1",)), ("1,0", ("1", "0")), ("1,9,0", ("1",))],
)
def test_visible_devices_are_those_present_and_named(root: Path, preset: str | None, seen: tuple[str, ...]) -> None:
    environ = {} if preset is None else {"CUDA_VISIBLE_DEVICES": preset, "ASCEND_RT_VISIBLE_DEVICES": preset}
    facts = read_host_facts(environ, root)
    assert (facts.gpus, facts.npus) == (seen, seen)
    assert bool(facts.gpus_reason) == bool(facts.npus_reason) == (preset in ("", "-1", "1,9,0"))


def test_numa_nodes_of_the_gpus_reach_the_topology(root: Path) -> None:
    folder = root / "proc/driver/nvidia/gpus/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Device Minor: \t 0\n")
    pci = root / "sys/bus/pci/devices/0000:3b:00.0"
    pci.mkdir(parents=True)
    (pci / "numa_node").write_text("1\n")
    facts = read_host_facts({}, root)
    assert facts.topology is not None
    assert facts.topology.device_nodes == {"gpu": {"0": 1, "1": None}, "ascend": {"0": None, "1": None}}


def test_host_is_this_one() -> None:
    facts = read_host_facts({})
    assert (facts.name, facts.address) == (socket.gethostname(), "127.0.0.1")
    assert set(facts.cpus) == os.sched_getaffinity(0)
    assert facts.known_topology().allowed == facts.cpus


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


@pytest.mark.parametrize("package", ["torch", "numpy", "psutil"])
def test_versions_are_those_that_importlib_finds(package: str) -> None:
    assert installed_version(package) == importlib.metadata.version(package)


def test_first_place_on_the_path_counts_and_longer_names_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one/torchvision-9.0.dist-info", "one/torch_npu-9.1.dist-info", "two/torch-2.1.0+cpu.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "three/torch-3.0.dist-info").mkdir(parents=True)
    (tmp_path / "archive.zip").write_bytes(b"")
    names = ("gone", "archive.zip", "one", "two", "three")
    monkeypatch.setattr("sys.path", [str(tmp_path / name) for name in names])
    assert installed_version("torch") == "2.1.0+cpu"
