"""`msrun.run`: a function on all ranks from Python; what they return, what they raise, and how the job ends."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import Finished, JobRunner, wait_until

HEAD = "import os, sys, time\nimport msrun\n"


def call(msrun: JobRunner, cwd: Path, program: str) -> Finished:
    (cwd / "program.py").write_text(HEAD + program)
    return msrun.start(cwd=cwd, command=[sys.executable, "program.py"]).finish()


def test_values_of_all_ranks_come_back_in_their_order(msrun: JobRunner, tmp_path: Path) -> None:
    program = (
        "def work(word, times=1):\n    print('rank', os.environ['RANK'])\n"
        "    return word * times, int(os.environ['RANK'])\n"
        "print(msrun.run(work, ('a',), {'times': 2}, workers=3))\n"
        "print(msrun.run(lambda: os.environ['MSRUN_LOG_DIR'], workers=1, options=['--quiet']))\n"
    )
    done = call(msrun, tmp_path, program)
    assert done.code == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert "rank 0" in lines and "rank 1" not in lines
    assert lines[-2:] == ["[('aa', 0), ('aa', 1), ('aa', 2)]", str([str(done.log_dir)])]


@pytest.mark.slow
def test_modules_are_found_where_the_caller_finds_them(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "tasks.py").write_text("def double(x):\n    return 2 * x\n")
    done = call(
        msrun, tmp_path, "sys.path.insert(0, 'lib')\nimport tasks\nprint(msrun.run(tasks.double, (4,), workers=2))\n"
    )
    assert done.stdout.decode().splitlines()[-1] == "[8, 8]", done.stderr


def test_the_first_failure_is_raised_with_the_rank_that_failed(msrun: JobRunner, tmp_path: Path) -> None:
    program = """
class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)
def work(how):
    if os.environ["RANK"] == "0":
        time.sleep(600)
    if how == "signal":
        os.kill(os.getpid(), 9)
    raise Odd(1, 2) if how == "odd" else ValueError("no such row")
for how in ("raise", "signal", "odd"):
    try:
        msrun.run(work, (how,), workers=2, options=["--quiet"])
    except Exception as error:
        print("caught", type(error).__name__, str(error).partition(",")[0], *getattr(error, "__notes__", []))
try:
    msrun.run(work, workers=0)
except Exception as error:
    print("caught", type(error).__name__, error)
try:
    msrun.run(work, (sys.stdin,), workers=1)
except Exception as error:
    print("caught", type(error).__name__, error)
"""
    done = call(msrun, tmp_path, program)
    caught = [line for line in done.stdout.decode().splitlines() if line.startswith("caught ")]
    assert caught[0].startswith("caught ValueError no such row msrun: rank 1 on "), done.stderr
    assert "worker_1.log" in caught[0]
    assert caught[1].startswith("caught WorkerFailed rank 1 on ") and "signal SIGKILL" in caught[1]
    assert caught[2].startswith("caught WorkerFailed rank 1 on ") and "exit code 1" in caught[2]
    assert "msrun --worker_num=0 has ended with 2: the function has run on no rank" in caught[3]
    assert "caught UsageError <function work" in caught[4] and "cannot be sent to another process" in caught[4]


@pytest.mark.parametrize("signum", one_fast(signal.SIGINT, signal.SIGKILL))
def test_nothing_is_left_when_the_caller_ends(msrun: JobRunner, tmp_path: Path, signum: int) -> None:
    (tmp_path / "program.py").write_text(
        HEAD + "def work():\n    open('ready_' + os.environ['RANK'], 'w').close()\n    time.sleep(600)\n"
        "msrun.run(work, workers=2)\n"
    )
    job = msrun.start(cwd=tmp_path, command=[sys.executable, "program.py"])
    wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in range(2)), "both ranks")
    job.send(signum)
    assert job.process.wait(30) == -signum
    msrun.prove_nothing_left()
