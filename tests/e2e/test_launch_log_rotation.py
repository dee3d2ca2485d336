"""--log_max_bytes: logs of bounded size, every line of every worker, and a log writer that is never in the way."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, Finished, JobRunner, RunHere, Running, is_alive, latest_job, wait_until

LINES = 3000
MAX_BYTES = 16 * 1024
LONGEST_LINE = 120


def files_of(folder: Path, global_rank: int) -> list[Path]:
    """Return a worker's log files, oldest first."""
    name = f"worker_{global_rank}.log"
    older = [path for path in folder.iterdir() if re.fullmatch(re.escape(name) + r"\.\d+", path.name)]
    older.sort(key=lambda path: int(path.suffix[1:]), reverse=True)
    return [*older, folder / name]


def whole_log(folder: Path, global_rank: int) -> bytes:
    return b"".join(path.read_bytes() for path in files_of(folder, global_rank))


def expected_log(global_rank: int) -> bytes:
    """Return what flood.py writes."""
    lines = "".join(f"rank {global_rank} line {number} {'x' * (number % 97)}\n" for number in range(LINES)).encode()
    return lines + bytes(range(256)) + "ünïcode ☃ on stderr\n".encode() + b"no end of line"


def pid_of_log_writer(job: Running) -> int:
    def find() -> int:
        lines = (job.log_dir / "events.jsonl").read_text().splitlines()
        return next((e["pid"] for e in map(json.loads, lines) if e["event"] == "log_writer"), 0)

    return int(wait_until(find, "the log writer has started"))


