"""What `msrun` exits with, whom it names, and what it says about the others."""

import os
import re
import signal
import stat

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, is_alive, wait_until

STATUS = [
    # how rank 1 ends, exit status of msrun, words of the report, how it was started
    ("7", 7, "exit code 7", "fork"),
    ("SIGKILL", 137, "signal SIGKILL", "fork"),
    ("SIGSEGV", 139, "signal SIGSEGV", "fork"),
    ("interrupt", 130, "signal SIGINT", "fork"),
    ("124", 124, "exit code 124", "fork"),
    ("raise", 1, "exit code 1", "fork"),
    ("SIGABRT", 134, "signal SIGABRT", "exec"),
    ("interrupt", 130, "signal SIGINT", "exec"),
    ("os_exit=9", 9, "exit code 9", "exec"),
]


@pytest.mark.parametrize(("how", "code", "words", "method"), one_fast(*STATUS))
def test_first_failure_gives_the_exit_status_and_is_named(msrun, tmp_path, how, code, words, method):
    finished = msrun.run("--worker_num=3", "--start_method", method, WORKERS / "end.py", "1", how, cwd=tmp_path)
    assert finished.code == code
    (line,) = finished.errors
    assert line.startswith("msrun: error: rank 1 on ")
    assert f"failed first: {words}" in line
    assert str(finished.log_dir / "worker_1.log") in finished.stderr
    crashes = how in ("SIGSEGV", "SIGABRT")
    assert "  | rank 1 begins" in finished.stderr or crashes or how in ("raise", "interrupt")
    assert ("  | Fatal Python error: " in finished.stderr and "in end" in finished.stderr) is crashes
    assert "ranks 0, 2 stopped by msrun" in finished.stderr

    failure = finished.read_json("failure.json")
    assert failure["exit_code"] == code
    assert failure["reason"] == line.removeprefix("msrun: error: ")
    others = [(other["global_rank"], other["state"], other["doing"]) for other in failure["others"]]
    assert others == [(0, "stopped by msrun", ""), (2, "stopped by msrun", "")]
    first = failure["first_failure"]
    assert (first["global_rank"], first["local_rank"]) == (1, 1)
    assert first["exit_code"] == (None if words.startswith("signal") else code)
    assert first["signal"] == (words.removeprefix("signal ") if words.startswith("signal") else None)
    assert first["run_time_s"] >= 0
    assert ("out-of-memory" in first["hint"]) is (how == "SIGKILL")
    assert failure["job_id"] == finished.read_json("plan.json")["job_id"]
    assert stat.S_IMODE((finished.log_dir / "failure.json").stat().st_mode) == 0o600


@pytest.mark.slow
def test_first_to_end_is_named_however_late_msrun_sees_it(msrun, tmp_path):
    job = msrun.start("--worker_num=4", WORKERS / "wait.py", cwd=tmp_path).wait_for_workers(4)
    server = job.pid_of_fork_server()
    os.kill(server, signal.SIGSTOP)
    for rank, signum in ((2, signal.SIGKILL), (3, signal.SIGABRT), (0, signal.SIGUSR2), (1, signal.SIGKILL)):
        pid = job.pid_of(str(rank))
        os.kill(pid, signum)
        wait_until(lambda gone=pid: not is_alive(gone), f"the end of rank {rank}")
    os.kill(server, signal.SIGCONT)
    finished = job.finish()
    assert finished.code == 137
    assert "rank 2 on " in finished.errors[0]
    ends = [event["global_rank"] for event in finished.events if event["event"] == "exited"]
    assert ends == [2, 3, 0, 1]


EXECUTABLES = [
    # content, exit status, words in its log
    ("#!/no/such/interpreter\n", 127, "No such file"),
    ("no program at all\n", 126, "Exec format error"),
    ("#!/bin/sh\nkill -KILL $$\n", 137, ""),
]


@pytest.mark.parametrize(("content", "code", "words"), one_fast(*EXECUTABLES), ids=["127", "126", "137"])
def test_executable_that_fails_or_cannot_start_gives_the_status_a_shell_gives(msrun, tmp_path, content, code, words):
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(0o755)
    finished = msrun.run("--worker_num=1", "./program", cwd=tmp_path)
    assert finished.code == code
    assert words in finished.log(0).decode() and words in finished.stderr


# -- --keep_going: a rank that fails ends no other; the job fails when all have ended -----

KEEPS_GOING = """
import os, sys, time
rank = os.environ["RANK"]
if rank == "1":
    sys.exit(7)
if rank == "2":
    while not os.path.exists("failed"):
        time.sleep(0.01)
    sys.exit(9)
while not os.path.exists("go"):
    time.sleep(0.01)
print("rank", rank, "has finished")
"""


@pytest.fixture
def keeps_going(tmp_path):
    (tmp_path / "train.py").write_text(KEEPS_GOING)
    return tmp_path


def exits(job):
    """Return how many workers have ended."""
    events = job.log_dir / "events.jsonl"
    return events.read_text().count('"exited"') if events.exists() else 0


@pytest.mark.parametrize("where", one_fast("--worker_num=4", "--rehearse=2x2"))
def test_others_run_to_their_end_after_a_failure(msrun, keeps_going, where):
    job = msrun.start(where, "--keep_going", "train.py", cwd=keeps_going)
    wait_until(lambda: exits(job) == 1, "rank 1 has failed")
    (keeps_going / "failed").touch()
    wait_until(lambda: exits(job) == 2, "rank 2 has failed")
    assert job.process.poll() is None
    (keeps_going / "go").touch()
    ended = job.finish()
    first, code, other = (1, 7, 2) if ended.code == 7 or where == "--worker_num=4" else (2, 9, 1)
    assert ended.code == code, ended.stderr  # of several hosts, that of the host whose ranks ended first
    assert f"rank {first} on " in ended.errors[0] and f"failed first: exit code {code}" in ended.errors[0]
    assert [ended.log(rank) for rank in (0, 3)] == [b"rank 0 has finished\n", b"rank 3 has finished\n"]
    states = {other["global_rank"]: other["state"] for other in ended.read_json("failure.json")["others"]}
    assert states.pop(other).startswith("failed") and states == {0: "done", 3: "done"}


# -- workers whose program is over and whose process goes on: said, named, not waited for without an end -----

WAITS = {"thread": r"thread uploader at linger\.py:\d+ in upload", "atexit": r"linger\.py:\d+ in upload"}


@pytest.mark.parametrize(("how", "status"), one_fast(("thread", 7), ("thread", 0), ("atexit", 0)))
def test_it_is_said_what_a_rank_waits_for_and_it_may_take_its_time(msrun, tmp_path, how, status):
    job = msrun.start("--worker_num=2", WORKERS / "linger.py", "1", how, str(status), cwd=tmp_path)
    wait_until(lambda: "rank 1" in job.stderr, "the rank is named")
    assert re.search(rf"msrun: the program of rank 1 has ended, its process waits for {WAITS[how]}", job.stderr)
    (tmp_path / "go").touch()
    ended = job.finish()
    assert ended.code == status, ended.stderr
    assert (tmp_path / "uploaded").exists()
