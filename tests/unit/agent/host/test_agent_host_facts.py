"""What the planner is told of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from msrun.agent.host.host_facts import read_host_facts

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
    [
        (None, ("0", "1")),
        ("", ()),
        ("-1", ()),
        ("1", ("1",)),
        ("1,0", ("1", "0")),
        ("1,9,0", ("1",)),
    ],
)
def test_visible_devices_are_those_present_and_named(root: Path, preset: str | None, seen: tuple[str, ...]) -> None:
    environ = {} if preset is None else {"CUDA_VISIBLE_DEVICES": preset, "ASCEND_RT_VISIBLE_DEVICES": preset}
    facts = read_host_facts(environ, root)
    assert (facts.gpus, facts.npus) == (seen, seen)
    assert bool(facts.gpus_reason) == bool(facts.npus_reason) == (preset in ("", "-1", "1,9,0"))


def test_each_kind_has_its_own_variable(root: Path) -> None:
    facts = read_host_facts({"CUDA_VISIBLE_DEVICES": "GPU-8a,GPU-9b", "ASCEND_RT_VISIBLE_DEVICES": "1"}, root)
    assert (facts.gpus, facts.npus) == (("GPU-8a", "GPU-9b"), ("1",))


def test_devices_that_are_not_there_are_not_seen(tmp_path: Path) -> None:
    facts = read_host_facts({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path)
    assert (facts.gpus, facts.npus, facts.gpus_reason) == ((), (), "")


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
