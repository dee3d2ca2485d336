"""The process table, statuses, descendants, marks of a job, and the order in which children end, on real processes."""

import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from job_runner import is_alive, run_python, wait_until

from msrun import contract
from msrun.agent.processes import process_control
from msrun.agent.processes.process_control import (
    NO_JOB,
    describe_status,
    exit_code_of,
    marked_processes,
    read_all_stats,
    read_stat,
    start_time,
)


@pytest.fixture
def family(tmp_path):
    """A process that leads a session, and its child."""
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    text = wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "the child")
    yield process.pid, int(text)
    process_control.signal_processes([process.pid, int(text)], signal.SIGKILL)
    process.wait()


def test_descendants_and_session_members_are_found(family):
    parent, child = family
    assert process_control.descendants(parent) == [child]
    assert set(process_control.descendants(os.getpid())) >= {parent, child}
    assert sorted(process_control.session_members([parent])) == sorted(family)
    assert process_control.session_members([]) == []

    def is_told():
        stats = [stat for pid in family if (stat := read_stat(pid)) is not None]
        cpu_s, pages = (
            sum(stat.cpu_ticks / os.sysconf("SC_CLK_TCK") for stat in stats),
            sum(s.resident_pages for s in stats),
        )
        told = process_control.Usage(cpu_s, pages * os.sysconf("SC_PAGE_SIZE"))
        nothing = process_control.Usage()
        return cpu_s and process_control.session_usage([parent, 1 << 30]) == {parent: told, 1 << 30: nothing}

    wait_until(is_told, "the use of both, once they sleep")


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


def test_children_that_were_there_before_are_neither_killed_nor_collected():
    assert run_python(STRANGER).splitlines() == ["[] None 1", "ours was collected"]


@pytest.mark.parametrize("has_descriptor", [True, False])
def test_process_that_has_got_the_id_of_another_is_not_signalled(family, monkeypatch, has_descriptor):
    if not has_descriptor:
        monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError(errno.EMFILE, "too many")))
    parent, child = family
    (known,) = process_control.descendants(parent)
    assert known == child
    process_control.signal_processes([process_control.Pid(child, known.started_at + 1)], signal.SIGKILL)
    process_control.signal_processes([process_control.Pid(child, 0)], signal.SIGKILL)
    process_control.signal_processes([known], signal.SIGSTOP)
    wait_until(lambda: process_control.is_stopped(child), "stopped")
    if has_descriptor:
        process_control.signal_processes([known], signal.SIGKILL)
    else:
        process_control.signal_groups([child], signal.SIGKILL)  # it leads no group yet
    wait_until(lambda: not is_alive(child), "killed")
    assert process_control.start_time(child) == 0


def test_wish_to_die_with_a_parent_that_has_gone_is_met_at_once_and_an_impossible_one_refused(monkeypatch):
    monkeypatch.setattr(os, "kill", sent := mock.Mock())
    process_control.die_with_parent(os.getppid(), signal.SIGUSR1)
    assert not sent.called
    process_control.die_with_parent(1 << 23, signal.SIGUSR1)
    sent.assert_called_once_with(os.getpid(), signal.SIGUSR1)
    process_control.die_with_parent(1 << 23, 0)
    assert sent.call_count == 1 and not process_control.wait_until(lambda: False, 0.0)
    with pytest.raises(OSError, match=r"prctl\(1, 999\): Invalid argument"):
        process_control.die_with_parent(os.getppid(), 999)


