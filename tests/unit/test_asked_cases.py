"""A job runs the cases that the chosen tests look at, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_runner import REPOSITORY

MODULE = """
import json
import pytest
from asked_cases import ONLY_CASES, CaseTable, one_fast

TABLE = CaseTable(["a/1", "a/2", "b/1", "law"], fast=["a/1", "b/1"])

@pytest.fixture(scope="module")
def job(request):
    with open("asked.json", "w") as file:
        file.write(TABLE.asked(request)[ONLY_CASES])

@TABLE.parametrize("name, number", [("a", 1), ("a", 2), ("b", 1)])
def test_case(job, name, number):
    pass

@TABLE.looks_at("law")
def test_law(job):
    pass

@pytest.mark.parametrize("part", one_fast("left", "right"))
def test_of_the_fast_ones(job, part):
    pass
"""


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        pytest.param([], ["a/1", "a/2", "b/1", "law"], marks=pytest.mark.slow),
        (["-m", "not slow"], ["a/1", "b/1"]),
        (["-m", "slow", "-k", "case or law"], ["a/2", "law"]),
        pytest.param(["-k", "a-2"], ["a/2"], marks=pytest.mark.slow),
        pytest.param(["-k", "law"], ["law"], marks=pytest.mark.slow),
        (["-k", "left"], ["a/1", "b/1"]),
        pytest.param(["-k", "right"], ["a/1", "a/2", "b/1", "law"], marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value),
)
def test_chosen_tests_say_what_a_job_runs(tmp_path: Path, words: list[str], asked: list[str]) -> None:
    (tmp_path / "test_module.py").write_text(MODULE)
    markers = ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *markers, *words],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY / "tests" / "support")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "asked.json").read_text()) == asked


def test_case_that_is_not_in_the_table_is_refused() -> None:
    from asked_cases import CaseTable

    with pytest.raises(AssertionError, match="no such cases: \\['lwa'\\]"):
        CaseTable(["law"], fast=[]).looks_at("lwa")
