"""Processors of a host and limits of its control groups, read from trees of files that look like /proc and /sys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from msrun.agent.host.cgroups import CgroupLimits, read_cgroup_limits
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


def test_two_nodes_with_hyper_threads(two_nodes: Path) -> None:
    topology = read_topology(two_nodes, affinity=range(8))
    assert topology.cpus == tuple(Cpu(n, n % 2, n % 2, n % 4) for n in range(8))
    assert [[cpu.number for cpu in core] for core in topology.cores()] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert topology.nodes() == (0, 1)
    assert topology.memory_nodes == (0, 1)


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


V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


def v2(root: Path, path: str, files: dict[str, str], mount: str = V2_MOUNT) -> CgroupLimits:
    grow(root, {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mount})
    return read_cgroup_limits(grow(root / "sys/fs/cgroup", files) and root)


def v1(root: Path, files: dict[str, str], cpu: str = "/job", cpuset: str = "/job") -> CgroupLimits:
    grow(root, {"proc/self/cgroup": f"3:cpuset:{cpuset}\n1:cpu,cpuacct:{cpu}\n", "proc/self/mountinfo": V1_MOUNTS})
    return read_cgroup_limits(grow(root / "sys/fs/cgroup", files) and root)


def test_version_2(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "250000 100000\n", "a/b/cpuset.cpus.effective": "0-3\n", "a/b/cpuset.cpus": "\n"}
    assert v2(tmp_path, "/a/b", files) == CgroupLimits(2.5, (0, 1, 2, 3))


def test_a_limit_above_holds_below(tmp_path: Path) -> None:
    files = {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n", "a/cpuset.cpus.effective": "1\n"}
    assert v2(tmp_path, "/a/b", files) == CgroupLimits(1.0, (1,))


@pytest.mark.parametrize("path", ["/../other", "/docker/1f"])
def test_a_group_that_is_not_mounted_here_leaves_the_mount_point(tmp_path: Path, path: str) -> None:
    assert v2(tmp_path, path, {"cpu.max": "50000 100000\n"}).quota_cores == 0.5


@pytest.mark.parametrize("text", ["max 100000\n", "max\n", "", "x y\n", "100000 0\n"])
def test_no_quota(tmp_path: Path, text: str) -> None:
    assert v2(tmp_path, "/", {"cpu.max": text}).quota_cores is None


def test_version_1(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpuset/job/cpuset.cpus": "0-7\n",
        "cpuset/job/cpuset.effective_cpus": "0,2\n",
    }
    assert v1(tmp_path, files) == CgroupLimits(1.5, (0, 2))


def test_both_versions_at_once(tmp_path: Path) -> None:
    unified = V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    grow(tmp_path, {"proc/self/cgroup": "2:cpuset:/\n1:cpu,cpuacct:/job\n0::/job\n"})
    grow(tmp_path, {"proc/self/mountinfo": V1_MOUNTS + unified})
    grow(tmp_path / "sys/fs/cgroup/cpu,cpuacct/job", {"cpu.cfs_quota_us": "30000\n", "cpu.cfs_period_us": "10000\n"})
    grow(tmp_path / "sys/fs/cgroup/unified/job", {"cgroup.procs": ""})
    grow(tmp_path / "sys/fs/cgroup/cpuset", {"cpuset.cpus": "5\n"})
    assert read_cgroup_limits(tmp_path) == CgroupLimits(3.0, (5,))
