"""The words of the command line: which are msrun's own, and how they are spelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cli import command, main
from msrun.cli.words import normalise
from msrun.errors import MsrunError, near_miss


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--join", "train.py"], ["--join=true", "train.py"]),
        (["--join=False", "train.py"], ["--join=False", "train.py"]),
        (["--dry_run", "train.py"], ["--dry_run=text", "train.py"]),
        (["--dry-run", "train.py"], ["--dry_run=text", "train.py"]),
        (["--dry-run=json", "train.py"], ["--dry-run=json", "train.py"]),
        (["--log_dir", "--join", "train.py"], ["--log_dir", "--join", "train.py"]),
        (["--log-dir", "a-b", "--dry-run", "t.py"], ["--log-dir", "a-b", "--dry_run=text", "t.py"]),
        (["train.py", "--join", "--dry_run"], ["train.py", "--join", "--dry_run"]),
        (["-m", "pkg", "--dry_run"], ["-m", "pkg", "--dry_run"]),
        (["--", "train.py", "--join"], ["--", "train.py", "--join"]),
        (["--quiet", "--join"], ["--quiet=true", "--join=true"]),
        (["--worker_num"], ["--worker_num"]),
        ([], []),
    ],
)
def test_optional_values_are_filled_in_before_the_script_only(words: list[str], expected: list[str]) -> None:
    assert normalise(words) == expected


@given(st.lists(st.sampled_from(["--join", "--dry_run", "--dry-run", "-m", "--", "x", "--debug", "--log_dir=a"])))
def test_words_of_the_script_are_never_touched(args: list[str]) -> None:
    assert normalise(["--worker_num", "2", "train.py", *args]) == ["--worker_num", "2", "train.py", *args]


def test_every_option_is_also_spelled_with_dashes() -> None:
    for parameter in command.params:
        for spelling in parameter.opts:
            if spelling.startswith("--"):
                assert "--" + spelling[2:].replace("_", "-") in parameter.opts


def test_help_shows_every_option_once_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help", "all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for parameter in command.params:
        if parameter.opts and parameter.opts[0].startswith("--"):
            assert f"{parameter.opts[0]}" in text
    assert "msrun --worker_num 8 train.py --lr 0.1" in text


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import msrun

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"msrun, version {msrun.__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--worker_nmu", " (did you mean --worker_num?)"),
        ("--log", " (did you mean --log_dir?)"),
        ("--device", " (did you mean --device_target?)"),
        ("--verbose", ""),
        ("zzz", ""),
    ],
)
def test_near_miss_is_hinted(word: str, hint: str) -> None:
    assert near_miss(word, ["--worker_num", "--log_dir", "--sim_device", "--device_target", "--version"]) == hint


def test_every_error_has_an_exit_code_and_a_place_in_the_drawing() -> None:
    import msrun.errors

    assert msrun.errors.__doc__ is not None
    for kind in vars(msrun.errors).values():
        if isinstance(kind, type) and issubclass(kind, MsrunError):
            assert kind.__name__ in msrun.errors.__doc__
