"""The control group of a job: where one is made, and that nothing is made where it would change what holds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from msrun.agent.host.job_group import STALE_S, enter_group, group_members, make_group, remove_group


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with a tree of version 1 that has a controller, and one of version 2; this process is in /own."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/own\n0::/own\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "31 1 0:1 / /memory rw - cgroup cgroup rw,memory\n32 1 0:2 / /unified rw - cgroup2 cgroup2 rw\n"
    )
    for tree in ("memory", "unified"):
        (tmp_path / tree / "own" / "job").mkdir(parents=True)  # as the kernel fills a new folder
        (tmp_path / tree / "own" / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
        (tmp_path / tree / "own" / "job" / "cgroup.procs").touch()
    return tmp_path


def test_group_lies_below_the_own_one_in_a_tree_without_limits(root: Path) -> None:
    group = make_group("job", root)
    assert group == str(root / "unified/own/job")
    assert enter_group(group, 4711) and group_members(group) == [4711]


def test_group_that_is_not_the_own_one_gets_none_below_it(root: Path) -> None:
    (root / "unified/own/cgroup.procs").write_text("1\n")
    assert make_group("job", root) == ""


def test_group_that_may_hold_no_processes_is_not_used(root: Path) -> None:
    (root / "unified/own/job/cgroup.type").write_text("domain invalid\n")
    assert make_group("job", root) == ""


def test_empty_groups_of_killed_jobs_are_removed_and_no_others(root: Path) -> None:
    own = root / "unified/own"
    for name, age_s in (("msrun-old", 2 * STALE_S), ("msrun-new", 0.0), ("other", 2 * STALE_S)):
        (own / name).mkdir()
        os.utime(own / name, (time.time() - age_s,) * 2)
    assert make_group("job", root)
    assert sorted(path.name for path in own.iterdir() if path.is_dir()) == ["job", "msrun-new", "other"]


def test_without_a_group_everything_is_as_it_was(root: Path) -> None:
    (root / "proc/self/mountinfo").write_text("")
    assert make_group("job", root) == "" and group_members("") == []
    remove_group("")
    assert not enter_group(str(root / "none"), 1) and group_members(str(root / "none")) == []
