"""The words of the command line: which are msrun's own, and how they are spelled."""

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
from unittest import mock

import click
import pytest
from asked_cases import slow_but
from hypothesis import given
from hypothesis import strategies as st
from job_runner import REPOSITORY

from launch_templates.cli import main as launch_template
from msrun.cli import command, main
from msrun.cli.options import GROUPS, MOST_USED, OPTIONS
from msrun.cli.words import normalise
from msrun.errors import near_miss
from ranktable.cli import main as ranktable


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--join", "train.py"], ["--join=true", "train.py"]),
        (["--dry_run", "train.py"], ["--dry_run=text", "train.py"]),
        (["--log_dir", "--join", "train.py"], ["--log_dir", "--join", "train.py"]),
        (["--log-dir", "a-b", "--dry-run", "t.py"], ["--log-dir", "a-b", "--dry_run=text", "t.py"]),
        (["train.py", "--join", "--dry_run"], ["train.py", "--join", "--dry_run"]),
        (["-m", "pkg", "--dry_run"], ["-m", "pkg", "--dry_run"]),
        (["--quiet", "--join"], ["--quiet=true", "--join=true"]),
        ([], []),
    ],
)
def test_optional_values_are_filled_in_before_the_script_only(words, expected):
    assert normalise(words) == expected


@given(st.lists(st.sampled_from(["--join", "--dry_run", "--dry-run", "-m", "--", "x", "--debug", "--log_dir=a"])))
def test_words_of_the_script_are_never_touched(args):
    assert normalise(["--worker_num", "2", "train.py", *args]) == ["--worker_num", "2", "train.py", *args]


def test_every_option_is_also_spelled_with_dashes():
    for parameter in command.params:
        for spelling in parameter.opts:
            if spelling.startswith("--"):
                assert "--" + spelling[2:].replace("_", "-") in parameter.opts


@pytest.mark.parametrize(
    ("word", "hint"),
    [("--worker_nmu", " (did you mean --worker_num?)"), ("--log", " (did you mean --log_dir?)"), ("--verbose", "")],
)
def test_near_miss_is_hinted(word, hint):
    assert near_miss(word, ["--worker_num", "--log_dir", "--sim_device", "--device_target", "--version"]) == hint


def help_text():
    width = {"terminal_width": 110, "color": False}
    return command.get_help(click.Context(command, info_name="msrun", **{**command.context_settings, **width}))


def option_lines(text):
    options = click.unstyle(text).partition("Examples:")[0]
    return re.findall(r"^  (--?\w[\w-]*)", options, flags=re.MULTILINE)


def test_every_option_stands_in_one_group_and_on_one_line():
    assert len(OPTIONS) == len(set(OPTIONS))
    shown = option_lines(help_text())
    assert shown == [parameter.opts[0] for parameter in OPTIONS] + ["--version", "-h"]


def said(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return click.unstyle(capsys.readouterr().out)


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("--worker_num", "2", "--help", "train.py")])
def test_the_first_screen_has_the_most_used_options_and_says_where_the_others_are(capsys, words):
    text = said(capsys, *words)
    assert len(text.splitlines()) <= 25
    assert option_lines(text) == [parameter.opts[0] for parameter in GROUPS[MOST_USED]]
    assert "--help all" in text


@pytest.mark.parametrize("title", [title for title in GROUPS if title != MOST_USED])
def test_the_options_of_one_group_are_shown_alone(capsys, title):
    shown = option_lines(said(capsys, "--help", title.lower()))
    assert shown[: len(GROUPS[title])] == [parameter.opts[0] for parameter in GROUPS[title]]
    assert shown == option_lines(said(capsys, f"--help={title.upper()}".lower()))


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "is_shown"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colours_are_shown_on_a_terminal_only(capsys, monkeypatch, is_terminal, no_color, is_shown):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert ("\x1b[" in capsys.readouterr().out) == is_shown


@pytest.mark.parametrize(("command_name", "run"), [("ranktable", ranktable), ("launch-template", launch_template)])
def test_version_without_an_installation_is_said_to_be_unknown(capsys, monkeypatch, command_name, run):
    monkeypatch.setattr(importlib.metadata, "version", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    with contextlib.suppress(SystemExit):
        assert run(["--version"]) == 0
    said = f"{command_name}, version unknown: msrun is not installed, only on Python's path\n"
    assert capsys.readouterr() == (said, "")


def complete(*words):
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


@pytest.mark.parametrize(
    ("words", "proposed"),
    slow_but(
        ("--worker_n", "--join tr"),
        [
            ("--worker_n", "plain,--worker_num"),
            ("--worker-n", "plain,--worker-num"),
            ("--start_method f", "plain,fork"),
            ("--hostfile ho", "file,ho"),
            ("--worker_num 2 tr", "file,tr"),
            ("--join tr", "file,tr"),  # its value may be left out, so this is the script
        ],
        key=lambda words, _: words,
    ),
)
def test_options_values_and_files_are_proposed(words, proposed):
    assert complete(*words.split()) == [proposed]
