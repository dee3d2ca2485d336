"""`msrun -` and `msrun <(...)`: a script that can be read only once, and arguments that differ by rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, latest_job

PROGRAM = "import os, sys\nprint(os.environ['RANK'], sys.argv[1:], __name__)\n"


def pipe_into(msrun: JobRunner, cwd: Path, *words: str, text: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "msrun", *words]
    return subprocess.run(
        command, cwd=cwd, env=msrun.environ(), input=text, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_script_from_standard_input_runs_on_all_ranks_and_stays_with_the_logs(
    msrun: JobRunner, tmp_path: Path
) -> None:
    done = pipe_into(msrun, tmp_path, "--worker_num=2", "-", "a", "b")
    assert done.returncode == 0, done.stderr
    folder = latest_job(tmp_path / "log_output")
    assert [(folder / f"worker_{rank}.log").read_text() for rank in (0, 1)] == [
        f"{rank} ['a', 'b'] __main__\n" for rank in (0, 1)
    ]
    assert (folder / "script.py").read_text() == PROGRAM
    failed = pipe_into(msrun, tmp_path, "--worker_num=1", "-", text="\nraise ValueError(3)\n")
    assert failed.returncode == 1 and '/script.py", line 2' in failed.stderr


def test_a_pipe_is_read_once_also_when_workers_are_started_anew(msrun: JobRunner, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", f"cat > pipe <<'END'\n{PROGRAM}END"], cwd=tmp_path):
        done = msrun.run("--worker_num=2", "--start_method=exec", "pipe", "x", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert done.log(1) == b"1 ['x'] __main__\n"


@pytest.mark.parametrize(
    ("words", "text", "told"),
    [
        (["-"], " \n", "-: no program came from there"),
        (["--rehearse=1x1", "-"], PROGRAM, "- and --rehearse: the script is read here, once; give a file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    msrun: JobRunner, tmp_path: Path, words: list[str], text: str, told: str
) -> None:
    done = pipe_into(msrun, tmp_path, *words, text=text)
    assert done.returncode == 2
    assert done.stderr.startswith(f"msrun: error: {told}") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "log_output").exists()


@pytest.mark.parametrize("how", one_fast("fork", "exec"))
def test_arguments_are_the_ranks_own_when_that_is_asked_for(msrun: JobRunner, tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--rehearse=2x1", "--rank_args", "--pass_local_rank", f"--start_method={how}"]
    done = msrun.run(*options, "train.py", "data-{rank}.bin", "{node_rank}{other}", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert done.log(1).decode() == "1 ['--local-rank=0', 'data-1.bin', '1{other}'] __main__\n"
    plain = msrun.run("--worker_num=1", "train.py", "{rank}", cwd=tmp_path)
    assert plain.log(0).decode() == "0 ['{rank}'] __main__\n"
