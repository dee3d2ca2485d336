"""The process table, sessions and descendants, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runner import is_alive, wait_until

from msrun.agent.processes import process_control

REPOSITORY = Path(__file__).resolve().parents[4]


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


def test_table_knows_parent_session_and_state(family: tuple[int, int]) -> None:
    parent, child = family
    table = process_control.process_table()
    assert table[child][:2] == (parent, parent)
    assert table[parent][:2] == (os.getpid(), parent)
    assert table[child][2] in ("S", "R", "D")


def test_descendants_and_session_members_are_found(family: tuple[int, int]) -> None:
    parent, child = family
    assert process_control.descendants(parent) == [child]
    assert set(process_control.descendants(os.getpid())) >= {parent, child}
    assert sorted(process_control.session_members([parent])) == sorted(family)
    assert process_control.session_members([]) == []


def test_zombie_is_not_among_the_living() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    wait_until(lambda: not is_alive(process.pid), "a zombie")
    assert process.pid in process_control.process_table()
    assert process.pid not in process_control.descendants(os.getpid())
    assert process_control.session_members([process.pid]) == []
    process.wait()


def test_command_name_with_blanks_and_brackets_is_read_past(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    process = subprocess.Popen([odd, "600"])
    wait_until(lambda: b"R 1" in Path("/proc", str(process.pid), "comm").read_bytes(), "the new name")
    assert process_control.process_table()[process.pid][0] == os.getpid()
    process.kill()
    process.wait()


def test_signal_to_a_process_that_has_gone_is_passed_over() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    process_control.signal_processes([process.pid], signal.SIGTERM)


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


KILL_ALL = """
import os, subprocess, sys, time
from msrun.agent.processes import process_control
process_control.adopt_orphans()
daemon = (
    "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    "print(os.getpid(), flush=True); time.sleep(600)"
)
line = subprocess.Popen([sys.executable, "-c", daemon], stdout=subprocess.PIPE).stdout.readline()
print(line.decode().strip(), process_control.kill_descendants(10.0), process_control.descendants(os.getpid()))
"""


def test_double_forked_daemon_of_a_subreaper_is_killed() -> None:
    output = run_python(KILL_ALL)
    pid, rest = output.strip().split(" ", 1)
    assert rest == "[] []"
    assert not is_alive(int(pid))


ORPHAN = """
import os, sys, time
from msrun.agent.processes.process_control import die_with_parent
parent = os.getpid()
if os.fork() == 0:
    die_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(600)
sys.stdin.read()
os._exit(0)
"""


def test_child_dies_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        wait_until(lambda: not is_alive(child), "the child's end")


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
    output = run_python(STRANGER)
    assert output.splitlines() == ["[] None 1", "ours was collected"]


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
