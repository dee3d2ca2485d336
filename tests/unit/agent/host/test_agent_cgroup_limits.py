"""Limits of control groups, read from trees of files that look like those of real systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrun.agent.host.cgroups import CgroupLimits, read_cgroup_limits

V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


def grow(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


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


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    assert v2(tmp_path, "/", {"cpu.max": "50000 100000\n", "cpuset.cpus.effective": "2-3\n"}).quota_cores == 0.5


@pytest.mark.parametrize("path", ["/../other", "/docker/1f"])
def test_a_group_that_is_not_mounted_here_leaves_the_mount_point(tmp_path: Path, path: str) -> None:
    assert v2(tmp_path, path, {"cpu.max": "50000 100000\n"}).quota_cores == 0.5


def test_a_mount_may_show_a_part_of_the_tree(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("0:26 / ", "0:26 /docker ")
    assert v2(tmp_path, "/docker/1f", {"1f/cpu.max": "50000 100000\n"}, mount).quota_cores == 0.5


def test_blanks_in_the_mount_point(tmp_path: Path) -> None:
    grow(tmp_path, {"proc/self/cgroup": "0::/\n", "my groups/cpu.max": "100000 50000\n"})
    grow(tmp_path, {"proc/self/mountinfo": V2_MOUNT.replace("/sys/fs/cgroup", r"/my\040groups")})
    assert read_cgroup_limits(tmp_path).quota_cores == 2.0


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


def test_version_1_without_limits_and_on_an_old_kernel(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpuset/cpuset.cpus": "0-1\n",
    }
    assert v1(tmp_path, files, "/", "/") == CgroupLimits(None, (0, 1))


def test_both_versions_at_once(tmp_path: Path) -> None:
    unified = V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    grow(tmp_path, {"proc/self/cgroup": "2:cpuset:/\n1:cpu,cpuacct:/job\n0::/job\n"})
    grow(tmp_path, {"proc/self/mountinfo": V1_MOUNTS + unified})
    grow(tmp_path / "sys/fs/cgroup/cpu,cpuacct/job", {"cpu.cfs_quota_us": "30000\n", "cpu.cfs_period_us": "10000\n"})
    grow(tmp_path / "sys/fs/cgroup/unified/job", {"cgroup.procs": ""})
    grow(tmp_path / "sys/fs/cgroup/cpuset", {"cpuset.cpus": "5\n"})
    assert read_cgroup_limits(tmp_path) == CgroupLimits(3.0, (5,))


def test_nothing_to_read_is_no_limit(tmp_path: Path) -> None:
    assert read_cgroup_limits(tmp_path) == CgroupLimits(None, None)


def test_limits_of_this_host_can_be_read() -> None:
    limits = read_cgroup_limits()
    assert limits.quota_cores is None or limits.quota_cores > 0
