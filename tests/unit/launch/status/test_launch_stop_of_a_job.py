"""The launcher that is to be ended: never another process that has got its number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from msrun.launch.status.stop import Launcher


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


def test_holder_of_the_lock_is_signalled_where_there_is_no_pidfd(process: subprocess.Popen[bytes]) -> None:
    Launcher(process.pid, None, lambda: True).signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_process_that_no_longer_holds_the_lock_is_let_alone(process: subprocess.Popen[bytes]) -> None:
    Launcher(process.pid, None, lambda: False).signal(signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)


def test_one_that_has_ended_is_passed_over(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(30)
    Launcher(process.pid, None, lambda: True).signal(signal.SIGKILL)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_wait_ends_with_the_launcher_or_with_the_time(process: subprocess.Popen[bytes], has_pidfd: bool) -> None:
    descriptor = os.pidfd_open(process.pid) if has_pidfd else None
    launcher = Launcher(process.pid, descriptor, lambda: process.poll() is None)
    assert not launcher.wait(0.05)
    launcher.signal(signal.SIGKILL)
    assert launcher.wait(30)
    launcher.close()
    launcher.close()
