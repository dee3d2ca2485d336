"""What Linux offers to keep hold of processes: death signals, adoption of orphans, the process table, marks, limits.

Processes are known as those of a job, whoever their parents are, by MSRUN_JOB_ID in the environment that /proc shows,
and, also with an empty environment, by a lowered hard limit, which stays with them. RLIMIT_LOCKS bounds nothing since
Linux 2.4.25, so it can hold a number of ours. Source: getrlimit(2), proc(5)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import select
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from msrun import contract
from msrun.planning.record import Record


class ProcessStat(NamedTuple):
    """One process at one moment."""

    pid: int
    state: str  # one letter: R, S, D, T (stopped by a signal), t (by a debugger), Z (has ended), ...
    parent: int
    session: int
    cpu_ticks: int  # of all its threads, in clock ticks
    started_at: int  # in clock ticks since the machine was started
    resident_pages: int
    environment: tuple[int, int]  # where its first environment begins and ends in memory; 0: not known

    @property
    def is_alive(self) -> bool:
        return self.state != "Z"

    @property
    def id(self) -> Pid:
        return Pid(self.pid, self.started_at)


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
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started_at=int(fields[19]),
        resident_pages=int(fields[21]),
        environment=(int(fields[47]), int(fields[48])),
    )


def read_all_stats() -> Iterator[ProcessStat]:
    for entry in os.listdir("/proc"):  # noqa: PTH208 - one call, no Path object per process
        if entry.isdigit() and (stat := read_stat(entry)) is not None:
            yield stat


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage(Record):
    """What the living processes of one session use."""

    cpu_s: float = 0.0  # processor seconds since they began
    memory_bytes: int = 0  # resident memory; what forked processes share counts in each


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


def wait_until(has_come: Callable[[], bool], limit_s: float) -> bool:
    """Look again and again whether something has come about; False when it has not within the limit."""
    end = time.monotonic() + limit_s
    while not has_come():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent ends, or has ended; 0 takes the wish back."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if signum and os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can slip away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


class Pid(int):
    """A process id that knows when its process was started: it may stand for another process a moment later."""

    started_at: int  # ticks since the machine was

    def __new__(cls, pid: int, started_at: int) -> Pid:
        new = super().__new__(cls, pid)
        new.started_at = started_at
        return new


def is_stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state in "Tt"


def catches(pid: int, signum: int, masks: tuple[str, ...] = ("SigCgt:",)) -> bool | None:
    """Return whether a signal is in one of these masks of a process (proc(5)); None for one that has gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            found = [int(line.split()[1], 16) for line in file if line.startswith(masks)]
    except OSError:
        return None
    return any(mask >> (signum - 1) & 1 for mask in found)


def handles_signal(pid: int, signum: int) -> bool:
    """Return whether a process catches or ignores a signal, which would end it else; True for one that has gone."""
    return catches(pid, signum, ("SigIgn:", "SigCgt:")) is not False


def start_time(pid: int) -> int:
    """Return when a process was started, in ticks since the machine was; 0 when it is not there."""
    stat = read_stat(pid)
    return stat.started_at if stat is not None and stat.is_alive else 0


def descendants(root_pid: int, strangers: Collection[int] = ()) -> list[Pid]:
    """Return every living process below `root_pid`, without zombies and without `strangers` and what is below them."""
    children: dict[int, list[ProcessStat]] = {}
    for stat in read_all_stats():
        children.setdefault(stat.parent, []).append(stat)
    found: list[Pid] = []
    queue: list[int] = [root_pid]
    while queue:
        below = [stat for stat in children.get(queue.pop(), []) if stat.pid not in strangers]
        queue += [stat.pid for stat in below]
        found += [stat.id for stat in below if stat.is_alive]
    return found


def session_members(session_ids: Iterable[int]) -> list[Pid]:
    wanted = set(session_ids)
    return [stat.id for stat in read_all_stats() if stat.session in wanted and stat.is_alive]


