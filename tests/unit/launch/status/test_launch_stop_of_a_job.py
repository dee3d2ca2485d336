"""The launcher that is to be ended: never another process that has got its number."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from msrun.launch.status import stop
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


def held_by(pids: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each look at the lock find the next of these processes; the last one stays."""
    monkeypatch.setattr(
        stop, "read_lock", lambda _: SimpleNamespace(holder_pid=pids.pop(0) if len(pids) > 1 else pids[0], record=None)
    )


def test_launcher_that_holds_the_lock_is_opened(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_by([process.pid], monkeypatch)
    launcher = stop._open_launcher(Path("/logs"))
    assert launcher is not None
    process.kill()
    assert launcher.wait(30)
    launcher.close()


@pytest.mark.parametrize("pids", [[None], [os.getpid(), None]])
def test_lock_that_nobody_holds_any_more_has_no_launcher(
    pids: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = os.listdir("/proc/self/fd")
    held_by(pids, monkeypatch)
    assert stop._open_launcher(Path("/logs")) is None
    assert os.listdir("/proc/self/fd") == descriptors


def test_kernel_without_pidfd_is_no_hindrance_and_another_error_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    held_by([os.getpid()], monkeypatch)

    def fail(error: int) -> None:
        def open_pidfd(pid: int) -> int:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(stop, "HAS_PIDFD", True)
        monkeypatch.setattr(os, "pidfd_open", open_pidfd, raising=False)

    fail(errno.ESRCH)
    assert stop._open_launcher(Path("/logs")) is None
    fail(errno.ENOSYS)
    launcher = stop._open_launcher(Path("/logs"))
    assert launcher is not None and not launcher.wait(0.0)
    fail(errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        stop._open_launcher(Path("/logs"))
