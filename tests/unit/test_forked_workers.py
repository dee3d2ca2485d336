"""pytest --workers: files of tests in forked processes, and what is said of them."""

import os
import re
import signal
import subprocess
import sys

import pytest
from job_runner import REPOSITORY, wait_until

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


def start(folder, *options, files=3, text=TESTS):
    (folder / "conftest.py").write_text('pytest_plugins = ["forked_workers", "parent"]\n')
    (folder / "parent.py").write_text(PARENT)  # what is imported once is the same in every worker
    for number in range(files):
        (folder / f"test_{number}.py").write_text(text)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options]
    path = os.pathsep.join([str(REPOSITORY / "tests" / "support"), str(folder)])
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=folder, env=os.environ | {"PYTHONPATH": path}, start_new_session=True, **outputs)


def run(*words, **settings):
    process = start(*words, **settings)
    said = process.communicate()[0]
    print(said)  # what pytest shows of a test that fails
    return process.returncode, said


def test_every_test_is_told_of_also_those_after_one_that_ended_its_worker(tmp_path):
    status, said = run(tmp_path, "--workers=2")
    assert status == 1
    assert re.search(r"6 failed, 9 passed, 3 skipped", said)
    assert "said" in said and "FAILED test_1.py::test_ends_its_worker - its worker ended with 3" in said
    made, ended = ({path.name.split("-")[1] for path in tmp_path.glob(f"{kind}-*")} for kind in ("made", "ended"))
    assert ended and ended <= made and len(made) <= 5  # once in each worker, ended in all that have ended well


@pytest.mark.slow
def test_run_ends_with_the_first_failure_where_that_is_asked(tmp_path):
    status, said = run(tmp_path, "--workers=2", "-x", files=9)
    assert status == 1 and len(re.findall(r"^FAILED", said, re.MULTILINE)) <= 2
    assert "passed" not in said.splitlines()[-1]


@pytest.mark.slow
def test_tests_whose_workers_end_before_them_are_missed(tmp_path):
    (tmp_path / "dying.py").write_text("import os\ndef pytest_worker_begins(session): os._exit(0)\n")
    status, said = run(tmp_path, "--workers=2", "-p", "forked_workers", "-p", "dying")
    assert status == 1 and "18 tests were not run, for their workers have ended: test_0.py" in said


@pytest.mark.slow
def test_interrupt_ends_all_workers_and_what_they_have_set_up(tmp_path):
    wait = "import time\ndef test_waits(one):\n    open(f'waits-{PARENT}-{os.getpid()}', 'x')\n    time.sleep(60)\n"
    process = start(tmp_path, "--workers=2", text=TESTS.partition("def ")[0] + wait)
    wait_until(lambda: len([*tmp_path.glob("waits-*")]) == 2, "both wait")
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == pytest.ExitCode.INTERRUPTED and "Traceback" not in said
    made, ended = ({path.name.split("-")[1] for path in tmp_path.glob(f"{kind}-*")} for kind in ("made", "ended"))
    assert made == ended and len(made) == 2