def signal_processes(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each that is still there; of all but children that were not waited for a `Pid` is given."""
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
                pass


def _signal_same(pid: Pid, signum: int) -> None:
    """Send a signal through a descriptor, which always stands for the process that it was opened for."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):  # it has gone, there are too many open files, or a kernel before 5.3
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
    for stat in read_all_stats():
        if stat.parent == os.getpid() and not stat.is_alive and stat.pid not in strangers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(stat.pid, os.WNOHANG)


def kill_descendants(deadline_s: float, strangers: Collection[int] = ()) -> list[int]:
    """Kill everything below this process until nothing is left; returns what survived the deadline. Needs
    `adopt_orphans`: otherwise a double fork escapes. `strangers`: children that were there before the job; they, and
    what is below them, are let alone."""
    end = time.monotonic() + deadline_s
    while True:
        left: list[int] = [*descendants(os.getpid(), strangers)]
        reap_own_children(strangers)  # who ends between the two is still in `left`: there is another look
        if not left or time.monotonic() > end:
            return left
        signal_processes(left, signal.SIGKILL)
        time.sleep(POLL_S)


Ended = tuple[int, int, float]  # process id, wait status as waitpid gives it, peak memory in bytes


class Reaper:
    """Collects the children of one process that have ended, in the order in which they ended. Owned by the fork server.
    waitpid(-1) hands them out as they were forked, and the one that the others died of would not be first. An epoll of
    pidfds keeps the order: one enters its ready list at the child's end (pidfd_open(2); fs/eventpoll.c appends)."""

    def __init__(self) -> None:
        self._deaths = select.epoll()
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._pidfds: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Remember when this child ends. Without a descriptor for it (too many) it comes after the others."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # Python built for a kernel before 5.3 has no pidfd_open
            return
        try:
            self._deaths.register(pidfd, select.EPOLLIN)
        except OSError:  # the user's share of watches is used up
            os.close(pidfd)
            return
        self._children[pidfd] = pid
        self._pidfds[pid] = pidfd

    def reap(self) -> list[Ended]:
        order = {}
        if self._children:
            events = self._deaths.poll(0, len(self._children))
            order = {self._children[pidfd]: place for place, (pidfd, _) in enumerate(events)}
        ended = collect()
        for pid, _, _ in ended:
            self._forget(pid)
        return sorted(ended, key=lambda end: order.get(end[0], len(order)))

    def close(self) -> None:
        self._deaths.close()

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            self._deaths.unregister(pidfd)  # a child forked this instant may still hold a copy
            os.close(pidfd)
            del self._children[pidfd]


def collect() -> list[Ended]:
    """Collect every child that has ended, in the order in which they were forked."""
    ended: list[Ended] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status, usage.ru_maxrss * 1024.0))


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


NO_JOB = "0" * 16  # stands in the environment of a process that has no job yet, in the place of the id: as long as one
RLIMIT_LOCKS = 10  # Not among the names of `resource`. Source: asm-generic/resource.h.
_SHOWN_LIMIT = rb"(?m)^Max file locks +\S+ +(\d+) "  # the hard limit, as everybody may read it
_DIGEST_BITS = 48


def mark_job(job_id: str) -> None:
    """Make this process, and all that it will start, processes of a job, in the environment that /proc shows, too."""
    stat = read_stat("self")
    assert stat is not None, "this process has gone"
    start, end = stat.environment
    mark = f"{contract.MSRUN_JOB_ID}=".encode()
    offset = (b"\0" + ctypes.string_at(start, end - start)).find(b"\0" + mark + NO_JOB.encode() + b"\0")
    if offset >= 0 and len(job_id) == len(NO_JOB):
        ctypes.memmove(start + offset + len(mark), job_id.encode(), len(job_id))
    _, hard = resource.getrlimit(RLIMIT_LOCKS)
    ceiling = 1 << 62 if hard == resource.RLIM_INFINITY else hard
    limit = ((ceiling >> _DIGEST_BITS) - 1 << _DIGEST_BITS) + _digest(job_id)  # below that of a job around this one
    with contextlib.suppress(OSError, ValueError):  # no such limit here, or a user's own that leaves no room
        resource.setrlimit(RLIMIT_LOCKS, (limit, limit))


def marked_processes(job_id: str) -> list[Pid]:
    return [s.id for s in read_all_stats() if s.is_alive and s.pid != os.getpid() and _is_marked(s.pid, job_id)]


def _is_marked(pid: int, job_id: str) -> bool:
    """Return whether a process is one of the job's; False where it is not to be looked at."""
    with contextlib.suppress(OSError):
        limit = re.search(_SHOWN_LIMIT, Path("/proc", str(pid), "limits").read_bytes())
        if limit and int(limit[1]) % (1 << _DIGEST_BITS) == _digest(job_id):
            return True
        shown = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        return f"{contract.MSRUN_JOB_ID}={job_id}".encode() in shown
    return False


def _digest(job_id: str) -> int:
    import hashlib  # loads OpenSSL

    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=_DIGEST_BITS // 8).digest())


SERVER_END_S = 5.0  # how long a fork server that still runs is trusted to clean up: it ends this process too
LOOKS = 300
"""How often what is left is killed; counted, not timed: on a busy machine the looks are slow, and so is what they wait
for. At least 3 s."""


def sweep_job(server_pid: int, job_id: str, run_dir: str) -> None:
    """Wait for the fork server's end, then kill what is left of the job and remove its temporary folder."""
    if wait_until(lambda: os.getppid() != server_pid, SERVER_END_S):
        end_job(job_id)
        shutil.rmtree(run_dir, ignore_errors=True)


def end_job(job_id: str) -> None:
    """Kill every process of a job but this one."""
    for _ in range(LOOKS):
        left = marked_processes(job_id)
        if not left:
            return
        signal_processes(left, signal.SIGKILL)
        time.sleep(POLL_S)
