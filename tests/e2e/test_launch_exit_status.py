"""What `msrun` exits with, whom it names, and what it says about the others."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, is_alive, wait_until

STATUS = [
    # how rank 1 ends, exit status of msrun, words of the report
    ("7", 7, "exit code 7"),
    ("255", 255, "exit code 255"),
    ("raise", 1, "exit code 1"),
    ("os_exit=9", 9, "exit code 9"),
    ("SIGKILL", 137, "signal SIGKILL"),
    ("SIGSEGV", 139, "signal SIGSEGV"),
    ("SIGABRT", 134, "signal SIGABRT"),
    ("SIGTERM", 143, "signal SIGTERM"),
    ("interrupt", 130, "signal SIGINT"),
]
FAST = ("7", "SIGKILL", "SIGSEGV", "interrupt")


@pytest.mark.parametrize(
    ("method", "how", "code", "words"),
    [
        pytest.param(method, *row, marks=() if method == "fork" and row[0] in FAST else pytest.mark.slow)
        for method in ("fork", "exec")
        for row in STATUS
    ],
)
def test_first_failure_gives_the_exit_status_and_is_named(
    msrun: JobRunner, workers: Path, tmp_path: Path, how: str, code: int, words: str, method: str
) -> None:
    finished = msrun.run("--worker_num=3", "--start_method", method, workers / "end.py", "1", how, cwd=tmp_path)
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
    assert failure["others"] == [
        {"global_rank": 0, "state": "stopped by msrun", "doing": ""},
        {"global_rank": 2, "state": "stopped by msrun", "doing": ""},
    ]
    first = failure["first_failure"]
    assert (first["global_rank"], first["local_rank"]) == (1, 1)
    assert first["exit_code"] == (None if words.startswith("signal") else code)
    assert first["signal"] == (words.removeprefix("signal ") if words.startswith("signal") else None)
    assert first["run_time_s"] >= 0
    assert ("out-of-memory" in first["hint"]) is (how == "SIGKILL")
    assert failure["job_id"] == finished.read_json("plan.json")["job_id"]
    assert stat.S_IMODE((finished.log_dir / "failure.json").stat().st_mode) == 0o600


def test_first_to_end_is_named_however_late_msrun_sees_it(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=4", workers / "wait.py", cwd=tmp_path)
    job.wait_for(*(tmp_path / f"ready_{rank}" for rank in range(4)))
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


SUCCESS = ["0", "none", "return"]


@pytest.mark.parametrize("how", one_fast(*SUCCESS))
@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_all_workers_at_zero_is_zero(msrun: JobRunner, workers: Path, tmp_path: Path, how: str, method: str) -> None:
    finished = msrun.run("--worker_num=2", "--start_method", method, workers / "end.py", "all", how, cwd=tmp_path)
    assert finished.code == 0
    assert finished.errors == []
    assert not (finished.log_dir / "failure.json").exists()
    assert "all 2 workers finished successfully" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_exit_with_a_text_prints_it_and_is_one(msrun: JobRunner, workers: Path, tmp_path: Path, method: str) -> None:
    finished = msrun.run(
        "--worker_num=1", "--start_method", method, workers / "end.py", "all", "text=no data ☃", cwd=tmp_path
    )
    assert finished.code == 1
    assert "no data ☃".encode() in finished.log(0)


@pytest.mark.slow
def test_failure_of_an_earlier_job_is_gone_after_a_good_one(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    assert msrun.run("--worker_num=1", workers / "end.py", "all", "3", cwd=tmp_path).code == 3
    finished = msrun.run("--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path)
    assert finished.code == 0
    assert not (finished.log_dir / "failure.json").exists()


EXECUTABLES = [
    # content, mode, exit status, words in its log
    ("#!/no/such/interpreter\n", 0o755, 127, "No such file"),
    ("no program at all\n", 0o755, 126, "Exec format error"),
    ("#!/bin/sh\nexit 5\n", 0o755, 5, ""),
    ("#!/bin/sh\nkill -KILL $$\n", 0o755, 137, ""),
]


@pytest.mark.parametrize(("content", "mode", "code", "words"), one_fast(*EXECUTABLES), ids=["127", "126", "5", "137"])
def test_executable_that_fails_or_cannot_start_gives_the_status_a_shell_gives(
    msrun: JobRunner, tmp_path: Path, content: str, mode: int, code: int, words: str
) -> None:
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(mode)
    finished = msrun.run("--worker_num=1", "./program", cwd=tmp_path)
    assert finished.code == code
    assert words in finished.log(0).decode()
    assert words in finished.stderr


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_traceback_is_the_scripts_own_and_is_in_the_report(
    msrun: JobRunner, workers: Path, tmp_path: Path, method: str
) -> None:
    finished = msrun.run("--worker_num=1", "--start_method", method, workers / "fail_deep.py", cwd=tmp_path)
    assert finished.code == 1
    log = finished.log(0).decode()
    script = str(workers / "fail_deep.py")
    files = [line.split('"')[1] for line in log.splitlines() if line.strip().startswith("File ")]
    assert set(files) == {script}
    assert log.count("Traceback (most recent call last):") == 2
    assert log.endswith("RuntimeError: outer wrong\n")
    excerpt = finished.read_json("failure.json")["first_failure"]["excerpt"]
    assert excerpt[0] == "Traceback (most recent call last):"
    assert excerpt[-1] == "RuntimeError: outer wrong"


@pytest.mark.slow
@pytest.mark.parametrize("form", one_fast(["broken.py"], ["-m", "broken"]))
def test_syntax_error_is_reported_by_the_worker(msrun: JobRunner, tmp_path: Path, form: list[str]) -> None:
    (tmp_path / "broken.py").write_text("import os\nif:\n")
    finished = msrun.run("--worker_num=2", *form, cwd=tmp_path)
    assert finished.code == 1
    assert "SyntaxError: invalid syntax" in finished.stderr
    assert "msrun/agent" not in finished.log(0).decode()


@pytest.mark.slow
@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_what_python_runs_at_its_end_runs(msrun: JobRunner, workers: Path, tmp_path: Path, method: str) -> None:
    finished = msrun.run("--worker_num=1", "--start_method", method, workers / "at_end.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert finished.log(0).decode().splitlines() == ["last line True", "thread done", "atexit ran", "finalizer ran"]
    assert (tmp_path / "left_open.txt").read_text() == "written at the end"


FINALIZERS = {
    "of a global, which writes with the script's modules": (
        "import json\n"
        "class Results:\n"
        "    def __init__(self): self.file, self.rows = open('results.json', 'w'), [1, 2]\n"
        "    def __del__(self): json.dump(self.rows, self.file); self.file.close()\n"
        "results = Results()\n"
    ),
    "of an object that the last error holds": (
        "import json\n"
        "class Results:\n"
        "    def __del__(self):\n"
        "        with open('results.json', 'w') as file: json.dump([1, 2], file)\n"
        "def train():\n"
        "    results = Results()\n"
        "    raise RuntimeError('no')\n"
        "train()\n"
    ),
}


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
@pytest.mark.parametrize("script", FINALIZERS.values(), ids=FINALIZERS)
def test_finalizers_run_at_the_end_with_their_globals_in_place(
    msrun: JobRunner, tmp_path: Path, script: str, method: str
) -> None:
    (tmp_path / "w.py").write_text(script)
    alone = subprocess.run([sys.executable, "w.py"], cwd=tmp_path, capture_output=True, check=False)
    assert (tmp_path / "results.json").read_text() == "[1, 2]"
    (tmp_path / "results.json").unlink()
    finished = msrun.run("--worker_num=1", f"--start_method={method}", "w.py", cwd=tmp_path)
    assert finished.code == alone.returncode
    assert (tmp_path / "results.json").read_text() == "[1, 2]"


@pytest.mark.slow
def test_two_failures_at_once_name_one_first_and_account_for_both(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    finished = msrun.run("--worker_num=2", workers / "end.py", "all", "6", cwd=tmp_path)
    assert finished.code == 6
    failure = finished.read_json("failure.json")
    ranks = [failure["first_failure"]["global_rank"], *(other["global_rank"] for other in failure["others"])]
    assert sorted(ranks) == [0, 1]


@pytest.mark.slow
def test_two_failures_in_a_row_are_both_listed_in_their_order(msrun: JobRunner, tmp_path: Path) -> None:
    """A process has ended with its last thread, which its pidfd tells; its main thread may be a zombie before."""
    (tmp_path / "w.py").write_text(
        "import os, pathlib, select, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "rank = os.environ['RANK']\n"
        "def tell(name):\n"
        "    pathlib.Path(f'new_{name}').write_text(str(os.getpid()))\n"
        "    pathlib.Path(f'new_{name}').rename(name)\n"
        "def wait(*names):\n"
        "    while not all(map(os.path.exists, names)): time.sleep(0.001)\n"
        "if rank == '1':\n"
        "    tell('first')\n"
        "    wait('second', 'other')\n"
        "    sys.exit(5)\n"
        "if rank == '2':\n"
        "    wait('first')\n"
        "    pidfd = os.pidfd_open(int(pathlib.Path('first').read_text()))\n"
        "    tell('second')\n"
        "    select.select([pidfd], [], [])\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "tell('other')\n"
        "time.sleep(600)\n"
    )
    finished = msrun.run("--worker_num=3", "--grace=2", "w.py", cwd=tmp_path)
    assert finished.code == 5, finished.stderr
    exits = [(event["global_rank"], event["how"]) for event in finished.events if event["event"] == "exited"]
    assert exits == [(1, "exit code 5"), (2, "signal SIGSEGV"), (0, "signal SIGKILL")]
    others = {other["global_rank"]: other["state"] for other in finished.read_json("failure.json")["others"]}
    assert others[0] == "stopped by msrun (killed: --grace 2 s was over)"
    assert re.fullmatch(r"failed 0.\d\d s later \(signal SIGSEGV\)", others[2]) or others[2] == "stopped by msrun"
    assert "rank 1 on " in finished.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_what_runs_at_exit_can_see_that_the_script_has_failed(msrun: JobRunner, tmp_path: Path, method: str) -> None:
    (tmp_path / "w.py").write_text(
        "import atexit, sys\n"
        "atexit.register(lambda: print('at exit:', repr(getattr(sys, 'last_value', None)), flush=True))\n"
        "raise RuntimeError('no')\n"
    )
    finished = msrun.run("--worker_num=1", f"--start_method={method}", "w.py", cwd=tmp_path)
    assert finished.code == 1
    assert finished.log(0).decode().splitlines()[-1] == "at exit: RuntimeError('no')"
