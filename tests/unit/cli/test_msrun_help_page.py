"""--help: groups, the most used options first, each option once, colours on a terminal only."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys

import click
import pytest
from job_runner import REPOSITORY

from msrun.cli import command, main
from msrun.cli.options import GROUPS, MOST_USED, OPTIONS


def help_text() -> str:
    width = {"terminal_width": 110, "color": False}
    return command.get_help(click.Context(command, info_name="msrun", **{**command.context_settings, **width}))


def option_lines(text: str) -> list[str]:
    options = click.unstyle(text).partition("Examples:")[0]
    return re.findall(r"^  (--?\w[\w-]*)", options, flags=re.MULTILINE)


def test_every_option_stands_in_one_group_and_on_one_line() -> None:
    assert len(OPTIONS) == len(set(OPTIONS))
    shown = option_lines(help_text())
    assert shown == [parameter.opts[0] for parameter in OPTIONS] + ["--version", "-h"]


def test_groups_come_in_order_and_begin_with_the_five_most_used() -> None:
    text = click.unstyle(help_text())
    titles = [title for title in re.findall(r"^([A-Z][A-Za-z ]+):$", text, flags=re.MULTILINE) if title in GROUPS]
    assert titles == list(GROUPS) and titles[0] == MOST_USED
    assert [parameter.name for parameter in GROUPS[MOST_USED]] == [
        "worker_num",
        "hosts",
        "log_dir",
        "tail_worker_log",
        "dry_run",
    ]


def test_every_option_has_help_of_one_or_two_sentences() -> None:
    for parameter in OPTIONS:
        assert isinstance(parameter, click.Option) and parameter.help
        assert parameter.help[0].isupper() or parameter.help.startswith("fork:"), parameter.help


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return click.unstyle(capsys.readouterr().out)


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("--worker_num", "2", "--help", "train.py")])
def test_the_first_screen_has_the_most_used_options_and_says_where_the_others_are(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    text = said(capsys, *words)
    assert len(text.splitlines()) <= 25
    assert option_lines(text) == [parameter.opts[0] for parameter in GROUPS[MOST_USED]]
    assert "--help all" in text


@pytest.mark.parametrize("title", [title for title in GROUPS if title != MOST_USED])
def test_the_options_of_one_group_are_shown_alone(capsys: pytest.CaptureFixture[str], title: str) -> None:
    shown = option_lines(said(capsys, "--help", title.lower()))
    assert shown[: len(GROUPS[title])] == [parameter.opts[0] for parameter in GROUPS[title]]
    assert shown == option_lines(said(capsys, f"--help={title.upper()}".lower()))


def test_all_options_are_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert {parameter.opts[0] for parameter in OPTIONS} < set(option_lines(said(capsys, "--help", "all")))


def read_from_terminal(**env: str) -> bytes:
    ours, theirs = pty.openpty()
    page = subprocess.Popen(
        [sys.executable, "-m", "msrun", "--help"],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", **env},
        stdout=theirs,
    )
    os.close(theirs)
    text = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # which is how a terminal ends
        while part := terminal.read(1 << 16):
            text += part
    assert page.wait(60) == 0
    return text


def test_colours_are_shown_on_a_terminal_only() -> None:
    assert b"\x1b[" in read_from_terminal()
    assert b"\x1b[" not in read_from_terminal(NO_COLOR="1")
    done = subprocess.run(
        [sys.executable, "-m", "msrun", "--help"], cwd=REPOSITORY, capture_output=True, timeout=60, check=True
    )
    assert b"\x1b[" not in done.stdout
    assert done.stdout.endswith(b"\n")


@pytest.mark.parametrize("title", list(GROUPS))
def test_no_group_is_empty(title: str) -> None:
    assert GROUPS[title]