@pytest.fixture(scope="module", params=one_fast("fork", "exec"))
def flooded(
    msrun_of_module: JobRunner,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Finished:
    cwd = tmp_path_factory.mktemp("flood")
    options = ["--worker_num=4", "--start_method", request.param, "--tail_worker_log=2", "--raw"]
    options += [f"--log_max_bytes={MAX_BYTES}", "--log_keep=1000"]
    finished = msrun_of_module.run(*options, WORKERS / "flood.py", str(LINES), cwd=cwd, env={"PYTHONUTF8": "1"})
    assert finished.code == 0, finished.stderr
    return finished


def test_files_hold_every_byte_begin_with_a_line_have_their_size_and_are_private(flooded: Finished) -> None:
    for rank in range(4):
        assert whole_log(flooded.log_dir, rank) == expected_log(rank)
        *older, newest = files_of(flooded.log_dir, rank)
        assert len(older) == len(expected_log(rank)) // MAX_BYTES
        for path in older:
            data = path.read_bytes()
            assert data.startswith(b"rank ") and data.endswith(b"\n")
            assert MAX_BYTES - LONGEST_LINE < len(data) <= MAX_BYTES + LONGEST_LINE
        assert newest.stat().st_size <= MAX_BYTES + LONGEST_LINE
    assert flooded.stdout == expected_log(2), "the raw console, over all rotations"
    assert {stat.S_IMODE(path.stat().st_mode) for path in flooded.log_dir.iterdir()} == {0o600}


LATE_WORDS = """
import os, pathlib, subprocess, sys, time
pathlib.Path("begun").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
for number in range(1000):
    print("words", number)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
left = subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
pathlib.Path("left.new").write_text(str(left.pid))
os.rename("left.new", "left")
time.sleep(600)
"""


@pytest.mark.slow
def test_late_log_writer_gets_its_moment_when_all_others_are_killed(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE_WORDS)
    job = msrun.start("--worker_num=1", "--log_max_bytes=4K", "--log_keep=50", "late.py", cwd=tmp_path)
    job.wait_for(tmp_path / "begun")
    writer = pid_of_log_writer(job)
    os.kill(writer, signal.SIGSTOP)  # as on a busy machine: it does not get to run
    (tmp_path / "go").touch()
    job.wait_for(tmp_path / "left")
    left = int((tmp_path / "left").read_text())
    for pid in (job.pid_of_fork_server(), job.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(left), "the scheduler has cleared up what the worker had started")
    if is_alive(writer):
        os.kill(writer, signal.SIGCONT)
    job.finish()
    msrun.prove_nothing_left()
    assert whole_log(latest_job(job.log_dir), 0) == "".join(f"words {number}\n" for number in range(1000)).encode()


FAREWELL = """
import os, pathlib, signal, sys, time
def leave(*_):
    for number in range(5000):
        print("last words", number)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
pathlib.Path(f"ready_{os.environ['RANK']}").touch()
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("are_all_signalled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_last_words_of_stopped_workers_are_written(msrun: JobRunner, tmp_path: Path, are_all_signalled: bool) -> None:
    (tmp_path / "farewell.py").write_text(FAREWELL)
    job = msrun.start("--worker_num=2", "--log_max_bytes=16K", "--log_keep=99", "farewell.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    if are_all_signalled:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid_of_log_writer(job), signum)
    job.send(signal.SIGTERM)
    finished = job.finish()
    assert finished.code == 143
    for rank in (0, 1):
        expected = "".join(f"last words {number}\n" for number in range(5000)).encode()
        assert whole_log(finished.log_dir, rank) == expected


FLOOD = """
import os, pathlib
pathlib.Path(f"ready_{os.environ['RANK']}").touch()
while True:
    print("for ever" * 20)
"""


@pytest.mark.parametrize("program", one_fast("wait", "flood"))
def test_killed_log_writer_ends_the_job_with_3_and_is_named(msrun: JobRunner, tmp_path: Path, program: str) -> None:
    (tmp_path / "flood.py").write_text(FLOOD)
    script = tmp_path / "flood.py" if program == "flood" else WORKERS / "wait.py"
    options = ["--worker_num=2", "--log_max_bytes=1M", "--log_keep=1", "--tail_worker_log=none", "--grace=2"]
    job = msrun.start(*options, script, cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    os.kill(pid_of_log_writer(job), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 3, finished.stderr
    (line,) = finished.errors
    assert "the log writer ended (signal SIGKILL)" in line
    assert str(finished.log_dir / "scheduler.log") in line
    msrun.prove_nothing_left(deadline_s=0.0)


WORDS = """
import os, pathlib, time
for number in range(1000):
    print("words", number)
pathlib.Path(f"ready_{os.environ['RANK']}").touch()
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victims", one_fast(["launcher", "fork server"], ["launcher"], ["fork server"]))
def test_kill_of_launcher_or_server_leaves_whole_logs(msrun: JobRunner, tmp_path: Path, victims: list[str]) -> None:
    (tmp_path / "words.py").write_text(WORDS)
    job = msrun.start("--worker_num=2", "--log_max_bytes=4K", "--log_keep=50", "words.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    pids = {"launcher": job.pid, "fork server": job.pid_of_fork_server()}
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    finished = job.finish()
    msrun.prove_nothing_left()
    if victims == ["fork server"]:
        assert finished.code == 3
    for rank in (0, 1):
        expected = "".join(f"words {number}\n" for number in range(1000)).encode()
        assert whole_log(latest_job(job.log_dir), rank) == expected


def test_plan_says_how_logs_are_rotated(msrun_here: RunHere, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    options = ["--log_max_bytes=100M", "--log_keep=3", "train.py"]
    text = msrun_here("--dry_run", *options, cwd=tmp_path).stdout
    assert b"each worker's is rotated at 100 MiB, 3 older files stay" in text
    plan = json.loads(msrun_here("--dry_run=json", *options, cwd=tmp_path).stdout)
    assert (plan["log_max_bytes"], plan["log_keep"]) == (100 * 2**20, 3)


@pytest.mark.slow
def test_full_disk_loses_lines_but_holds_no_worker_up(msrun: JobRunner, tmp_path: Path, small_disk: Path) -> None:
    log_dir = str(small_disk / "logs")
    options = ("--worker_num=2", "--log_max_bytes=100M", "--tail_worker_log=none", f"--log_dir={log_dir}")
    finished = msrun.run(*options, WORKERS / "flood.py", "30000", cwd=tmp_path, log_dir=log_dir)
    assert finished.code == 0, finished.stderr
    lines = [line for line in finished.stderr.splitlines() if "logs are not complete" in line]
    assert len(lines) == 1
    assert "(No space left on device)" in lines[0]
    lost = {int(rank): int(count) for count, rank in re.findall(r"(\d+) bytes of rank (\d+)", lines[0])}
    full = {rank: len("".join(f"rank {rank} line {n} {'x' * (n % 97)}\n" for n in range(30000))) for rank in (0, 1)}
    rest = len(bytes(range(256)) + "ünïcode ☃ on stderr\n".encode() + b"no end of line")
    for rank in (0, 1):
        assert len(whole_log(finished.log_dir, rank)) == full[rank] + rest - lost.get(rank, 0)
    assert sum(lost.values()) > 2 * 1024 * 1024
    record = (finished.log_dir / "scheduler.log").read_text()
    assert record.count("cannot be written (No space left on device)") <= 1, "it lies on the full disk, too"
