"""Several programs in one job: `msrun -n 1 a.py : -n 3 b.py`, with roles as torchelastic's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_runner import JobRunner

SAYS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
with open("rank_" + os.environ["RANK"], "w") as file:
    json.dump([os.path.basename(sys.argv[0]), sys.argv[1:], *(os.environ[name] for name in names)], file)
"""


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(SAYS)
    (tmp_path / "c.sh").write_text('#!/bin/sh\necho "$RANK $ROLE_NAME $*" > shell_$RANK\n')
    (tmp_path / "c.sh").chmod(0o755)
    return tmp_path


def said(cwd: Path) -> list[list[object]]:
    return [json.loads(path.read_text()) for path in sorted(cwd.glob("rank_*"))]


@pytest.mark.parametrize("where", [(), ("--rehearse=2x2",)], ids=["one host", "two hosts"])
def test_each_rank_runs_its_program_with_its_role(msrun: JobRunner, cwd: Path, where: tuple[str, ...]) -> None:
    words = ("-n", "1", "--role=actor", "a.py", "x", ":", "-n", "3", "--role=learner", "-m", "b", "y", ":", "z")
    job = msrun.run(*where, *words, cwd=cwd)
    assert job.code == 0, job.stderr
    learners = [["b.py", ["y", ":", "z"], str(rank), "4", "learner", str(rank - 1), "3"] for rank in (1, 2, 3)]
    assert said(cwd) == [["a.py", ["x"], "0", "4", "actor", "0", "1"], *learners]


def test_a_program_that_is_no_python_stands_beside_one_that_is(msrun: JobRunner, cwd: Path) -> None:
    job = msrun.run("-n", "2", "a.py", ":", "--worker_num=1", "./c.sh", "1", ":", "-np", "1", "b.py", cwd=cwd)
    assert job.code == 0, job.stderr
    assert [found[0] for found in said(cwd)] == ["a.py", "a.py", "b.py"]
    assert [found[4:] for found in said(cwd)] == [["default", str(rank), "4"] for rank in (0, 1, 3)]
    assert (cwd / "shell_2").read_text() == "2 default 1\n"


def test_the_role_of_the_only_program_is_that_of_all_workers(msrun: JobRunner, cwd: Path) -> None:
    job = msrun.run("--worker_num=2", "--role", "trainer", "a.py", cwd=cwd)
    assert job.code == 0, job.stderr
    assert [found[4:] for found in said(cwd)] == [["trainer", "0", "2"], ["trainer", "1", "2"]]


def test_the_plan_names_the_ranks_of_each_program(msrun: JobRunner, cwd: Path) -> None:
    words = ("-n", "1", "a.py", "--password=secret", ":", "-n", "3", "b.py", "--api_key=geheim")
    plan = msrun.run("--dry_run", *words, cwd=cwd).stdout.decode()
    assert "a.py" in plan and "(ranks 0, role default)" in plan
    assert "(ranks 1-3, role default)" in plan
    assert "geheim" not in plan


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("a.py", ":", "-n", "1", "b.py"), "give each its number of workers"),
        (("-n", "1", "a.py", ":", "-n", "0", "b.py"), "-n 0: give the number of workers"),
        (("-n", "1", "a.py", ":", "-n", "2"), "give a number of workers and a program"),
        (("-n", "1", "a.py", ":", "--role=x", "b.py"), "give a number of workers and a program"),
        (("-n", "1", "a.py", ":", "-n", "1", "--grace=3", "b.py"), "--grace after a colon"),
        (("-n", "1", "a.py", ":", "-n", "1", "d.py"), "d.py: no such file"),
        (("-n", "1", "a.py", ":", "-n", "1", "b.py", ":", "-n", "x", "b.py"), "-n x: give the number"),
    ],
)
def test_a_program_that_cannot_be_read_is_refused(
    msrun: JobRunner, cwd: Path, words: tuple[str, ...], remedy: str
) -> None:
    job = msrun.run(*words, cwd=cwd)
    assert (job.code, len(job.stderr.splitlines())) == (2, 1)
    assert remedy in job.stderr
    assert not list(cwd.glob("rank_*"))
