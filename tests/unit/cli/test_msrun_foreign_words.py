"""Words of other launchers and words in the wrong place: each is answered with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrun.cli import main
from msrun.cli.options import LONG_OPTIONS
from msrun.cli.words import (
    FOREIGN_OPTIONS,
    describe_late_options,
    describe_separate_value,
    reject_foreign_options,
)
from msrun.errors import UsageError
from msrun.planning.program import Program


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--mixed-precision=fp16", "t.py"], "--mixed-precision is accelerate's, .*leave it out: .*the script"),
        (["--gres=gpu:4", "t.py"], "--gres is srun's, .*leave it out: .*salloc"),
        (["--map-by", "core", "t.py"], "--map-by is mpirun's, .*did you mean --bind_core"),
        (["--worker_num", "2", "--export", "FOO", "t.py"], "--export is srun's, .*did you mean --env"),
    ],
)
def test_option_of_another_launcher_is_answered_with_ours(words: list[str], answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        reject_foreign_options(words)


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--nnodes", "2", "-n", "4"],
        ["--env", "-n", "train.py"],
        ["-m", "train", "-n", "4"],
        ["--", "train.py", "--standalone"],
    ],
)
def test_words_of_the_script_and_values_are_not_taken_for_options(words: list[str]) -> None:
    reject_foreign_options(words)


def test_every_answer_names_options_that_exist_and_none_hides_one_of_ours() -> None:
    assert not LONG_OPTIONS & set(FOREIGN_OPTIONS)
    for whose, here in FOREIGN_OPTIONS.values():
        assert whose.endswith("'s")
        named = {word.strip("(),;:") for word in here.split() if word.startswith("--")}
        assert named <= LONG_OPTIONS, here


def test_command_ends_with_2_and_one_line_for_an_option_of_another_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--mixed_precision=bf16", "train.py"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("msrun: error: --mixed_precision is accelerate's, not an option of msrun; leave it out")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--join", "false", "x.py"], "--join=false"),
        (["--worker_num", "2", "--quiet", "True", "x.py"], "--quiet=True"),
        (["--dry-run", "json", "x.py"], "--dry-run=json"),
        (["--hosts", "h1", "h2", "x.py"], "--hosts h1,h2"),
        (["--tail-worker-log", "0", "2", "x.py"], "--tail-worker-log 0,2"),
        (["--hosts", "h1", "hostname"], ""),
        (["--join", "x.py"], ""),
        (["--join=false", "x.py"], ""),
        (["--log_dir", "false", "x.py"], ""),
        (["false"], ""),
        (["--join", "--", "false"], ""),
        (["--join"], ""),
        ([], ""),
    ],
)
def test_value_after_a_space_is_noticed(words: list[str], hint: str) -> None:
    text = describe_separate_value(words)
    assert hint in text and bool(text) == bool(hint)


def test_program_that_is_there_under_such_a_name_is_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "true").touch()
    assert describe_separate_value(["--join", "true"]) == ""


@pytest.mark.parametrize(
    ("source", "args", "named"),
    [
        ("print(1)", ["--worker_num", "4", "--log-dir=x"], "--worker_num, --log_dir after train.py"),
        ("parser.add_argument('--log-dir')", ["--log_dir", "x"], ""),
        ("def main(log_dir): ...", ["--log-dir", "x"], ""),
        ("print(1)", ["--lr", "0.1", "worker_num"], ""),
        ("print(1)", ["--help", "--config=c.yaml"], ""),
    ],
)
def test_options_after_the_script_are_noticed_unless_the_script_speaks_of_them(
    tmp_path: Path, source: str, args: list[str], named: str
) -> None:
    (tmp_path / "train.py").write_text(source)
    text = describe_late_options(Program("script", str(tmp_path / "train.py"), tuple(args)))
    assert named in text and bool(text) == bool(named)


def test_words_of_an_executable_are_its_own() -> None:
    assert describe_late_options(Program("executable", "/bin/bash", ("job.sh", "--worker_num", "4"))) == ""
