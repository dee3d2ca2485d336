"""Binding a process to processors and memory, in processes that are really bound."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from msrun import contract
from msrun.agent.host.host_facts import read_topology
from msrun.agent.processes.child import MPOL_BIND, MPOL_PREFERRED, SET_MEMPOLICY

IMPORT = "from msrun.agent.processes.child import apply_binding"
REPOSITORY = Path(__file__).resolve().parents[4]
FIRST = min(os.sched_getaffinity(0))
NO_CPU = 1 + max(cpu.number for cpu in read_topology().cpus) + 1000
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236, "loongarch64": 236, "ppc64le": 260, "s390x": 268}

POLICY = f"""
import ctypes, os
def policy():
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall({GET_MEMPOLICY.get(platform.machine(), -1)}, ctypes.byref(mode), mask, 1024, None, 0):
        raise OSError(ctypes.get_errno(), "get_mempolicy")
    return mode.value, mask[0]
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may bind itself."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_processors_are_bound_and_inherited() -> None:
    done = run(
        f"import os, subprocess, sys; from msrun.agent.processes.child import apply_binding; "
        f"apply_binding('worker 0', ({FIRST},), ()); print(os.sched_getaffinity(0), flush=True); "
        "subprocess.run([sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'])"
    )
    assert done.stdout.splitlines() == [f"{{{FIRST}}}"] * 2
    assert done.stderr == ""


def test_nothing_to_bind_changes_nothing() -> None:
    done = run(
        "import os; from msrun.agent.processes.child import apply_binding; "
        "apply_binding('worker 0', (), ()); print(sorted(os.sched_getaffinity(0)))"
    )
    assert done.stdout.strip() == str(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("cpus", "text"),
    [((NO_CPU,), "Invalid argument"), ((FIRST, NO_CPU), f"only CPUs {FIRST} were allowed")],
)
def test_a_process_that_cannot_have_its_processors_ends_with_one_line(cpus: tuple[int, ...], text: str) -> None:
    done = run(f"{IMPORT}; apply_binding('worker 3', {cpus}, ()); print('went on')")
    assert (done.returncode, done.stdout) == (contract.EXIT_CLUSTER, "")
    shown = ", ".join(map(str, cpus))
    assert done.stderr == f"msrun: cannot bind worker 3 to CPUs {shown}: {text}\n"


def may_set_memory_policy() -> bool:
    """Return whether this kernel and container allow a policy at all: the default one needs no node."""
    number = SET_MEMPOLICY.get(platform.machine(), -1)
    program = f"import ctypes, sys; sys.exit(0 if ctypes.CDLL(None).syscall({number}, 0, None, 0) == 0 else 1)"
    return run(program).returncode == 0


needs_policy = pytest.mark.skipif(not may_set_memory_policy(), reason="the kernel allows no memory policy here")


@needs_policy
def test_memory_is_bound_to_the_node() -> None:
    node = read_topology().memory_nodes[0]
    done = run(f"{POLICY}\n{IMPORT}\napply_binding('worker 0', (), ({node},))\nprint(*policy())")
    assert done.stderr == ""
    assert done.stdout.split() == [str(MPOL_BIND), str(1 << node)]


@needs_policy
def test_memory_is_preferred_where_it_cannot_be_bound() -> None:
    """A kernel that refuses to bind is played by one whose first answer is lost."""
    node = read_topology().memory_nodes[0]
    done = run(
        f"{POLICY}\nfrom msrun.agent.processes import child as affinity\nreal = affinity._set_mempolicy\n"
        "def refuse(mode, nodes):\n"
        "    if mode == affinity.MPOL_BIND:\n        raise OSError(22, 'Invalid argument')\n    real(mode, nodes)\n"
        f"affinity._set_mempolicy = refuse\naffinity.bind_memory([{node}])\nprint(*policy())"
    )
    assert done.stderr == ""
    assert done.stdout.split() == [str(MPOL_PREFERRED), str(1 << node)]


def test_memory_that_cannot_be_had_is_written_down_and_the_process_goes_on() -> None:
    done = run(f"{IMPORT}; apply_binding('worker 3', (), (999,)); print('went on')")
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("msrun: cannot bind the memory of worker 3 to NUMA node 999: ")
    assert done.stderr.endswith("; going on without\n")


def test_an_unknown_machine_is_no_crash() -> None:
    done = run(
        "from msrun.agent.processes import child as affinity; affinity.SET_MEMPOLICY.clear(); "
        "affinity.apply_binding('worker 3', (), (0,)); print('went on')"
    )
    assert done.stdout == "went on\n"
    assert "set_mempolicy is not known on" in done.stderr
