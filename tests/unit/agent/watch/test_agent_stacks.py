"""Stacks of running workers, and the kernel's view of those that cannot tell."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runner import is_alive, wait_until

from msrun.agent.watch.stacks import catches, kernel_state, request_stacks
from msrun.planning.environment import STACK_SIGNAL

TELLING = f"""
import faulthandler, time
faulthandler.register({int(STACK_SIGNAL)}, file=2, all_threads=True)
def deep_in_the_work():
    print("up", flush=True)
    time.sleep(1000)
deep_in_the_work()
"""
SILENT = "import time; print('up', flush=True); time.sleep(1000)"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker_0.log"


def start(source: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, "-c", source], stdout=file, stderr=file)
    wait_until(log.read_bytes, "worker is up")
    return process


@pytest.fixture
def telling(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start(TELLING, log)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def silent(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start(SILENT, log)
    yield process
    process.kill()
    process.wait()


def test_worker_writes_where_it_stands_below_the_headline(telling: subprocess.Popen[bytes], log: Path) -> None:
    request_stacks({telling.pid: str(log)}, "no progress for 3 s; stacks:")
    wait_until(lambda: "deep_in_the_work" in log.read_text(), "stacks are written")
    text = log.read_text()
    assert text.index("msrun: no progress for 3 s; stacks:") < text.index("deep_in_the_work")
    assert is_alive(telling.pid)


def test_stopped_worker_is_woken_to_tell(telling: subprocess.Popen[bytes], log: Path) -> None:
    telling.send_signal(signal.SIGSTOP)
    wait_until(lambda: kernel_state(telling.pid) == "stopped by a signal", "worker is stopped")
    request_stacks({telling.pid: str(log)}, "stacks:")
    wait_until(lambda: "deep_in_the_work" in log.read_text(), "stacks are written")


def test_worker_that_cannot_tell_lives_on_and_the_kernels_view_is_written(
    silent: subprocess.Popen[bytes], log: Path
) -> None:
    assert not catches(silent.pid, STACK_SIGNAL)
    request_stacks({silent.pid: str(log)}, "no progress")
    assert "cannot write its stacks; the kernel's view: sleeping" in log.read_text()
    assert is_alive(silent.pid)


def test_process_that_is_gone_is_said_to_be_gone(log: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert kernel_state(process.pid) == "gone"
    log.touch()
    request_stacks({process.pid: str(log)}, "stacks:")
    assert "gone" in log.read_text()


def test_ended_process_that_was_not_collected_is_said_to_be_so() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: kernel_state(process.pid) == "ended, not collected", "process has ended")
    process.wait()
