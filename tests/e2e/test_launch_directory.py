"""A log directory takes any number of jobs, each in a folder of its own, and shows the latest one's files."""

import os
import signal
import socket
import sys

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, is_alive, latest_job, wait_until


def snapshot(folder):
    """Return inode, size and time of change of every file."""
    found = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found.items()}


@pytest.mark.parametrize("where", one_fast("--worker_num=1", "--rehearse=1x1"))
def test_a_second_job_touches_nothing_of_the_first_which_runs_until_it_is_stopped(msrun, msrun_here, tmp_path, where):
    first = msrun.start("--worker_num=1", "--grace=0.5", WORKERS / "wait.py", cwd=tmp_path).wait_for_workers(1)
    wait_until(lambda: "1 of 1" in (first.log_dir / "scheduler.log").read_text(), "the scheduler's last word for now")
    of_first = latest_job(first.log_dir)
    before = snapshot(of_first)
    second = msrun.start(where, WORKERS / "end.py", "all", "0", cwd=tmp_path).finish()
    assert second.code == 0, second.stderr
    assert second.log_dir == latest_job(first.log_dir) != of_first
    assert (first.log_dir / "worker_0.log").read_text() == "rank 0 begins\n"
    assert snapshot(of_first) == before
    listed = msrun_here("list", cwd=tmp_path).stdout.decode().splitlines()[1:]
    states = {line.split()[0]: line.split()[1] for line in listed}
    assert states == {of_first.name: "running", second.log_dir.name: "finished"}
    stopped = msrun_here("stop", of_first, cwd=tmp_path)
    assert not is_alive(first.pid), "it waits until the job is gone"
    assert stopped.stdout.decode() == f"job {of_first.name} has ended: interrupted: stopped by SIGTERM\n"
    assert stopped.stderr == f"msrun: stopping job {of_first.name} (pid {first.pid}), for up to 20.5 s\n"
    assert (stopped.code, first.finish().code) == (0, 128 + signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("where", one_fast("--worker_num=1", "--rehearse=1x1"))
def test_log_directory_that_is_removed_during_the_job_is_told(msrun, tmp_path, where):
    (tmp_path / "remove.py").write_text("import shutil\nshutil.rmtree('log_output')\n")
    finished = msrun.run(where, "remove.py", cwd=tmp_path)
    assert finished.code == 0
    assert finished.stderr.count(f"the log directory {tmp_path}/log_output/") == 1
    assert finished.stderr.count(" was removed while the job ran") == 1


# -- what others have put in the place of a log: nobody waits for it, and no job is held up -----


DEADLINE_S = 20.0
NAMES = ("worker_0.log", "worker_1.log", "worker_0.log.1", "scheduler.log")
NAMES += ("events.jsonl", "plan.json", "failure.json", "rank_table.json")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def make_link(path):
    target = path.parent.parent / f"target_of_{path.name}"
    target.write_text("precious")
    path.symlink_to(target)


KINDS = {"link": make_link, "fifo": os.mkfifo, "socket": make_socket}


@pytest.fixture
def log_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "log_output"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_fast(*reversed(KINDS)))
def test_whoever_looks_at_the_job_does_not_wait_for_it(msrun, log_dir, kind):
    ended = msrun.run("--worker_num=2", WORKERS / "end.py", "all", "0", cwd=log_dir.parent)
    assert ended.code == 0
    for name in set(NAMES) - {"plan.json"}:
        (ended.log_dir / name).unlink(missing_ok=True)
        KINDS[kind](ended.log_dir / name)
    for option in ("--status", "--stop"):
        looked = msrun.start(f"{option}=log_output", cwd=log_dir.parent).finish(DEADLINE_S)
        assert looked.code in (0, 1) and "Traceback" not in looked.stderr, looked.stderr
        assert b"job " in looked.stdout
    (ended.log_dir / "events.jsonl").unlink()


@pytest.mark.slow
def test_the_log_of_a_worker_that_cannot_be_opened_is_named(msrun, log_dir):
    """Between the launcher and the worker somebody may have exchanged it."""
    (log_dir.parent / "train.py").write_text("print('never')")
    (log_dir.parent / "slow.py").write_text(
        "import glob, os\n[log] = glob.glob('log_output/2*/worker_0.log')\nos.unlink(log)\nos.mkfifo(log)\n"
    )
    search = os.pathsep.join([".", *filter(None, sys.path)])
    job = msrun.start("--worker_num=1", "--preload=slow", "train.py", cwd=log_dir.parent, env={"PYTHONPATH": search})
    ended = job.finish(DEADLINE_S)
    assert ended.code == 3, ended.stderr
    text = (log_dir / "scheduler.log").read_text()
    assert "cannot open the log" in text and "Traceback" not in text
