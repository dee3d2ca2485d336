"""Code that --ship sends along: kept once, where the user may write and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from msrun.launch.remote.spool import NO_AGENT
from msrun.launch.transport.agent_code import attach_code, pack_msrun

CODE = attach_code({}, "0" * 16, 0, pack_msrun())
"""Ends at once: there is no agent to connect to."""


def start(folder: Path, home: str) -> None:
    """Run the code on a host with this home folder; its temporary folder is `folder`."""
    env = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", "import sys; exec(sys.stdin.buffer.read())"]
    done = subprocess.run(command, input=CODE, env=env, cwd=folder, capture_output=True, check=False)
    assert done.returncode == NO_AGENT, done.stderr


def test_code_is_kept_in_the_home_folder(tmp_path: Path) -> None:
    start(tmp_path, str(tmp_path / "home"))
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert [path.suffix for path in (tmp_path / "home/.cache/msrun").iterdir()] == [".zip"]


def test_code_is_kept_once_where_the_home_folder_cannot_be_written(tmp_path: Path) -> None:
    for _ in range(2):
        start(tmp_path, "/proc/nowhere")
    (kept,) = tmp_path.iterdir()
    assert kept.name == f"msrun-code-{os.geteuid()}" and kept.stat().st_mode & 0o777 == 0o700
    assert len(list(kept.iterdir())) == 1


@pytest.mark.parametrize(
    "squat",
    [Path.touch, lambda path: path.symlink_to("theirs"), lambda path: (path.mkdir(), path.chmod(0o777))],
    ids=["file", "link", "open folder"],
)
def test_folder_that_somebody_else_may_write_is_not_used(tmp_path: Path, squat: Callable[[Path], object]) -> None:
    taken = tmp_path / f"msrun-code-{os.geteuid()}"
    (tmp_path / "theirs").mkdir()
    squat(taken)
    start(tmp_path, "/proc/nowhere")
    assert not (taken.is_dir() and list(taken.iterdir())) and not list((tmp_path / "theirs").iterdir())
    assert len(list(tmp_path.glob("msrun-code-*/*.zip"))) == 1
