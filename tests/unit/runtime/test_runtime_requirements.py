"""torch is the user's: missing, it is one line; of a version that is not tested, one warning."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import warnings

import pytest
from job_runner import REPOSITORY

from msrun import contract
from msrun.runtime import requirements
from msrun.runtime.requirements import describe_untested, warn_if_untested


@pytest.mark.parametrize("version", [*contract.TORCH_VERSIONS, "2.15.0+cpu", "2.12.1", "a build of mine", ""])
def test_tested_version_gives_no_warning(version: str) -> None:
    assert describe_untested(version) == ""


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu130", "3.0", "1.13"])
def test_other_version_is_named_with_the_tested_ones(version: str) -> None:
    assert describe_untested(version) == f"torch {version} is not tested with msrun.runtime; tested are 2.12 to 2.15"


@pytest.fixture
def new_torch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(requirements, "_has_warned", False)
    monkeypatch.setattr(requirements, "_torch_version", lambda: "2.99.0")
    return monkeypatch


def test_warning_comes_once(new_torch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning, match="torch 2.99.0 is not tested"):
        warn_if_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()


@pytest.mark.parametrize("who", [{"MSRUN_JOB_ID": "fork server"}, {"MSRUN_JOB_ID": "j", "RANK": "3"}, {"RANK": "1"}])
def test_fork_server_and_other_ranks_say_nothing(new_torch: pytest.MonkeyPatch, who: dict[str, str]) -> None:
    for name, value in who.items():
        new_torch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()
    new_torch.setenv("RANK", "0")
    with pytest.warns(RuntimeWarning, match="is not tested"):
        warn_if_untested()


def test_version_is_that_of_the_installed_torch() -> None:
    assert requirements._torch_version() == importlib.metadata.version("torch")


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
"""


def run_without_torch(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_missing_torch_is_one_line_with_the_remedy() -> None:
    done = run_without_torch("from msrun.runtime import init")
    assert done.returncode == 1
    assert done.stderr == (
        f"MissingPackageError: msrun.runtime needs torch, not installed for {sys.executable}; "
        "run: pip install 'msrun[runtime]'\n"
    )


def test_missing_torch_can_be_caught_as_an_import_error_and_other_errors_look_as_ever() -> None:
    done = run_without_torch("try:\n    import msrun.runtime\nexcept ImportError:\n    1 / 0")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
