"""Processors of a host, read from trees of files that look like /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from msrun.agent.host.host_facts import read_topology
from msrun.planning.placement.host import Cpu

SYSTEM = "sys/devices/system"


def grow(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cpu_files(siblings: Mapping[int, str], packages: Mapping[int, int], name: str = "core_cpus_list") -> dict[str, str]:
    files = {f"{SYSTEM}/cpu/cpu{n}/topology/{name}": f"{text}\n" for n, text in siblings.items()}
    return files | {f"{SYSTEM}/cpu/cpu{n}/topology/physical_package_id": f"{p}\n" for n, p in packages.items()}


@pytest.fixture
def one_node(tmp_path: Path) -> Path:
    """Four cores, one thread each."""
    files = cpu_files({n: str(n) for n in range(4)}, dict.fromkeys(range(4), 0))
    files |= {f"{SYSTEM}/cpu/online": "0-3\n", f"{SYSTEM}/node/node0/cpulist": "0-3\n"}
    files |= {f"{SYSTEM}/node/has_memory": "0\n", "proc/self/status": "Name:\tx\nMems_allowed_list:\t0\n"}
    return grow(tmp_path, files)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two nodes of two cores of two threads, numbered in turn as many servers do; node 2 is memory alone."""
    files = cpu_files({n: f"{n % 4},{n % 4 + 4}" for n in range(8)}, {n: n % 2 for n in range(8)})
    files |= {
        f"{SYSTEM}/cpu/online": "0-7\n",
        f"{SYSTEM}/node/node0/cpulist": "0,2,4,6\n",
        f"{SYSTEM}/node/node1/cpulist": "1,3,5,7\n",
        f"{SYSTEM}/node/node2/cpulist": "\n",
        f"{SYSTEM}/node/has_memory": "0-2\n",
        "proc/self/status": "Mems_allowed:\t7\nMems_allowed_list:\t0-1\n",
    }
    return grow(tmp_path, files)


def test_one_node(one_node: Path) -> None:
    topology = read_topology(one_node, affinity=range(4))
    assert topology.cpus == tuple(Cpu(n, 0, 0, n) for n in range(4))
    assert (topology.allowed, topology.memory_nodes, topology.quota_cores) == ((0, 1, 2, 3), (0,), None)


def test_two_nodes_with_hyper_threads(two_nodes: Path) -> None:
    topology = read_topology(two_nodes, affinity=range(8))
    assert topology.cpus == tuple(Cpu(n, n % 2, n % 2, n % 4) for n in range(8))
    assert [[cpu.number for cpu in core] for core in topology.cores()] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert topology.nodes() == (0, 1)
    assert topology.memory_nodes == (0, 1)


def test_siblings_have_an_older_name_too(tmp_path: Path) -> None:
    files = cpu_files({0: "0-1", 1: "0-1"}, {}, "thread_siblings_list") | {f"{SYSTEM}/cpu/online": "0-1\n"}
    assert read_topology(grow(tmp_path, files), affinity=[0, 1]).cpus == (Cpu(0, 0, 0, 0), Cpu(1, 0, 0, 0))


def test_affinity_is_respected(two_nodes: Path) -> None:
    topology = read_topology(two_nodes, affinity=[1, 5])
    assert topology.allowed == (1, 5)
    assert topology.nodes() == (1,)
    assert len(topology.cpus) == 8


def test_offline_processors_do_not_exist(two_nodes: Path) -> None:
    grow(two_nodes, {f"{SYSTEM}/cpu/online": "0-2,4-6\n"})
    grow(two_nodes, {f"{SYSTEM}/node/node1/cpulist": "1,5\n"})
    topology = read_topology(two_nodes, affinity=range(8))
    assert [cpu.number for cpu in topology.cpus] == [0, 1, 2, 4, 5, 6]
    assert topology.allowed == (0, 1, 2, 4, 5, 6)


def test_nothing_to_read_is_flat(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, affinity=[2, 5])
    assert topology.cpus == (Cpu(2, 0, 0, 2), Cpu(5, 0, 0, 5))
    assert (topology.allowed, topology.quota_cores, topology.memory_nodes) == ((2, 5), None, (0,))


@pytest.mark.parametrize("text", ["", "x\n", "1-\n"])
def test_files_that_make_no_sense_are_passed_over(one_node: Path, text: str) -> None:
    grow(one_node, {f"{SYSTEM}/cpu/cpu1/topology/core_cpus_list": text, f"{SYSTEM}/node/node0/cpulist": text})
    grow(one_node, {f"{SYSTEM}/cpu/cpu1/topology/physical_package_id": "-1\n", "proc/self/status": text})
    topology = read_topology(one_node, affinity=range(4))
    assert topology.cpus[1] == Cpu(1, 0, 0, 1)
    assert topology.memory_nodes == (0,)


def cgroup(root: Path, **settings: Any) -> None:
    grow(root, {"proc/self/cgroup": "0::/job\n"})
    grow(root, {"proc/self/mountinfo": "30 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"})
    grow(root, {f"sys/fs/cgroup/job/{name}": text for name, text in settings.items()})


def test_cpuset_and_quota_of_the_cgroup_count(two_nodes: Path) -> None:
    cgroup(two_nodes, **{"cpuset.cpus.effective": "0-1,4\n", "cpu.max": "150000 100000\n"})
    topology = read_topology(two_nodes, affinity=[0, 1, 2, 3])
    assert (topology.allowed, topology.quota_cores) == ((0, 1), 1.5)


def test_a_cpuset_that_leaves_nothing_is_not_ours(two_nodes: Path) -> None:
    cgroup(two_nodes, **{"cpuset.cpus.effective": "6\n"})
    assert read_topology(two_nodes, affinity=[0, 1]).allowed == (0, 1)


def test_this_host_is_read() -> None:
    topology = read_topology()
    assert set(topology.allowed) == os.sched_getaffinity(0)
    assert {cpu.number for cpu in topology.cpus} >= set(topology.allowed)
    assert topology.nodes()
