"""The process table, statuses, sessions and descendants, and the order in which children end, on real processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runner import REPOSITORY, is_alive, wait_until

from msrun.agent.processes import process_control
from msrun.agent.processes.process_control import describe_status, exit_code_of, read_all_stats, read_stat


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A process that leads a session, and its child."""
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    text = wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "the child")
    yield process.pid, int(text)
    process_control.signal_processes([process.pid, int(text)], signal.SIGKILL)
    process.wait()


def test_descendants_and_session_members_are_found(family: tuple[int, int]) -> None:
    parent, child = family
    assert process_control.descendants(parent) == [child]
    assert set(process_control.descendants(os.getpid())) >= {parent, child}
    assert sorted(process_control.session_members([parent])) == sorted(family)
    assert process_control.session_members([]) == []


def run_python(source: str) -> str:
    """Run a program in a process of its own and return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


STRANGER = """
import os, subprocess, sys, time
from msrun.agent.processes import process_control
stranger = subprocess.Popen(["sleep", "600"])
ended = subprocess.Popen(["false"])
strangers = {stranger.pid, ended.pid}
ours = subprocess.Popen(["sleep", "600"])
print(process_control.kill_descendants(10.0, strangers), stranger.poll(), ended.wait())
try:
    os.waitpid(ours.pid, 0)
except ChildProcessError:
    print("ours was collected")
stranger.kill()
stranger.wait()
"""


def test_children_that_were_there_before_are_neither_killed_nor_collected() -> None:
    assert run_python(STRANGER).splitlines() == ["[] None 1", "ours was collected"]


def test_process_that_has_got_the_id_of_another_is_not_signalled(family: tuple[int, int]) -> None:
    parent, child = family
    (known,) = process_control.descendants(parent)
    assert known == child
    process_control.signal_processes([process_control.Pid(child, known.started_at + 1)], signal.SIGKILL)
    process_control.signal_processes([process_control.Pid(child, 0)], signal.SIGKILL)
    process_control.signal_processes([known], signal.SIGSTOP)
    wait_until(lambda: process_control.is_stopped(child), "stopped")
    process_control.signal_processes([known], signal.SIGKILL)
    wait_until(lambda: not is_alive(child), "killed")
    assert process_control.start_time(child) == 0


def test_process_is_told_with_parent_session_and_environment() -> None:
    own = read_stat("self")
    assert own is not None
    assert (own.pid, own.parent, own.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert own.state == "R" and own.cpu_ticks > 0 and own.resident_pages > 0
    begin, end = own.environment
    assert ctypes.string_at(begin, end - begin) == Path("/proc/self/environ").read_bytes()
    assert own.pid in {stat.pid for stat in read_all_stats()}


def test_name_with_blanks_and_brackets_moves_no_field() -> None:
    code = "from setproctitle import setthreadtitle as t; t(') R 1 2 (('); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: (found := read_stat(child.pid)) is not None and found.state == "T", "stopped")
        stat = read_stat(child.pid)
        assert stat is not None and (stat.parent, stat.session) == (os.getpid(), os.getsid(0))
        child.kill()


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [
        (0, "exit code 0", 0),
        (7 << 8, "exit code 7", 7),
        (255 << 8, "exit code 255", 255),
        (signal.SIGKILL, "signal SIGKILL", 137),
        (signal.SIGSEGV | 0x80, "signal SIGSEGV", 139),  # with a core dump
        (signal.SIGTERM, "signal SIGTERM", 143),
        (40, "signal 40", 168),  # a real-time signal without a name
    ],
)
def test_status_is_described_as_a_shell_counts_it(status: int, words: str, code: int) -> None:
    assert describe_status(status) == words
    assert exit_code_of(status) == code


LATE_LOOK = """
import os, signal, time
from msrun.agent.processes.process_control import process_table
from msrun.agent.processes.reaper import Reaper
reaper = Reaper()
children = []
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    if {watched}:
        reaper.watch(pid)
    children.append(pid)
open_before = len(os.listdir("/proc/self/fd"))
order = [children[place] for place in (4, 1, 5, 0, 3, 2)]
for pid in order:
    os.kill(pid, signal.SIGKILL)
    while process_table()[pid][2] != "Z":
        time.sleep(0.001)
ended = reaper.reap()
assert {{pid for pid, _, _ in ended}} == set(children), ended
assert all(status == signal.SIGKILL and peak > 0 for _, status, peak in ended), ended
print("as they ended" if [pid for pid, _, _ in ended] == order else "other", reaper.reap())
print(open_before - len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize(("watched", "words", "descriptors"), [(True, "as they ended []", 6), (False, "other []", 0)])
def test_children_come_in_the_order_of_their_ends_and_leave_no_descriptor(
    watched: bool, words: str, descriptors: int
) -> None:
    assert run_python(LATE_LOOK.format(watched=watched)).splitlines() == [words, str(descriptors)]


NO_DESCRIPTOR_LEFT = """
import os, resource, time
from msrun.agent.processes.reaper import Reaper
reaper = Reaper()
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
pid = os.fork()
if pid == 0:
    os._exit(3)
reaper.watch(pid)
while not (ended := reaper.reap()):
    time.sleep(0.001)
print(os.waitstatus_to_exitcode(ended[0][1]))
"""


def test_child_is_collected_when_there_is_no_descriptor_left_for_it() -> None:
    assert run_python(NO_DESCRIPTOR_LEFT) == "3\n"
