"""Forms of SCRIPT, and arguments that reach it byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner

HOSTILE: list[bytes] = [
    b"",
    b"I'm 72\" tall",
    b"$HOME",
    b"`touch x`",
    b";touch x",
    b"$(touch x)",
    b"*",
    b"two\nlines",
    b"tab\tand\r",
    b"back\\slash\\",
    "emoji 🚀 ünï".encode(),
    b"--help",
    b"--worker_num=3",
    b"--dry_run",
    b"--join",
    b"-m",
    b"--",
    b"-",
    b"not utf-8 \xff\xfe",
    b"{0} %s %%",
    b"=",
]


def read_argv(path: Path) -> list[bytes]:
    return [word.encode("latin-1") for word in json.loads(path.read_text())["argv"]]


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_hostile_arguments_arrive_unchanged(msrun: JobRunner, workers: Path, odd_path: Path, method: str) -> None:
    finished = msrun.run("--worker_num=1", "--start_method", method, workers / "record.py", *HOSTILE, cwd=odd_path)
    assert finished.code == 0, finished.stderr
    assert read_argv(odd_path / "record_0.json") == [os.fsencode(workers / "record.py"), *HOSTILE]
    assert not (odd_path / "x").exists()


@pytest.mark.slow
def test_hostile_arguments_arrive_unchanged_at_a_shell_script(msrun: JobRunner, workers: Path, odd_path: Path) -> None:
    finished = msrun.run("--worker_num=2", workers / "record.sh", *HOSTILE, cwd=odd_path)
    assert finished.code == 0, finished.stderr
    for rank in (0, 1):
        assert (odd_path / f"args_{rank}").read_bytes().split(b"\0")[:-1] == HOSTILE
    assert not (odd_path / "x").exists()


def test_script_with_an_odd_name_in_an_odd_directory_runs(msrun: JobRunner, workers: Path, odd_path: Path) -> None:
    script = odd_path / "it's $1 ☃.py"
    script.write_bytes((workers / "record.py").read_bytes())
    finished = msrun.run("--worker_num=1", script.name, "a", cwd=odd_path)
    assert finished.code == 0, finished.stderr
    assert read_argv(odd_path / "record_0.json") == [os.fsencode(script.name), b"a"]


def python_forms(folder: Path) -> dict[str, list[str]]:
    """Return every way to name record.py, which is also package pkg's module rec, in `folder`."""
    return {
        "file": ["record.py"],
        "file in a folder": ["pkg/rec.py"],
        "-m": ["-m", "pkg.rec"],
        "python": ["python", "record.py"],
        "python3": ["python3", "record.py"],
        "python -u": ["python", "-u", "record.py"],
        "python -m": ["python", "-m", "pkg.rec"],
        "python -X": ["python", "-X", "dev", "record.py"],
        "this interpreter": [sys.executable, "record.py"],
        "double dash": ["--", "record.py"],
    }


@pytest.mark.parametrize("form", one_fast(*python_forms(Path())))
def test_every_form_of_a_python_program_runs_with_its_arguments(
    msrun: JobRunner, workers: Path, tmp_path: Path, form: str
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    for name in ("record.py", "pkg/rec.py"):
        (tmp_path / name).write_bytes((workers / "record.py").read_bytes())
    finished = msrun.run("--worker_num=2", *python_forms(tmp_path)[form], "--lr", "0.1", "-m", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    for rank in (0, 1):
        record = json.loads((tmp_path / f"record_{rank}.json").read_text())
        assert record["argv"][1:] == ["--lr", "0.1", "-m"]
        assert record["name"] == "__main__"


@pytest.mark.slow
@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_module_sees_what_python_m_gives(msrun: JobRunner, workers: Path, tmp_path: Path, method: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "rec.py").write_bytes((workers / "record.py").read_bytes())
    finished = msrun.run("--worker_num=1", "--start_method", method, "-m", "pkg.rec", "x", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    record = json.loads((tmp_path / "record_0.json").read_text())
    assert record["argv"] == [str(tmp_path / "pkg" / "rec.py"), "x"]
    assert record["path"][0] == str(tmp_path)


@pytest.mark.slow
def test_pytest_runs_a_file_of_tests_on_every_rank(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text(
        "import os\ndef test_rank():\n    open('seen_' + os.environ['RANK'], 'w').close()\n"
        "def test_wrong():\n    assert os.environ['RANK'] == '0'\n"
    )
    finished = msrun.run("--worker_num=2", "pytest", "-q", "-p", "no:cacheprovider", "case.py", cwd=tmp_path)
    assert finished.code == 1
    assert finished.read_json("failure.json")["first_failure"]["global_rank"] == 1
    assert (tmp_path / "seen_0").exists() and (tmp_path / "seen_1").exists()
    assert b"assert os.environ['RANK'] == '0'" in finished.log(1)


def test_command_on_path_runs(msrun: JobRunner, tmp_path: Path) -> None:
    finished = msrun.run("--worker_num=2", "sh", "-c", 'echo "rank $RANK: $0 $1"', "a", "b c", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert [finished.log(rank) for rank in (0, 1)] == [b"rank 0: a b c\n", b"rank 1: a b c\n"]


@pytest.mark.slow
def test_executable_starts_with_the_signals_that_a_shell_gives(msrun: JobRunner, tmp_path: Path) -> None:
    command = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]
    finished = msrun.run("--worker_num=1", *command, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    # What this very machine gives a fresh process: a terminal or a service may ignore some signals for all it starts.
    plain = subprocess.run(command, capture_output=True, check=True, env=msrun.environ())
    assert finished.log(0) == plain.stdout


@pytest.mark.slow
def test_script_of_the_working_directory_wins_over_a_module_of_the_callers(msrun: JobRunner, tmp_path: Path) -> None:
    """The fork server never imports from the directory that msrun is typed in."""
    (tmp_path / "click.py").write_text("raise SystemExit('wrong click')\n")
    (tmp_path / "train.py").write_text("import json; print(json.dumps([1]))\n")
    assert msrun.run("--worker_num=1", "train.py", cwd=tmp_path, command=command_without_cwd()).code == 0


def command_without_cwd() -> list[str]:
    """Return a command that starts msrun as its console script does: without '' on the module path."""
    return [sys.executable, "-P", "-c", "from msrun.cli import main; main()"]


@pytest.mark.slow
def test_job_runs_with_python_safe_path(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.run(
        "--worker_num=1",
        workers / "record.py",
        cwd=tmp_path,
        env={"PYTHONSAFEPATH": "1"},
        command=command_without_cwd(),
    )
    assert finished.code == 0, finished.stderr
    assert str(workers) not in json.loads((tmp_path / "record_0.json").read_text())["path"]
