"""pytest --workers: files of tests in forked processes, and what is said of them."""

import os
import re
import subprocess
import sys

from job_runner import REPOSITORY

PARENT = """
import os, pytest

PARENT = os.getpid()

@pytest.fixture(scope="session")
def one():
    open(f"made-{os.getpid()}", "x")
    yield
    open(f"ended-{os.getpid()}", "x")
"""
TESTS = """
import os, pytest
from parent import PARENT

def test_fails():
    print("said")
    assert 1 == 2

def test_ends_its_worker():
    os._exit(3)

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

@pytest.mark.parametrize("number", range(3))
def test_passes(number, one, tmp_path):
    assert os.getppid() == PARENT
"""


def run(folder, *options, files=3):
    (folder / "conftest.py").write_text('pytest_plugins = ["forked_workers", "parent"]\n')
    (folder / "parent.py").write_text(PARENT)  # what is imported once is the same in every worker
    for number in range(files):
        (folder / f"test_{number}.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options]
    path = os.pathsep.join([str(REPOSITORY / "tests" / "support"), str(folder)])
    done = subprocess.run(words, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    print(done.stdout, done.stderr)  # what pytest shows of a test that fails
    return done.returncode, done.stdout


def test_every_test_is_told_of_also_those_after_one_that_ended_its_worker(tmp_path):
    status, said = run(tmp_path, "--workers=2")
    assert status == 1
    assert re.search(r"6 failed, 9 passed, 3 skipped", said)
    assert "said" in said and "FAILED test_1.py::test_ends_its_worker - its worker ended with 3" in said
    made, ended = ({path.name.split("-")[1] for path in tmp_path.glob(f"{kind}-*")} for kind in ("made", "ended"))
    assert ended and ended <= made and len(made) <= 5  # once in each worker, ended in all that have ended well


def test_run_ends_with_the_first_failure_where_that_is_asked(tmp_path):
    status, said = run(tmp_path, "--workers=2", "-x", files=9)
    assert status == 1 and len(re.findall(r"^FAILED", said, re.MULTILINE)) <= 2
    assert "passed" not in said.splitlines()[-1]
