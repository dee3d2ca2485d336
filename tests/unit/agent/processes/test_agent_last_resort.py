"""What ends the rest of a job whose agent and fork server were killed: whom it finds, kills and waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from msrun import contract
from msrun.agent.processes import job_mark as module
from msrun.agent.processes.job_mark import LAST_WORDS_LOOKS, LOOKS, end_job, sweep_job

RUN = "import sys; print(flush=True); sys.stdin.read()"
"""Says when it runs: the kernel shows its environment and its title only from then on."""


@pytest.fixture
def of_jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A process of job f00d, and one of job beef."""
    found = {
        job: subprocess.Popen(
            [sys.executable, "-c", RUN],
            env={contract.MSRUN_JOB_ID: job},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for job in ("f00d", "beef")
    }
    for process in found.values():
        await_run(process)
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


def await_run(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout and process.stdout.readline() == b"\n"


def test_what_is_left_of_a_job_is_killed_and_nothing_else(of_jobs: dict[str, subprocess.Popen[bytes]]) -> None:
    os.kill(of_jobs["f00d"].pid, signal.SIGSTOP)
    end_job("f00d")
    assert of_jobs["f00d"].wait(5) == -signal.SIGKILL
    assert of_jobs["beef"].poll() is None


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Whom each look has killed: nobody ends by it; process 2 is the log writer."""
    found: list[list[int]] = []

    def signal_all(pids: Iterable[int], signum: int) -> None:
        assert signum == signal.SIGKILL
        found.append([int(pid) for pid in pids])

    monkeypatch.setattr(module, "signal_processes", signal_all)
    monkeypatch.setattr(module, "marked_processes", lambda _: [1, 2])
    monkeypatch.setattr(module, "_is_log_writer", lambda pid: pid == 2)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    return found


def test_log_writer_has_time_for_the_last_words_and_then_goes_too(killed: list[list[int]]) -> None:
    end_job("f00d")
    assert len(killed) == LOOKS
    assert killed[:LAST_WORDS_LOOKS] == [[1]] * LAST_WORDS_LOOKS
    assert killed[LAST_WORDS_LOOKS:] == [[1, 2]] * (LOOKS - LAST_WORDS_LOOKS)


def test_log_writer_is_known_by_its_title() -> None:
    with subprocess.Popen(
        ["msrun: log writer of a job", "-c", RUN],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        await_run(process)
        assert module._is_log_writer(process.pid)
        process.communicate()
    assert not module._is_log_writer(os.getpid())
    assert not module._is_log_writer(process.pid)


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Sweeps a job whose fork server, process 7, ends after so many looks; returns the jobs that were ended."""

    def sweep(looks: int) -> list[str]:
        parents = iter([7] * looks + [1] * 9)
        clock = iter(range(1000))
        ended: list[str] = []
        monkeypatch.setattr(module.os, "getppid", lambda: next(parents))
        monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
        monkeypatch.setattr(module.time, "sleep", lambda _: None)
        monkeypatch.setattr(module, "end_job", ended.append)
        (tmp_path / "run").mkdir()
        sweep_job(7, "f00d", str(tmp_path / "run"))
        return ended

    return sweep


def test_job_is_ended_once_its_fork_server_has_gone_and_its_folder_with_it(
    swept: Callable[[int], list[str]], tmp_path: Path
) -> None:
    assert swept(3) == ["f00d"]
    assert not (tmp_path / "run").exists()


def test_fork_server_that_still_runs_cleans_up_itself(swept: Callable[[int], list[str]], tmp_path: Path) -> None:
    assert swept(99) == []
    assert (tmp_path / "run").exists()
