"""Bind this process to processors and memory, by the kernel's own calls."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection

from msrun import contract
from msrun.planning.ranks import fold_ranks

MPOL_PREFERRED = 1
MPOL_BIND = 2
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "loongarch64": 237, "ppc64le": 261, "s390x": 269}
"""Number of the system call by machine: no C library has a function for it without libnuma."""

_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind_cpus(cpus: Collection[int]) -> None:
    """Let this process, and what it starts, run on these processors only.

    Raises:
        OSError: the kernel does not allow it, or not all of them.
    """
    os.sched_setaffinity(0, cpus)
    allowed = os.sched_getaffinity(0)
    if allowed != set(cpus):
        raise OSError(0, f"only CPUs {fold_ranks(allowed)} were allowed")


def bind_memory(nodes: Collection[int]) -> None:
    """Let this process take new memory from these NUMA nodes: only from them, or from them first where that fails.

    The policy passes to what the process starts. See set_mempolicy(2).

    Raises:
        OSError: the kernel allows neither (in a container mostly: CAP_SYS_NICE is missing).
    """
    try:
        _set_mempolicy(MPOL_BIND, nodes)
    except OSError:
        _set_mempolicy(MPOL_PREFERRED, [min(nodes)])  # this policy knows one node only


def _set_mempolicy(mode: int, nodes: Collection[int]) -> None:
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(0, f"set_mempolicy is not known on {platform.machine()}")
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    bits = words * _WORD_BITS + 1  # the kernel reads one bit less than it is told
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, ctypes.c_ulong(bits)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def apply_binding(who: str, cpus: Collection[int], memory_nodes: Collection[int]) -> None:
    """Bind a process that was just started, whose stderr is its log; empty = leave as it is.

    Without its processors a process would take those of others: it ends with EXIT_CLUSTER. Memory from elsewhere
    is only slower: that is written down and the process goes on.
    """
    if cpus:
        try:
            bind_cpus(cpus)
        except OSError as error:
            _write_line(f"msrun: cannot bind {who} to CPUs {fold_ranks(cpus)}: {error.strerror}")
            os._exit(contract.EXIT_CLUSTER)
    if memory_nodes:
        try:
            bind_memory(memory_nodes)
        except OSError as error:
            _write_line(
                f"msrun: cannot bind the memory of {who} to NUMA node {fold_ranks(memory_nodes)}: "
                f"{error.strerror}; going on without"
            )


def _write_line(text: str) -> None:
    os.write(2, f"{text}\n".encode())
