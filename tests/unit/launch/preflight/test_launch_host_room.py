"""How much of a host is left: made-up /proc and /sys trees, and limits of this very process."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from file_tree import grow

from msrun.launch.preflight.checks import (
    describe_port_owner,
    free_disk_bytes,
    free_memory_bytes,
    free_processes,
    open_file_limits,
)

HOST = {"proc/meminfo": "MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:   4000 kB\n"}
MOUNT_V2 = {"proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"}
MOUNT_V1 = {"proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory,pids\n"}
V2 = {
    **MOUNT_V2,
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": "700\n",
    "sys/fs/cgroup/jobs/memory.max": "1000000\n",
    "sys/fs/cgroup/jobs/memory.current": "900000\n",
    "sys/fs/cgroup/jobs/memory.stat": "anon 1\ninactive_file 50000\n",
}
V2_AT_ITS_TOP = {
    f"sys/fs/cgroup/memory.{name}": text for name, text in (("max", "1000"), ("current", "10"), ("stat", ""))
}
V1 = {
    **MOUNT_V1,
    "proc/self/cgroup": "5:cpu:/other\n4:memory,pids:/mine\n",
    "sys/fs/cgroup/memory/mine/memory.limit_in_bytes": "500000\n",
    "sys/fs/cgroup/memory/mine/memory.usage_in_bytes": "600000\n",
    "sys/fs/cgroup/memory/mine/memory.stat": "inactive_file 9\ntotal_inactive_file 100100\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (HOST, 4_096_000),
        ({**HOST, **V2}, 150_000),
        ({**HOST, **V1}, 100),
        ({**HOST, **MOUNT_V2, "proc/self/cgroup": "0::/../../elsewhere\nno colons"}, 4_096_000),
        ({**MOUNT_V2, "proc/self/cgroup": "0::/\n", **V2_AT_ITS_TOP}, 990),
    ],
    ids=["unknown", "host", "version 2", "version 1", "odd", "version 2 at its top"],
)
def test_free_memory_is_the_least_of_host_and_groups(tmp_path, files, free):
    assert free_memory_bytes(grow(tmp_path, files)) == free


def test_processes_of_a_group_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert free_processes(tmp_path) is None
    files = {
        **MOUNT_V2,
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/pids.max": "max",
        "sys/fs/cgroup/a/pids.current": "7",
    }
    assert free_processes(grow(tmp_path, files)) is None
    assert free_processes(grow(tmp_path, {"sys/fs/cgroup/a/pids.max": "10"})) == 3
    assert free_processes(grow(tmp_path, {"sys/fs/cgroup/a/pids.max": "5"})) == 0


def test_threads_of_the_user_count_against_the_limit(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 22, 1 << 22))
        free = free_processes(tmp_path)
        assert free is not None and free <= (1 << 22) - 2
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1, 1))
        assert free_processes(tmp_path) == 0
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert free_processes(tmp_path) is None


def test_limits_of_open_files_are_those_of_workers_and_of_msrun():
    program = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (77, 99))\n"
        "from msrun.launch.preflight.checks import open_file_limits\nprint(*open_file_limits())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "77 99\n", done.stderr
    assert open_file_limits() > (0, 0)


class Room:
    """What statvfs gives, as far as it is read."""

    def __init__(self, blocks, available, files, free_files):
        self.f_blocks, self.f_bavail, self.f_frsize = blocks, available, 4096
        self.f_files, self.f_favail = files, free_files


@pytest.mark.parametrize(
    ("room", "free"),
    [
        (Room(100, 10, 50, 5), 40960),
        (Room(100, 10, 50, 0), 0),
        (Room(100, 10, 0, 0), 40960),
        (Room(100, 0, 50, 5), 0),
        (Room(0, 0, 0, 0), None),
    ],
    ids=["room", "no file can be made", "files are not counted", "full", "not counted"],
)
def test_free_space_counts_files_too(monkeypatch, room, free):
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    assert free_disk_bytes(Path("/")) == free


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_own_port_is_found(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as taken:
        try:
            taken.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} here")
        taken.listen()
        port = taken.getsockname()[1]
        assert describe_port_owner(port).startswith(f"pid {os.getpid()} (")
    assert describe_port_owner(port) == ""


def test_command_is_shown_without_secrets_and_cut():
    program = (
        "import socket, sys\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "print(server.getsockname()[1], flush=True)\nsys.stdin.read()"
    )
    words = [sys.executable, "-c", program, "--token", "hunter2", "x" * 500]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = describe_port_owner(int(process.stdout.readline()))
        assert process.stdin is not None
        process.stdin.close()
    assert text.startswith(f"pid {process.pid} ({sys.executable} -c ")
    assert "hunter2" not in text and len(text) < 120
