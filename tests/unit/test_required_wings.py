"""A skip of a wing that REQUIRE names is a failure, of any other a skip as before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from job_runner import REPOSITORY
from required_wings import WINGS

TESTS = """
import pytest

def test_hosts():
    pytest.skip("cannot make hosts: no ip")

@pytest.mark.skipif(True, reason="there is no mpirun; apt-get install openmpi-bin")
def test_mpirun():
    pass

def test_other():
    pytest.skip("no IPv6 here")

@pytest.mark.xfail(reason="cannot make hosts")
def test_expected_to_fail():
    assert False
"""
MODULE = "import pytest\npytest.skip(\"timm not installed: pip install -e '.[test,zoo]'\", allow_module_level=True)\n"


def run(folder: Path, require: str) -> str:
    (folder / "test_skips.py").write_text(TESTS)
    (folder / "test_module.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "required_wings", str(folder)]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY / "tests" / "support"), "REQUIRE": require}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("require", "end"),
    [
        ("", r"4 skipped, 1 xfailed"),
        ("mpirun", r"3 skipped, 1 xfailed, 1 error"),
        ("hosts, mpirun", r"1 failed, 2 skipped, 1 xfailed, 1 error"),
        ("zoo", r"1 error"),
        ("zoology", r"REQUIRE: no such wing: zoology; there are hosts, mpirun"),
    ],
)
def test_skips_of_required_wings_fail(tmp_path: Path, require: str, end: str) -> None:
    assert re.search(end, run(tmp_path, require))


@pytest.mark.parametrize("wing", WINGS)
def test_wing_has_tests_that_may_be_skipped_with_its_words(wing: str) -> None:
    texts = [path.read_text() for path in (REPOSITORY / "tests").rglob("*.py") if path.stem != "test_required_wings"]
    skips = [line for text in texts for line in text.splitlines() if "skip" in line or "installed" in line]
    assert any(re.search(WINGS[wing], line) for line in skips)
