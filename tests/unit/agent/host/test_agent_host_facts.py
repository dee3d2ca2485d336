"""What the planner is told of this host, read from trees of files that look like /dev, /proc and /sys."""

import importlib.metadata
import os
import socket
from importlib.util import find_spec

import pytest
from file_tree import grow

from msrun.agent.host.host_facts import (
    CgroupLimits,
    installed_version,
    read_cgroup_limits,
    read_gpus,
    read_host_facts,
    read_npus,
    read_topology,
)
from msrun.planning.placement.host import Cpu, Device

NAMES = ["nvidia0", "nvidia1", "davinci0", "davinci1"]


@pytest.fixture
def root(tmp_path):
    """A file system with two devices of each kind."""
    return grow(tmp_path, {f"dev/{name}": "" for name in NAMES})


@pytest.mark.parametrize(
    ("preset", "seen"),
    [(None, ("0", "1")), ("", ()), ("-1", ()), ("1", ("1",)), ("1,0", ("1", "0")), ("1,9,0", ("1",))],
)
def test_visible_devices_are_those_present_and_named(root, preset, seen):
    environ = {} if preset is None else {"CUDA_VISIBLE_DEVICES": preset, "ASCEND_RT_VISIBLE_DEVICES": preset}
    facts = read_host_facts(environ, root)
    assert (facts.gpus, facts.npus) == (seen, seen)
    assert bool(facts.gpus_reason) == bool(facts.npus_reason) == (preset in ("", "-1", "1,9,0"))


def test_numa_nodes_of_the_gpus_reach_the_topology(root):
    address = "0000:3b:00.0"
    grow(root, {f"proc/driver/nvidia/gpus/{address}/information": "Device Minor: \t 0\n"})
    grow(root, {f"sys/bus/pci/devices/{address}/numa_node": "1\n"})
    facts = read_host_facts({}, root)
    assert facts.topology is not None
    assert facts.topology.device_nodes == {"gpu": {"0": 1, "1": None}, "ascend": {"0": None, "1": None}}


def test_host_is_this_one():
    facts = read_host_facts({})
    assert (facts.name, facts.address) == (socket.gethostname(), "127.0.0.1")
    assert set(facts.cpus) == os.sched_getaffinity(0)
    assert facts.known_topology().allowed == facts.cpus
    assert (facts.has_torch, facts.mindspore_version) == (find_spec("torch") is not None, "")


INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 16
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.61.00.01
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Excluded:\t No
"""
UUIDS = ["GPU-aaaaaaaa-1111", "GPU-bbbbbbbb-2222"]


def add_gpu(root, minor, address, uuid, node):
    information = INFORMATION.format(uuid=uuid, address=address, minor=minor)
    grow(root, {f"dev/nvidia{minor}": "", f"proc/driver/nvidia/gpus/{address}/information": information})
    grow(root, {f"sys/bus/pci/devices/{address.lower()}/numa_node": f"{node}\n"})


def test_gpus_with_their_nodes_in_the_order_of_the_bus(tmp_path):
    add_gpu(tmp_path, 0, "0000:9A:00.0", UUIDS[0], "1")
    add_gpu(tmp_path, 1, "0000:3b:00.0", UUIDS[1], "0")
    assert read_gpus(tmp_path) == (Device("0", UUIDS[1], 0), Device("1", UUIDS[0], 1))


def test_gpus_that_the_driver_tells_of_but_that_are_not_here_do_not_count(tmp_path):
    add_gpu(tmp_path, 0, "0000:3b:00.0", UUIDS[0], "0")
    add_gpu(tmp_path, 1, "0000:9a:00.0", UUIDS[1], "1")
    (tmp_path / "dev/nvidia0").unlink()
    assert read_gpus(tmp_path) == (Device("0", UUIDS[1], 1),)


@pytest.mark.parametrize("uuid", ["GPU-????????-????", "", "N/A"])
def test_a_uuid_that_is_not_known_yet_is_none(tmp_path, uuid):
    add_gpu(tmp_path, 0, "0000:3b:00.0", uuid, "x")
    assert read_gpus(tmp_path) == (Device("0"),)


def test_device_files_alone_do(tmp_path):
    names = ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "davinci5", "davinci4", "davinci_manager")
    grow(tmp_path, {f"dev/{name}": "" for name in names})
    assert read_gpus(tmp_path) == (Device("0"), Device("1"))
    assert read_npus(tmp_path) == (Device("4"), Device("5"))


@pytest.mark.parametrize("package", ["click", "cryptography", "psutil"])
def test_versions_are_those_that_importlib_finds(package):
    assert installed_version(package) == importlib.metadata.version(package)


def test_first_place_on_the_path_counts_and_longer_names_are_others(tmp_path, monkeypatch):
    for folder in ("one/torchvision-9.0.dist-info", "one/torch_npu-9.1.dist-info", "two/torch-2.1.0+cpu.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "three/torch-3.0.dist-info").mkdir(parents=True)
    (tmp_path / "archive.zip").write_bytes(b"")
    names = ("gone", "archive.zip", "one", "two", "three")
    monkeypatch.setattr("sys.path", [str(tmp_path / name) for name in names])
    assert installed_version("torch") == "2.1.0+cpu"


SYSTEM = "sys/devices/system"


def cpu_files(siblings, packages, name="core_cpus_list"):
    files = {f"{SYSTEM}/cpu/cpu{n}/topology/{name}": f"{text}\n" for n, text in siblings.items()}
    return files | {f"{SYSTEM}/cpu/cpu{n}/topology/physical_package_id": f"{p}\n" for n, p in packages.items()}


@pytest.fixture
def one_node(tmp_path):
    """Four cores, one thread each."""
    files = cpu_files({n: str(n) for n in range(4)}, dict.fromkeys(range(4), 0))
    files |= {f"{SYSTEM}/cpu/online": "0-3\n", f"{SYSTEM}/node/node0/cpulist": "0-3\n"}
    files |= {f"{SYSTEM}/node/has_memory": "0\n", "proc/self/status": "Name:\tx\nMems_allowed_list:\t0\n"}
    return grow(tmp_path, files)


@pytest.fixture
def two_nodes(tmp_path):
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


def test_two_nodes_with_hyper_threads(two_nodes):
    topology = read_topology(two_nodes, affinity=range(8))
    assert topology.cpus == tuple(Cpu(n, n % 2, n % 2, n % 4) for n in range(8))
    assert [[cpu.number for cpu in core] for core in topology.cores()] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert topology.nodes() == (0, 1)
    assert topology.memory_nodes == (0, 1)


def test_offline_processors_do_not_exist(two_nodes):
    grow(two_nodes, {f"{SYSTEM}/cpu/online": "0-2,4-6\n"})
    grow(two_nodes, {f"{SYSTEM}/node/node1/cpulist": "1,5\n"})
    topology = read_topology(two_nodes, affinity=range(8))
    assert [cpu.number for cpu in topology.cpus] == [0, 1, 2, 4, 5, 6]
    assert topology.allowed == (0, 1, 2, 4, 5, 6)


def test_nothing_to_read_is_flat(tmp_path):
    topology = read_topology(tmp_path, affinity=[2, 5])
    assert topology.cpus == (Cpu(2, 0, 0, 2), Cpu(5, 0, 0, 5))
    assert (topology.allowed, topology.quota_cores, topology.memory_nodes) == ((2, 5), None, (0,))


@pytest.mark.parametrize("text", ["", "x\n", "1-\n"])
def test_files_that_make_no_sense_are_passed_over(one_node, text):
    grow(one_node, {f"{SYSTEM}/cpu/cpu1/topology/core_cpus_list": text, f"{SYSTEM}/node/node0/cpulist": text})
    grow(one_node, {f"{SYSTEM}/cpu/cpu1/topology/physical_package_id": "-1\n", "proc/self/status": text})
    topology = read_topology(one_node, affinity=range(4))
    assert topology.cpus[1] == Cpu(1, 0, 0, 1)
    assert topology.memory_nodes == (0,)


def cgroup(root, **settings):
    grow(root, {"proc/self/cgroup": "0::/job\n"})
    grow(root, {"proc/self/mountinfo": "30 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"})
    grow(root, {f"sys/fs/cgroup/job/{name}": text for name, text in settings.items()})


def test_cpuset_and_quota_of_the_cgroup_count(two_nodes):
    cgroup(two_nodes, **{"cpuset.cpus.effective": "0-1,4\n", "cpu.max": "150000 100000\n"})
    topology = read_topology(two_nodes, affinity=[0, 1, 2, 3])
    assert (topology.allowed, topology.quota_cores) == ((0, 1), 1.5)
    assert read_topology(two_nodes, affinity=[2, 3]).allowed == (2, 3), "such a set is not that of this process"
    assert read_topology(two_nodes, affinity=[9]).allowed == (9,), "nor is that of the processors"


V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


def v2(root, path, files, mount=V2_MOUNT):
    grow(root, {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mount})
    return read_cgroup_limits(grow(root / "sys/fs/cgroup", files) and root)


def v1(root, files, cpu="/job", cpuset="/job"):
    grow(root, {"proc/self/cgroup": f"3:cpuset:{cpuset}\n1:cpu,cpuacct:{cpu}\n", "proc/self/mountinfo": V1_MOUNTS})
    return read_cgroup_limits(grow(root / "sys/fs/cgroup", files) and root)


def test_version_2(tmp_path):
    files = {"a/b/cpu.max": "250000 100000\n", "a/b/cpuset.cpus.effective": "0-3\n", "a/b/cpuset.cpus": "\n"}
    assert v2(tmp_path, "/a/b", files) == CgroupLimits(2.5, (0, 1, 2, 3))


def test_a_limit_above_holds_below(tmp_path):
    files = {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n", "a/cpuset.cpus.effective": "1\n"}
    assert v2(tmp_path, "/a/b", files) == CgroupLimits(1.0, (1,))


@pytest.mark.parametrize("path", ["/../other", "/docker/1f"])
def test_a_group_that_is_not_mounted_here_leaves_the_mount_point(tmp_path, path):
    assert v2(tmp_path, path, {"cpu.max": "50000 100000\n"}).quota_cores == 0.5


def test_a_group_below_what_is_mounted_is_found_there_also_in_a_folder_with_a_blank(tmp_path):
    mount = V2_MOUNT.replace(" / /sys/fs/cgroup", r" /my\040job /sys/fs/cgroup/of\040mine")
    files = {"of mine/a/cpu.max": "200000 100000\n", "of mine/cpu.max": "300000 100000\n"}
    assert v2(tmp_path, "/my job/a", files, mount).quota_cores == 2.0


@pytest.mark.parametrize("text", ["max 100000\n", "max\n", "", "x y\n", "100000 0\n"])
def test_no_quota(tmp_path, text):
    assert v2(tmp_path, "/", {"cpu.max": text}).quota_cores is None


def test_version_1(tmp_path):
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpuset/job/cpuset.cpus": "0-7\n",
        "cpuset/job/cpuset.effective_cpus": "0,2\n",
    }
    assert v1(tmp_path, files) == CgroupLimits(1.5, (0, 2))


def test_both_versions_at_once(tmp_path):
    unified = V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    grow(tmp_path, {"proc/self/cgroup": "2:cpuset:/\n1:cpu,cpuacct:/job\n0::/job\n"})
    grow(tmp_path, {"proc/self/mountinfo": V1_MOUNTS + unified})
    grow(tmp_path / "sys/fs/cgroup/cpu,cpuacct/job", {"cpu.cfs_quota_us": "30000\n", "cpu.cfs_period_us": "10000\n"})
    grow(tmp_path / "sys/fs/cgroup/unified/job", {"cgroup.procs": ""})
    grow(tmp_path / "sys/fs/cgroup/cpuset", {"cpuset.cpus": "5\n"})
    assert read_cgroup_limits(tmp_path) == CgroupLimits(3.0, (5,))