def test_process_is_told_with_parent_session_and_environment():
    own = read_stat("self")
    assert own is not None
    assert (own.pid, own.parent, own.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert own.state == "R" and own.cpu_ticks > 0 and own.resident_pages > 0
    begin, end = own.environment
    assert ctypes.string_at(begin, end - begin) == Path("/proc/self/environ").read_bytes()
    assert own.pid in {stat.pid for stat in read_all_stats()}


def test_name_with_blanks_and_brackets_moves_no_field():
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
def test_status_is_described_as_a_shell_counts_it(status, words, code):
    assert describe_status(status) == words
    assert exit_code_of(status) == code


NO_DESCRIPTOR_LEFT = """
import os, resource, time
from msrun.agent.processes.process_control import Reaper
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


def test_child_is_collected_when_there_is_no_descriptor_left_for_it(monkeypatch):
    assert run_python(NO_DESCRIPTOR_LEFT) == "3\n"
    monkeypatch.setattr(select, "epoll", lambda: mock.Mock(**{"register.side_effect": OSError}))
    before = os.listdir("/proc/self/fd")
    process_control.Reaper().watch(os.getpid())
    assert os.listdir("/proc/self/fd") == before


OUTER, INNER = "0123456789abcdef", "fedcba9876543210"
MARK = "import sys; from msrun.agent.processes.process_control import mark_job; mark_job(sys.argv[1]); "
WAIT = "print(flush=True); sys.stdin.read()"
ENV = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(sys.path), "LAST": "1"}


@pytest.fixture
def started():
    """Processes that are killed afterwards."""
    found = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def start(started, *argv, env=ENV):
    """Return the pid of a process that has said a line."""
    process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout and process.stdout.readline() == "\n"
    return process.pid


def test_processes_of_a_job_are_known_by_their_environment(started):
    pid = start(started, sys.executable, "-c", f"import sys; {WAIT}", env={contract.MSRUN_JOB_ID: OUTER})
    [found] = marked_processes(OUTER)
    assert found == pid and found.started_at == start_time(pid)
    assert marked_processes(OUTER[:-1]) == marked_processes(INNER) == []


def test_a_process_keeps_the_mark_without_the_environment(started):
    empty = f"import os; os.execv('/usr/bin/env', ['env', '-i', 'setsid', sys.executable, '-c', 'import sys; {WAIT}'])"
    pid = start(started, sys.executable, "-c", MARK + empty, OUTER)
    assert marked_processes(OUTER) == [pid] and marked_processes(INNER) == []


def test_a_job_inside_a_job_has_a_mark_of_its_own_for_any_user(started):
    user = "import os; os.geteuid() or os.setresuid(65534, 65534, 65534); "
    pid = start(started, sys.executable, "-c", f"{MARK}{user}mark_job(sys.argv[2]); {WAIT}", OUTER, INNER)
    assert marked_processes(INNER) == [pid] and marked_processes(OUTER) == []


def test_a_process_that_has_ended_is_not_found_whether_or_not_it_was_collected(started):
    pid = start(started, sys.executable, "-c", MARK + WAIT, OUTER)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    stat = read_stat(pid)
    assert stat and stat.state == "Z" and marked_processes(OUTER) == []


@pytest.mark.parametrize(("job_id", "is_written"), [(OUTER, True), ("too short", False)])
def test_processes_of_a_job_have_its_id_in_the_environment_that_proc_shows(job_id, is_written):
    env = ENV | {contract.MSRUN_JOB_ID: NO_JOB}
    argv = [sys.executable, "-c", f"{MARK}print(open('/proc/self/environ').read())", job_id]
    shown = subprocess.run(argv, env=env, capture_output=True, check=True, text=True)
    right = env | {contract.MSRUN_JOB_ID: job_id if is_written else NO_JOB}
    assert {f"{name}={value}" for name, value in right.items()} <= {*shown.stdout.strip().split("\0")}


def test_what_is_left_of_a_job_is_killed_and_nothing_else_once_its_server_has_ended(started, tmp_path, monkeypatch):
    for job in (OUTER, INNER):
        start(started, sys.executable, "-c", f"import sys; {WAIT}", env={contract.MSRUN_JOB_ID: job})
    ours, other = started
    os.kill(ours.pid, signal.SIGSTOP)
    monkeypatch.setattr(process_control, "SERVER_END_S", 0.0)
    process_control.sweep_job(os.getppid(), OUTER, str(tmp_path))
    assert ours.poll() is None and tmp_path.is_dir(), "that cleans up itself"
    process_control.sweep_job(1 << 23, OUTER, str(tmp_path))
    assert ours.wait(5) == -signal.SIGKILL and not tmp_path.exists()
    assert other.poll() is None


def test_signal_is_handled_by_who_catches_or_ignores_it_and_by_who_has_gone():
    handled = [process_control.handles_signal(os.getpid(), signum) for signum in (signal.SIGUSR2, signal.SIGPIPE)]
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert process_control.handles_signal(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert handled == [False, True]  # Python ignores SIGPIPE
    assert process_control.handles_signal(1 << 30, signal.SIGUSR2)


@pytest.mark.parametrize("of_another", [False, True])
def test_limit_of_open_files_is_raised_and_set(of_another):
    said = """
import os, resource, sys
from msrun.agent.processes.process_control import raise_open_files, set_open_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
set_open_files(100, *([os.getpid()] if sys.argv[1:] else []))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, hard)
assert raise_open_files() == 100
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", said, *(["other"] if of_another else [])], check=True)
