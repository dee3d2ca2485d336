"""Completion in the shells: what is proposed, and where the script of each shell is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_runner import REPOSITORY

from msrun.cli import command, main
from msrun.cli.commands import install_completion
from msrun.errors import UsageError


def complete(*words: str) -> list[str]:
    """Return what bash is told for the last of the words, as `kind,value`."""
    env = {"COMP_WORDS": " ".join(["msrun", *words]), "COMP_CWORD": str(len(words)), "_MSRUN_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-c", "from msrun.cli import main; main()"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_options_values_and_files_are_proposed() -> None:
    assert complete("--worker_n") == ["plain,--worker_num"]
    assert complete("--worker-n") == ["plain,--worker-num"]
    assert complete("--start_method", "f") == ["plain,fork"]
    assert complete("--hostfile", "ho") == ["file,ho"]
    assert complete("--worker_num", "2", "tr") == ["file,tr"]
    assert complete("--join", "tr") == ["file,tr"]  # its value may be left out, so this is the script


@pytest.mark.parametrize(
    ("shell", "place", "words"),
    [
        ("bash", ".local/share/bash-completion/completions/msrun", "complete -o nosort -F _msrun_completion msrun"),
        ("zsh", ".zfunc/_msrun", "#compdef msrun"),
        ("fish", ".config/fish/completions/msrun.fish", "function _msrun_completion"),
    ],
)
def test_script_is_written_where_the_shell_looks(tmp_path: Path, shell: str, place: str, words: str) -> None:
    text = install_completion(command, "auto", {"HOME": str(tmp_path), "SHELL": f"/usr/bin/{shell}"})
    assert words in (tmp_path / place).read_text()
    assert f"wrote {tmp_path / place}" in text
    assert install_completion(command, shell, {"HOME": str(tmp_path)}) == text


@pytest.mark.parametrize("environ", [{"SHELL": "/bin/tcsh"}, {}])
def test_other_shells_are_refused(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not one of bash, zsh, fish; give one"):
        install_completion(command, "auto", {"HOME": str(tmp_path), **environ})
    assert list(tmp_path.iterdir()) == []


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".zfunc").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write .*/\.zfunc/_msrun"):
        install_completion(command, "zsh", {"HOME": str(tmp_path)})


def test_command_installs_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main(["--install-completion=zsh"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path}/.zfunc/_msrun\n")
