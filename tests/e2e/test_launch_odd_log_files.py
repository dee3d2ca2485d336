"""What others have put in the place of a log: nobody waits for it, and no job is held up."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner

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
def test_it_is_left_alone_or_gives_way_to_a_link(msrun: JobRunner, workers: Path, log_dir: Path, kind: str) -> None:
    for name in (*NAMES, "job.lock", "latest"):
        KINDS[kind](log_dir / name)
    job = msrun.start("--worker_num=2", workers / "end.py", "all", "0", cwd=log_dir.parent).finish(DEADLINE_S)
    assert job.code == 0, job.stderr
    (own,) = (path for path in log_dir.iterdir() if path.is_dir() and not path.is_symlink())
    for path in own.iterdir():
        found = path.lstat()
        assert stat.S_ISREG(found.st_mode) and (found.st_uid, found.st_nlink) == (os.geteuid(), 1), path
        assert stat.S_IMODE(found.st_mode) == 0o600, path
    assert (own / "worker_1.log").read_text() == "rank 1 begins\n"
    is_shown = kind not in ("fifo", "socket")
    assert ((log_dir / "worker_1.log").resolve() == (own / "worker_1.log").resolve()) == is_shown
    assert {path.read_text() for path in log_dir.parent.glob("target_of_*")} <= {"precious"}


def test_folders_in_the_place_of_its_files_hold_up_no_job(msrun: JobRunner, workers: Path, log_dir: Path) -> None:
    for name in (*NAMES, "job.lock", "latest", "msrun.log"):
        (log_dir / name).mkdir()
    options = ["--worker_num=2", "--log_max_bytes=4K"]
    job = msrun.start(*options, workers / "end.py", "all", "0", cwd=log_dir.parent).finish(DEADLINE_S)
    assert job.code == 0, job.stderr
    shown = msrun.start("status", cwd=log_dir.parent).finish(DEADLINE_S)
    assert shown.code == 0 and b"finished successfully" in shown.stdout


@pytest.mark.parametrize("kind", one_fast("fifo", "socket", "link"))
@pytest.mark.parametrize("option", ["--status", "--stop"])
def test_whoever_looks_at_the_job_does_not_wait_for_it(
    msrun: JobRunner, workers: Path, log_dir: Path, kind: str, option: str
) -> None:
    ended = msrun.run("--worker_num=2", workers / "end.py", "all", "0", cwd=log_dir.parent)
    assert ended.code == 0
    for name in set(NAMES) - {"plan.json"}:
        (ended.log_dir / name).unlink(missing_ok=True)
        KINDS[kind](ended.log_dir / name)
    looked = msrun.start(f"{option}=log_output", cwd=log_dir.parent).finish(DEADLINE_S)
    assert looked.code in (0, 1) and "Traceback" not in looked.stderr, looked.stderr
    assert b"job " in looked.stdout
    (ended.log_dir / "events.jsonl").unlink()


@pytest.mark.slow
def test_a_worker_may_put_it_there(msrun: JobRunner, log_dir: Path) -> None:
    (log_dir.parent / "fail.py").write_text(FAIL)
    job = msrun.start("--worker_num=1", "fail.py", cwd=log_dir.parent).finish(DEADLINE_S)
    assert job.code == 5, job.stderr


def test_a_worker_that_stands_in_the_way_of_the_next_attempt_ends_the_job_in_one_line(
    msrun: JobRunner, log_dir: Path
) -> None:
    (log_dir.parent / "train.py").write_text(
        "import os, sys\nos.mkdir(os.path.join(os.environ['MSRUN_LOG_DIR'], 'worker_0.attempt_0.log'))\nsys.exit(3)\n"
    )
    ended = msrun.start("--worker_num=1", "--max_restarts=1", "train.py", cwd=log_dir.parent).finish(DEADLINE_S)
    assert ended.code == 3, ended.stderr
    assert "worker_0.attempt_0.log" in ended.errors[0] and "Traceback" not in ended.stderr
    msrun.prove_nothing_left()


@pytest.mark.slow
def test_the_log_of_a_worker_that_cannot_be_opened_is_named(msrun: JobRunner, log_dir: Path) -> None:
    """Between the launcher and the worker somebody may have exchanged it."""
    (log_dir.parent / "train.py").write_text("print('never')")
    (log_dir.parent / "slow.py").write_text(
        "import glob, os\n[log] = glob.glob('log_output/2*/worker_0.log')\nos.unlink(log)\nos.mkfifo(log)\n"
    )
    job = msrun.start("--worker_num=1", "--preload=slow", "train.py", cwd=log_dir.parent, env={"PYTHONPATH": paths()})
    ended = job.finish(DEADLINE_S)
    assert ended.code == 3, ended.stderr
    text = (log_dir / "scheduler.log").read_text()
    assert "cannot open the log" in text and "Traceback" not in text


def paths() -> str:
    return os.pathsep.join([".", *(path for path in sys.path if path)])
