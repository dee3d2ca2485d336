"""What Linux offers to keep hold of processes: death signals, adoption of orphans, the process table, limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from msrun import contract


class ProcessStat(NamedTuple):
    """One process at one moment."""

    pid: int
    state: str
    """One letter: R, S, D, T (stopped by a signal), t (by a debugger), Z (has ended), ..."""
    parent: int
    session: int
    flags: int
    """PF_* of linux/sched.h."""
    cpu_ticks: int
    """Of all its threads, in clock ticks."""
    started_at: int
    """In clock ticks since the machine was started."""
    resident_pages: int
    environment: tuple[int, int]
    """Where its first environment begins and ends in its memory; 0 where this process may not know."""


def read_stat(pid: int | str) -> ProcessStat | None:
    """Return what is said of a process; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - for thousands of processes
            number, _, rest = file.read().partition(b" ")
    except OSError:
        return None
    fields = rest.rpartition(b")")[2].split()  # the command's name may hold blanks and brackets; from field 3 on
    if len(fields) < 49:  # it ended while it was read
        return None
    return ProcessStat(
        pid=int(number),
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        flags=int(fields[6]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started_at=int(fields[19]),
        resident_pages=int(fields[21]),
        environment=(int(fields[47]), int(fields[48])),
    )


def read_all_stats() -> Iterator[ProcessStat]:
    """Yield every process that can be seen."""
    for entry in os.listdir("/proc"):  # noqa: PTH208 - one call, no Path object per process
        if entry.isdigit() and (stat := read_stat(entry)) is not None:
            yield stat


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What the living processes of one session use."""

    cpu_s: float = 0.0
    """Processor seconds since they began."""
    memory_bytes: int = 0
    """Resident memory; what forked processes share counts in each."""


def session_usage(leaders: Iterable[int]) -> dict[int, Usage]:
    """Return what each leader's session uses; nothing of one that has ended."""
    used = dict.fromkeys(leaders, Usage())
    for stat in read_all_stats():
        if (so_far := used.get(stat.session)) is not None:
            cpu_s = so_far.cpu_s + stat.cpu_ticks / _TICKS_PER_S
            used[stat.session] = Usage(cpu_s, so_far.memory_bytes + stat.resident_pages * _PAGE_BYTES)
    return used


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.01


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when its parent ends; 0 takes the wish back.

    The parent may have ended before the wish was known, so it is compared afterwards.
    """
    _prctl(PR_SET_PDEATHSIG, signum)
    if signum and os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can slip away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


class Pid(int):
    """A process id that knows when its process was started: it may stand for another process a moment later."""

    started_at: int
    """Ticks since the machine was."""

    def __new__(cls, pid: int, started_at: int) -> Pid:
        """Make one of both."""
        new = super().__new__(cls, pid)
        new.started_at = started_at
        return new


def process_table() -> dict[Pid, tuple[int, int, str]]:
    """Return pid -> (parent pid, session id, state) of every process that can be seen."""
    return {Pid(one.pid, one.started_at): (one.parent, one.session, one.state) for one in read_all_stats()}


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    stat = read_stat(pid)
    return stat is not None and stat.state in "Tt"


def handles_signal(pid: int, signum: int) -> bool:
    """Return whether a process catches or ignores a signal, which would end it else; True for one that has gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigIgn:", "SigCgt:"))]
    except OSError:
        return True
    return any(mask >> (signum - 1) & 1 for mask in masks)


def start_time(pid: int) -> int:
    """Return when a process was started, in ticks since the machine was; 0 when it is not there.

    A process id alone may stand for another process later.
    """
    stat = read_stat(pid)
    return stat.started_at if stat is not None and stat.state != "Z" else 0


def descendants(root_pid: int, strangers: Collection[int] = ()) -> list[Pid]:
    """Return every living process below `root_pid`, without zombies and without `strangers` and what is below them."""
    table = process_table()
    children: dict[int, list[Pid]] = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: list[Pid] = []
    queue: list[int] = [root_pid]
    while queue:
        for pid in children.get(queue.pop(), []):
            if pid in strangers:
                continue
            queue.append(pid)
            if table[pid][2] != "Z":
                found.append(pid)
    return found


def session_members(session_ids: Iterable[int]) -> list[Pid]:
    """Return every living process of these sessions."""
    wanted = set(session_ids)
    return [pid for pid, (_, session, state) in process_table().items() if session in wanted and state != "Z"]


def signal_processes(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each; one that has ended meanwhile is passed over, and so is who has got its id since.

    Only a child that was not waited for keeps its id for sure; of all others a `Pid` is to be given.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if isinstance(pid, Pid):
                _signal_same(pid, signum)
            else:
                os.kill(pid, signum)


def signal_groups(leaders: Iterable[int], signum: int) -> None:
    """Send a signal to the process groups of these children, as a terminal does; stopped ones go on, to act on it."""
    for pid in leaders:
        for number in (signum, signal.SIGCONT):
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # forked a moment ago, it leads no group yet
                signal_processes([pid], number)
            except PermissionError:  # it has changed its user
                continue


def _signal_same(pid: Pid, signum: int) -> None:
    """Send a signal through a descriptor, which always stands for the process that it was opened for."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):  # too many open files, or a kernel before 5.3
        if start_time(pid) == pid.started_at:
            os.kill(pid, signum)
        return
    try:
        if start_time(pid) == pid.started_at:
            signal.pidfd_send_signal(descriptor, signum)
    finally:
        os.close(descriptor)


def reap_own_children(strangers: Collection[int]) -> None:
    """Collect children that have ended, but for `strangers`: their parent's code may want their status."""
    for pid, (parent, _, state) in process_table().items():
        if parent == os.getpid() and state == "Z" and pid not in strangers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_descendants(deadline_s: float, strangers: Collection[int] = ()) -> list[int]:
    """Kill everything below this process until nothing is left; returns what survived the deadline.

    Needs `adopt_orphans`: otherwise a double fork escapes. `strangers`: children that were there before the job; they,
    and what is below them, are let alone.
    """
    end = time.monotonic() + deadline_s
    while True:
        reap_own_children(strangers)
        left: list[int] = [*descendants(os.getpid(), strangers)]
        if not left or time.monotonic() > end:
            return left
        signal_processes(left, signal.SIGKILL)
        time.sleep(POLL_S)


def signal_name(signum: int) -> str:
    """Return "SIGKILL" for 9; a number without a name stays "signal 40"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_status(wait_status: int) -> str:
    """Return how a process ended, from waitpid's status: "exit code 3" or "signal SIGKILL"."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    return name if name.startswith("signal") else f"signal {name}"


def exit_code_of(wait_status: int) -> int:
    """Return the code that msrun exits with for this worker: its own, or 128 + signal."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else contract.EXIT_SIGNAL_BASE - code


def raise_open_files() -> int:
    """Raise this process's limit to the hard one, and return what it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def set_open_files(limit: int, pid: int = 0) -> None:
    """Set the soft limit of a process, by default of this one."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
