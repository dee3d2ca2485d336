"""Evidence of limits that the shell has set: `ulimit -t` kills, `ulimit -v` makes allocations and threads fail."""

from __future__ import annotations

import os
import resource
import signal

from msrun.agent.logs.own_file import read_end

READ_BYTES = 8192
NO_MEMORY = (
    b"MemoryError",
    b"can't start new thread",
    b"Cannot allocate memory",
    b"std::bad_alloc",
    b"DefaultCPUAllocator",
)
"""What a process says last that may not have more address space."""


def explain_limit(wait_status: int, log: str) -> str:
    """Return which limit has ended a process, and what to do; empty when none is set, or nothing speaks for it.

    Args:
        log: file that holds its last words.
    """
    code = os.waitstatus_to_exitcode(wait_status)
    seconds, _ = resource.getrlimit(resource.RLIMIT_CPU)
    if seconds != resource.RLIM_INFINITY and -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"ulimit -t {seconds}: it may use {seconds} s of CPU time; raise the limit (RLIMIT_CPU)"
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    if size != resource.RLIM_INFINITY and code and any(words in _last_words(log) for words in NO_MEMORY):
        return f"ulimit -v {size >> 10}: it may have {size >> 10} KiB of address space; raise the limit (RLIMIT_AS)"
    return ""


def _last_words(log: str) -> bytes:
    return read_end(log, READ_BYTES)
