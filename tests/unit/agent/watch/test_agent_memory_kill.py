"""Evidence of the out-of-memory killer, from made-up kernels."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from msrun.agent.watch.evidence import MemoryKillWatch

MOUNTS = (
    "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    "31 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "32 24 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n"
)


class Kernel:
    """A folder that looks like / to the watch."""

    def __init__(self, root: Path, *, cgroup: str) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", MOUNTS)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "counter", "before", "after"),
    [
        ("0::/job\n", "sys/fs/cgroup/job/memory.events", "oom 0\noom_kill 0\n", "oom 2\noom_kill 1\n"),
        (
            "4:memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.oom_control",
            "under_oom 0\noom_kill 4\n",
            "under_oom 0\noom_kill 5\n",
        ),
    ],
)
def test_counter_of_the_cgroup_that_rises_is_evidence(
    tmp_path: Path, cgroup: str, counter: str, before: str, after: str
) -> None:
    kernel = Kernel(tmp_path, cgroup=cgroup)
    kernel.write(counter, before)
    watch = MemoryKillWatch(tmp_path)
    kernel.write(counter, after)
    assert watch.explain(77) == f"likely out of memory: the kernel's oom_kill counter rose ({tmp_path / counter})"


def test_counter_of_the_machine_that_rises_is_evidence(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, cgroup="")
    watch = MemoryKillWatch(tmp_path)
    kernel.write("proc/vmstat", "oom_kill 4\n")
    assert watch.explain(77).startswith("likely out of memory")


def test_unchanged_counters_say_that_it_was_not_the_kernel(tmp_path: Path) -> None:
    Kernel(tmp_path, cgroup="0::/job\n")
    assert MemoryKillWatch(tmp_path).explain(77).startswith("sent by somebody")


def test_without_any_counter_it_stays_a_guess(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, cgroup="")
    kernel.write("proc/vmstat", "nr_free_pages 5\n")
    assert MemoryKillWatch(tmp_path).explain(77) == "if you did not kill it, likely out of memory"


def test_kernel_log_that_names_the_process_is_quoted(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, cgroup="")
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    watch = MemoryKillWatch(tmp_path)
    now_us = int(time.monotonic() * 1e6)
    reader = os.open(tmp_path / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "dev/kmsg", os.O_WRONLY)
    try:
        text = f"3,500,{now_us},-;Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB\n"
        os.write(writer, text.encode())
        assert watch.explain(77) == (
            "out of memory: the kernel's log says 'Memory cgroup out of memory: Killed process 77 (python)'"
        )
        kernel.write("proc/vmstat", "oom_kill 3\n")
        assert watch.explain(78).startswith("sent by somebody")
    finally:
        os.close(writer)
        os.close(reader)
