"""A user's package may be called msrun, too: PYTHONPATH with it breaks no process of ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import REPOSITORY, JobRunner

COMMAND = (sys.executable, str(REPOSITORY / "msrun_command.py"))
"""As the installed command does: its own folder, and not the current one, is where the interpreter looks first."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    package = tmp_path / "msrun"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'of the user'\n")
    (tmp_path / "plain.py").write_text("print('begins')\n")
    (tmp_path / "theirs.py").write_text("from msrun import NAME\nprint(NAME)\n")
    return tmp_path


def path(*folders: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(folders)}


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
@pytest.mark.parametrize("options", [[], ["--log_max_bytes=4K"]], ids=["", "rotated"])
def test_jobs_run(msrun: JobRunner, project: Path, method: str, options: list[str]) -> None:
    words = ["--worker_num=2", f"--start_method={method}", *options, "plain.py"]
    job = msrun.run(*words, cwd=project, command=COMMAND, env=path(".", str(REPOSITORY)))
    assert job.code == 0, job.stderr
    assert job.log(1) == b"begins\n"


@pytest.mark.slow
def test_the_script_has_its_own_where_workers_start_by_exec(msrun: JobRunner, project: Path) -> None:
    words = ["--worker_num=1", "--start_method=exec", "theirs.py"]
    job = msrun.run(*words, cwd=project, command=COMMAND, env=path(".", str(REPOSITORY)))
    assert job.code == 0, job.stderr
    assert job.log(0) == b"of the user\n"
    assert "package" not in job.stderr


@pytest.mark.parametrize(
    "env", one_fast(path(".", str(REPOSITORY)), path(str(REPOSITORY))), ids=["PYTHONPATH", "beside"]
)
def test_one_line_says_where_it_cannot(msrun: JobRunner, project: Path, env: dict[str, str]) -> None:
    job = msrun.run("--worker_num=1", "theirs.py", cwd=project, command=COMMAND, env=env)
    assert job.code == 1
    (line,) = [line for line in job.stderr.splitlines() if "package" in line]
    assert line.startswith(f"msrun: {project}/msrun: workers import msrun's own package of that name")
    assert "--start_method exec" in line


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
@pytest.mark.parametrize("options", one_fast(["--log_max_bytes=4K"], ["--join=True"], ["--join=False"]))
def test_nothing_is_left_open(msrun: JobRunner, project: Path, method: str, options: list[str]) -> None:
    words = ["--worker_num=2", f"--start_method={method}", *options, "plain.py"]
    job = msrun.start(*words, cwd=project, command=COMMAND, env={"PYTHONWARNINGS": "error"}).finish()
    assert job.code == 0, job.stderr
    msrun.prove_nothing_left()
    said = [job.stderr, *(log.read_text() for log in job.log_dir.glob("*.log"))]
    assert [text for text in said if "Warning" in text] == []
