"""--signals: what is passed on reaches every worker, nobody else, and does not end the job."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, wait_until

from msrun.agent.processes import process_control

USERS = ("SIGUSR1", "SIGUSR2")


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
@pytest.mark.parametrize(
    ("options", "name"),
    one_fast((("--signals", "sigwinch,usr1"), "SIGWINCH"), (("--signals=USR2",), "SIGUSR2"), *(((), n) for n in USERS)),
)
def test_signal_reaches_every_worker_and_the_job_goes_on(
    msrun: JobRunner, workers: Path, tmp_path: Path, options: tuple[str, ...], name: str, method: str
) -> None:
    job = msrun.start("--worker_num=2", f"--start_method={method}", *options, workers / "note_signals.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    job.send(getattr(signal, name))
    logs = [tmp_path / "log_output" / f"worker_{rank}.log" for rank in range(2)]
    wait_until(lambda: all(log.read_text() == f"{name}\n" for log in logs), "both workers have noted it")
    (tmp_path / "end").touch()
    finished = job.finish()
    assert finished.code == 0, finished.stderr
    assert finished.log(0).decode().endswith("child lives\n")
    assert f"msrun: signal {name} passed on to 2 workers" in finished.stderr
    (event,) = [event for event in finished.events if event["event"] == "signal"]
    assert (event["name"], event["global_ranks"]) == (name, [0, 1])


def test_worker_that_does_not_handle_it_dies_and_is_the_first_failure(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    job = msrun.start("--worker_num=2", workers / "wait.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    job.send(signal.SIGUSR1)
    finished = job.finish()
    assert finished.code == 128 + signal.SIGUSR1
    assert "failed first: signal SIGUSR1" in finished.errors[0]


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_signal_at_the_start_waits_for_the_handlers_of_the_workers(
    msrun: JobRunner, workers: Path, tmp_path: Path, method: str
) -> None:
    (tmp_path / "w.py").write_text(
        "import signal, sys, threading\n"
        "came = threading.Event()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: came.set())\n"
        "while not came.wait(0.05): pass\n"
    )
    job = msrun.start("--worker_num=2", f"--start_method={method}", "w.py", cwd=tmp_path)
    wait_until(lambda: process_control.handles_signal(job.pid, signal.SIGUSR1), "msrun has begun")
    job.send(signal.SIGUSR1)
    finished = job.finish()
    assert finished.code == 0, finished.stderr


@pytest.mark.slow
def test_quit_ends_the_job_in_order(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=2", workers / "wait.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    job.send(signal.SIGQUIT)
    finished = job.finish()
    msrun.prove_nothing_left(deadline_s=0)
    assert finished.code == 131
    assert finished.errors == ["msrun: error: stopped by SIGQUIT"]


@pytest.mark.parametrize(
    ("value", "words"),
    [("USR3", "did you mean USR"), ("TERM", "TERM cannot be passed on; give none"), ("9", "")],
)
def test_signal_that_cannot_be_passed_on_is_refused(
    msrun: JobRunner, workers: Path, tmp_path: Path, value: str, words: str
) -> None:
    finished = msrun.run("--signals", value, workers / "wait.py", cwd=tmp_path)
    assert finished.code == 2
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"msrun: error: --signals {value}: {value} cannot be passed on")
    assert words in line
