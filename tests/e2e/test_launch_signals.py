"""Signals to the launcher: those that end the job, those that are passed on, and the pause of Ctrl-Z."""

import signal
import time

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, state_of, wait_until


def start_waiting(msrun, cwd, *words, **settings):
    """Start two workers and wait until both are there."""
    return msrun.start("--worker_num=2", *words, cwd=cwd, **settings).wait_for_workers(2)


@pytest.mark.parametrize(
    ("name", "where"),
    one_fast(("SIGINT", ()), ("SIGHUP", ()), ("SIGQUIT", ()), ("SIGTERM", ()), ("SIGINT", ("--rehearse=2x1",))),
)
def test_signal_stops_the_job_and_gives_its_status_after_the_last_work_of_the_workers(msrun, tmp_path, name, where):
    job = start_waiting(msrun, tmp_path, *where, WORKERS / "save_when_ended.py", name)
    job.send(getattr(signal, name))
    finished = job.finish()
    assert finished.code == 128 + getattr(signal, name)
    for rank in (0, 1):
        assert finished.log(rank).decode().splitlines() == [f"saved after {name}", "finally", "atexit"]
    failure = finished.read_json("failure.json")
    assert (finished.errors, failure["first_failure"]) == ([f"msrun: error: stopped by {name}"], None)
    assert failure["reason"] == f"stopped by {name}"
    assert {other["state"] for other in failure["others"]} == {"done"}
    msrun.prove_nothing_left(deadline_s=0)


# -- those that are passed on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name", "method"),
    one_fast(
        (("--signals", "sigwinch,usr1"), "SIGWINCH", "fork"),
        (("--signals=USR2",), "SIGUSR2", "exec"),
        ((), "SIGUSR1", "exec"),
        ((), "SIGUSR2", "fork"),
    ),
)
def test_signal_reaches_every_worker_and_the_job_goes_on(msrun, tmp_path, options, name, method):
    job = start_waiting(msrun, tmp_path, f"--start_method={method}", *options, WORKERS / "note_signals.py")
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


# -- Ctrl-Z and fg: the workers stop and continue with msrun, and no limit counts the pause ----------------------------


def pause(job, folder, still_s):
    """Pause a job of two workers that run `grow.py`; they and their children have been still for so long then."""
    files = [folder / f"beats_{rank}{which}" for rank in range(2) for which in ("", "_child")]
    job.wait_for(*files)
    job.send(signal.SIGTSTP)
    wait_until(lambda: state_of(job.pid) == "T", "msrun is stopped")
    seen = [(time.monotonic(), [])]

    def are_still():
        sizes = [file.stat().st_size for file in files]
        if sizes != seen[-1][1]:
            seen.append((time.monotonic(), sizes))
        return time.monotonic() - seen[-1][0] > still_s

    wait_until(are_still, "the workers are still")


def go_on(folder, *jobs):
    """Let a paused job come to its good end."""
    (folder / "go").touch()
    jobs[0].send(signal.SIGCONT)
    for job in jobs:
        ended = job.finish()
        assert ended.code == 0, ended.stderr


def test_a_paused_job_stands_still_and_goes_on_later(msrun, tmp_path):
    job = msrun.start("--worker_num=2", "--hang_time_out=1", WORKERS / "grow.py", cwd=tmp_path)
    pause(job, tmp_path, still_s=1.5)
    go_on(tmp_path, job)


@pytest.mark.slow
def test_a_job_on_several_hosts_is_paused_on_all(rehearsals):
    job = rehearsals.start("2x1", "--hang_time_out=1", "--heartbeat_time_out=1", WORKERS / "grow.py")
    pause(job, rehearsals.cwd, still_s=2.5)
    go_on(rehearsals.cwd, job)
