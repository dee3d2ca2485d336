"""What others have put in the place of a log: it is replaced or refused in one line, and nobody waits for it."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, wait_until

STRANGER = 65534
DEADLINE_S = 20.0
NAMES = (
    "worker_0.log",
    "worker_1.log",
    "worker_0.log.1",
    "scheduler.log",
    "events.jsonl",
    "plan.json",
    "failure.json",
    "rank_table.json",
)
FAIL = """
import os, sys
log = os.path.join(os.environ["MSRUN_LOG_DIR"], "worker_0.log")
os.unlink(log)
os.mkfifo(log)
sys.exit(5)
"""


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def make_foreign(path: Path) -> None:
    path.touch()
    path.chmod(0o666)
    try:
        os.chown(path, STRANGER, STRANGER)
    except PermissionError:
        pytest.skip("only root makes files of others")


def make_second_name(path: Path) -> None:
    target = path.parent.parent / f"target_of_{path.name}"
    target.write_text("precious")
    os.link(target, path)


def make_link(path: Path) -> None:
    target = path.parent.parent / f"target_of_{path.name}"
    target.write_text("precious")
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "link": make_link,
    "second name": make_second_name,
    "file of somebody else": make_foreign,
}


@pytest.fixture
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "log_output"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", one_fast(*KINDS))
def test_it_is_replaced(msrun: JobRunner, workers: Path, log_dir: Path, kind: str) -> None:
    for name in NAMES:
        KINDS[kind](log_dir / name)
    job = msrun.start("--worker_num=2", workers / "end.py", "all", "0", cwd=log_dir.parent).finish(DEADLINE_S)
    assert job.code == 0, job.stderr
    for name in set(NAMES) - {"failure.json", "worker_0.log.1"}:
        found = (log_dir / name).lstat()
        assert stat.S_ISREG(found.st_mode) and (found.st_uid, found.st_nlink) == (os.geteuid(), 1), name
        assert stat.S_IMODE(found.st_mode) == 0o600, name
    assert {path.read_text() for path in log_dir.parent.glob("target_of_*")} <= {"precious"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_fast("fifo", "link", "file of somebody else"))
def test_it_is_replaced_where_logs_are_rotated_and_where_the_launcher_is_detached(
    msrun: JobRunner, workers: Path, log_dir: Path, kind: str
) -> None:
    for name in (*NAMES, "msrun.log"):
        KINDS[kind](log_dir / name)
    options = ["--worker_num=2", "--log_max_bytes=4K", "--join=False"]
    job = msrun.start(*options, workers / "end.py", "all", "0", cwd=log_dir.parent).finish(DEADLINE_S)
    assert job.code == 0, job.stderr
    wait_until(lambda: "over" in [event["event"] for event in job.events], "the job is over")
    msrun.prove_nothing_left()
    assert job.log(1) == b"rank 1 begins\n"
    assert stat.S_ISREG((log_dir / "msrun.log").lstat().st_mode)


@pytest.mark.parametrize("name", one_fast(*sorted(set(NAMES) - {"worker_0.log.1"}), "job.lock"))
def test_a_folder_is_refused_in_one_line(msrun: JobRunner, workers: Path, log_dir: Path, name: str) -> None:
    (log_dir / name).mkdir()
    job = msrun.start("--worker_num=2", workers / "end.py", "all", "0", cwd=log_dir.parent).finish(DEADLINE_S)
    assert job.code == 2, job.stderr
    assert len(job.stderr.splitlines()) == 1 and name in job.stderr
    msrun.prove_nothing_left()


@pytest.mark.parametrize("kind", one_fast(*KINDS))
def test_a_lock_that_is_not_ours_is_refused_in_one_line(
    msrun: JobRunner, workers: Path, log_dir: Path, kind: str
) -> None:
    KINDS[kind](log_dir / "job.lock")
    job = msrun.start("--worker_num=2", workers / "end.py", "all", "0", cwd=log_dir.parent).finish(DEADLINE_S)
    assert job.code == 2, job.stderr
    assert len(job.stderr.splitlines()) == 1 and "job.lock" in job.stderr


@pytest.mark.parametrize("kind", one_fast("fifo", "socket", "link"))
@pytest.mark.parametrize("option", ["--status", "--stop"])
def test_whoever_looks_at_the_job_does_not_wait_for_it(
    msrun: JobRunner, workers: Path, log_dir: Path, kind: str, option: str
) -> None:
    assert msrun.run("--worker_num=2", workers / "end.py", "all", "0", cwd=log_dir.parent).code == 0
    for name in set(NAMES) - {"plan.json"}:
        (log_dir / name).unlink(missing_ok=True)
        KINDS[kind](log_dir / name)
    looked = msrun.start(f"{option}=log_output", cwd=log_dir.parent).finish(DEADLINE_S)
    assert looked.code in (0, 1) and "Traceback" not in looked.stderr, looked.stderr
    assert b"job " in looked.stdout
    (log_dir / "events.jsonl").unlink()


@pytest.mark.slow
def test_a_worker_may_put_it_there(msrun: JobRunner, log_dir: Path) -> None:
    (log_dir.parent / "fail.py").write_text(FAIL)
    job = msrun.start("--worker_num=1", "fail.py", cwd=log_dir.parent).finish(DEADLINE_S)
    assert job.code == 5, job.stderr


def test_a_worker_that_stands_in_the_way_of_the_next_attempt_ends_the_job_in_one_line(
    msrun: JobRunner, workers: Path, log_dir: Path
) -> None:
    (log_dir / "worker_0.attempt_0.log").mkdir()
    job = msrun.start("--worker_num=1", "--max_restarts=1", workers / "end.py", "0", "3", cwd=log_dir.parent)
    ended = job.finish(DEADLINE_S)
    assert ended.code == 3, ended.stderr
    assert "worker_0.attempt_0.log" in ended.errors[0] and "Traceback" not in ended.stderr
    msrun.prove_nothing_left()


@pytest.mark.slow
def test_the_log_of_a_worker_that_cannot_be_opened_is_named(msrun: JobRunner, log_dir: Path) -> None:
    """Between the launcher and the worker somebody may have exchanged it."""
    (log_dir.parent / "train.py").write_text("print('never')")
    (log_dir.parent / "slow.py").write_text(
        "import os\nlog = 'log_output/worker_0.log'\nos.unlink(log)\nos.mkfifo(log)\n"
    )
    job = msrun.start("--worker_num=1", "--preload=slow", "train.py", cwd=log_dir.parent, env={"PYTHONPATH": paths()})
    ended = job.finish(DEADLINE_S)
    assert ended.code == 3, ended.stderr
    text = (log_dir / "scheduler.log").read_text()
    assert "cannot open the log" in text and "Traceback" not in text


def paths() -> str:
    return os.pathsep.join([".", *(path for path in sys.path if path)])
