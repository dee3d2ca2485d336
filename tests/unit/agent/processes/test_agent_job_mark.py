"""The marks of a job's processes: what keeps them, who is found by them, and who is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from msrun import contract
from msrun.agent.processes.job_mark import NO_JOB, end_job, marked_processes
from msrun.agent.processes.process_control import read_stat, start_time

OUTER, INNER = "0123456789abcdef", "fedcba9876543210"
MARK = "import sys; from msrun.agent.processes.job_mark import mark_job; mark_job(sys.argv[1]); "
WAIT = "print(flush=True); sys.stdin.read()"
ENV = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(sys.path), "LAST": "1"}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are killed afterwards."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], *argv: str, env: dict[str, str] = ENV) -> int:
    """Return the pid of a process that has said a line."""
    process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout and process.stdout.readline() == "\n"
    return process.pid


def test_processes_of_a_job_are_known_by_their_environment(started: list[subprocess.Popen[str]]) -> None:
    pid = start(started, sys.executable, "-c", f"import sys; {WAIT}", env={contract.MSRUN_JOB_ID: OUTER})
    [found] = marked_processes(OUTER)
    assert found == pid and found.started_at == start_time(pid)
    assert marked_processes(OUTER[:-1]) == marked_processes(INNER) == []


def test_a_process_keeps_the_mark_without_the_environment(started: list[subprocess.Popen[str]]) -> None:
    empty = f"import os; os.execv('/usr/bin/env', ['env', '-i', 'setsid', sys.executable, '-c', 'import sys; {WAIT}'])"
    pid = start(started, sys.executable, "-c", MARK + empty, OUTER)
    assert marked_processes(OUTER) == [pid] and marked_processes(INNER) == []


def test_a_job_inside_a_job_has_a_mark_of_its_own_for_any_user(started: list[subprocess.Popen[str]]) -> None:
    user = "import os; os.geteuid() or os.setresuid(65534, 65534, 65534); "
    pid = start(started, sys.executable, "-c", f"{MARK}{user}mark_job(sys.argv[2]); {WAIT}", OUTER, INNER)
    assert marked_processes(INNER) == [pid] and marked_processes(OUTER) == []


def test_a_process_that_has_ended_is_not_found_whether_or_not_it_was_collected(
    started: list[subprocess.Popen[str]],
) -> None:
    pid = start(started, sys.executable, "-c", MARK + WAIT, OUTER)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    stat = read_stat(pid)
    assert stat and stat.state == "Z" and marked_processes(OUTER) == []


@pytest.mark.parametrize(("job_id", "is_written"), [(OUTER, True), ("too short", False)])
def test_processes_of_a_job_have_its_id_in_the_environment_that_proc_shows(job_id: str, is_written: bool) -> None:
    env = ENV | {contract.MSRUN_JOB_ID: NO_JOB}
    argv = [sys.executable, "-c", f"{MARK}print(open('/proc/self/environ').read())", job_id]
    shown = subprocess.run(argv, env=env, capture_output=True, check=True, text=True)
    right = env | {contract.MSRUN_JOB_ID: job_id if is_written else NO_JOB}
    assert {f"{name}={value}" for name, value in right.items()} <= {*shown.stdout.strip().split("\0")}


def test_what_is_left_of_a_job_is_killed_and_nothing_else(started: list[subprocess.Popen[str]]) -> None:
    for job in (OUTER, INNER):
        start(started, sys.executable, "-c", f"import sys; {WAIT}", env={contract.MSRUN_JOB_ID: job})
    ours, other = started
    os.kill(ours.pid, signal.SIGSTOP)
    end_job(OUTER)
    assert ours.wait(5) == -signal.SIGKILL
    assert other.poll() is None
