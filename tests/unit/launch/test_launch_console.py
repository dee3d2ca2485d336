"""What a console of workers shows, and how; its readers may go."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from msrun.cluster.membership import Membership
from msrun.launch import console, log_tail, output
from msrun.launch.console import Console
from msrun.launch.output import discard_output
from msrun.planning.build import build_plan
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec


def test_discarded_output_is_written_nowhere_and_without_an_error() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        discard_output(stream)
        stream.write("into nothing")


class Screen:
    """A console of two workers whose logs the test writes, and what it prints."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        spec = LaunchSpec(
            program=Program("script", "x.py"),
            worker_num=2,
            local_worker_num=2,
            working_directory=folder,
            log_dir=folder,
            **{"tail_ranks": (0, 1), **options},
        )
        facts = HostFacts("h", "127.0.0.1", (0,))
        plan = build_plan(spec, facts, caller={}, job_id="J", run_dir="/tmp/r", master_port=1)
        self.folder = folder
        self.lines: list[str] = []
        self.text = ""
        self.said: list[str] = []
        monkeypatch.setattr(output, "write", lambda _, data, **__: self._write(data.decode()))
        monkeypatch.setattr(output, "say_lines", self.said.append)
        self.console = Console(plan, **{"quiet": False, **settings})

    def _write(self, text: str) -> None:
        self.text += text
        self.lines += text.splitlines()

    def raw(self) -> str:
        """Return what a moment shows, with the control sequences."""
        self.text = ""
        self.shown()
        return self.text

    def write(self, rank: int, text: str) -> None:
        with (self.folder / f"worker_{rank}.log").open("a") as file:
            file.write(text)

    def run(self) -> None:
        """All workers run: from here on there may be a live line."""
        self.console.note("running", {})

    def shown(self) -> list[str]:
        self.lines.clear()
        self.console.tick(Membership(range(2)))
        return list(self.lines)

    def close(self) -> None:
        for tail in self.console._tails:
            tail.close()


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    with closing(Screen(tmp_path, monkeypatch)) as screen:
        yield screen


def test_lines_of_workers_are_shown_with_their_rank_as_they_come(screen: Screen) -> None:
    screen.write(0, "a\nb")
    screen.write(1, "c\n")
    assert sorted(screen.shown()) == ["[h:0] a", "[h:1] c"]
    screen.write(0, "b\n")
    assert screen.shown() == ["[h:0] bb"]
    assert screen.shown() == []


def test_log_that_has_nothing_more_is_read_once_in_a_turn(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    copy = screen.console._copy
    monkeypatch.setattr(screen.console, "_copy", lambda tail: (read.append(tail.global_rank), copy(tail)))
    screen.write(0, "a\n")
    screen.shown()
    assert sorted(read) == [0, 1]


def test_long_log_is_read_on_while_there_is_time(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "ROOM_BYTES", 4)
    monkeypatch.setattr(console, "COPY_S", 60.0)
    screen.write(0, "aa\nbb\ncc\ndd\n")
    assert screen.shown() == [f"[h:0] {letter * 2}" for letter in "abcd"]


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("ready", {"reason": "threads were started"}, ["workers start by exec, not by fork: threads were started"]),
        ("ready", {"reason": "asked for"}, []),
        ("ready", {"reason": ""}, []),
        ("note", {"text": "node 1 registered"}, ["node 1 registered"]),
        ("waiting", {"text": "waiting for h2"}, ["waiting for h2"]),
        ("signal", {"name": "SIGUSR1", "global_ranks": [0, 1]}, ["signal SIGUSR1 passed on to 2 workers"]),
        ("log_lost", {"reason": "disk full", "lost_bytes": {"1": 7}}, ["(disk full): lost 7 bytes of rank 1"]),
        ("stopping", {"reason": "rank 1 ended"}, ["stopping all workers: rank 1 ended"]),
        ("started", {"global_rank": 0, "pid": 1}, []),
    ],
)
def test_moments_that_a_user_wants_to_know_are_said(
    screen: Screen, kind: str, fields: dict[str, Any], said: list[str]
) -> None:
    screen.console.note(kind, fields)
    assert len(screen.said) == len(said)
    assert all(text in line for text, line in zip(said, screen.said, strict=True))


def test_quiet_console_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(tmp_path, monkeypatch, quiet=True)
    screen.console.note("stopping", {"reason": "x"})
    screen.console.note("restarting", {"reason": "x", "delay_s": 0.0, "attempt": 1, "global_ranks": [1]})
    assert screen.said == []


def test_last_lines_of_an_attempt_come_before_those_of_the_next(screen: Screen) -> None:
    screen.write(0, "last, without an end")
    screen.console.note("restarting", {"reason": "rank 1 failed", "delay_s": 1.0, "attempt": 1, "global_ranks": [1]})
    assert screen.lines == ["[h:0] last, without an end"]
    said = "\n".join(screen.said)
    assert "rank 1 failed; starting all workers again in 1 s, restart 1" in said
    assert f"  rank 1, log: {screen.folder}/worker_1.attempt_0.log" in said
    (screen.folder / "worker_0.log").rename(screen.folder / "worker_0.attempt_0.log")
    screen.write(0, "first of the next\n")
    assert screen.shown() == ["[h:0] first of the next"]


@pytest.mark.parametrize("log_max", [{}, {"log_max_bytes": 1 << 20}], ids=["plain", "rotated"])
def test_log_that_grows_on_after_a_restart_until_it_is_renamed_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_max: dict[str, int]
) -> None:
    """Logs of other hosts come over the network, and are renamed when the next attempt's first bytes are there."""
    screen = Screen(tmp_path, monkeypatch, log_max)
    screen.write(0, "early\n")
    screen.write(1, "early\n")
    screen.shown()
    screen.console.note("restarting", {"reason": "rank 1 failed", "delay_s": 1.0, "attempt": 1, "global_ranks": [1]})
    assert screen.shown() == []
    screen.write(0, "late\n")
    assert screen.shown() == ["[h:0] late"]
    screen.write(0, "last\n")
    (screen.folder / "worker_0.log").rename(screen.folder / "worker_0.attempt_0.log")
    screen.write(0, "again\n")
    assert screen.shown() == ["[h:0] last", "[h:0] again"]
    screen.lines.clear()
    screen.console.finish("")
    assert screen.lines == [], "rank 1 wrote nothing more"


def test_live_line_makes_room_for_the_lines_of_workers(screen: Screen) -> None:
    screen.console._live = (output.STDERR, b"2 of 2 up")
    screen.write(0, "a\n")
    assert screen.shown() == ["", "\x1b[K", "[h:0] a"], "a carriage return, and the line is erased"
    screen.write(0, "b\n")
    assert screen.shown() == ["[h:0] b"], "once"


BAR = "\r 5%|#   |\r10%|##  |"


def test_bar_among_several_ranks_is_a_line_of_its_own_now_and_then(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen.write(0, BAR)
    assert screen.shown() == [], "short bars show their last state alone"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + log_tail.STATE_S)
    assert screen.shown() == ["[h:0] 10%|##  |"]
    assert screen.shown() == [], "it has not changed"
    screen.write(0, "\r15%|### |")
    assert screen.shown() == [], "it is not time"
    screen.write(0, "\r99%|####|\nnext\n")
    assert screen.shown() == ["[h:0] 99%|####|", "[h:0] next"], "its last state always"


def test_last_state_of_a_bar_is_shown_at_the_end(screen: Screen) -> None:
    screen.write(0, BAR)
    screen.shown()
    screen.console.finish("")
    assert screen.lines[-1] == "[h:0] 10%|##  |"


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """A terminal of 12 columns that shows rank 0."""
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setattr(output, "is_idle", lambda *_: True)
    with closing(Screen(tmp_path, monkeypatch, {"tail_ranks": (0,)})) as screen:
        yield screen


def test_bar_of_the_rank_on_the_terminal_is_the_live_line(terminal: Screen) -> None:
    terminal.run()
    terminal.write(0, BAR)
    assert terminal.raw() == "\r\x1b[K10%|##  |"
    assert terminal.raw() == "", "it has not changed"
    terminal.write(0, "\r20%|##  | and more than fits")
    assert terminal.raw() == "\r\x1b[K20%|##  | a"
    terminal.write(0, "\rdone\n")
    assert terminal.raw().startswith("\r\x1b[Kdone\n\r\x1b[Kmsrun: "), "then msrun's own live line is back"


def test_raw_bytes_of_one_rank_are_shown_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Screen(tmp_path, monkeypatch, {"tail_ranks": (0,)}, is_raw=True)) as screen:
        screen.write(0, BAR)
        assert screen.raw() == BAR
        screen.write(0, "\x1b[2J no end")
        screen.shown()
        screen.console.finish("")
        assert screen.text == BAR + "\x1b[2J no end"


def test_raw_pieces_of_several_ranks_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Screen(tmp_path, monkeypatch, is_raw=True)) as screen:
        screen.write(0, "a\r\nb")
        screen.write(1, "5%\r10%")
        assert screen.raw() in ("[h:0] a\r\n[h:1] 5%\r", "[h:1] 5%\r[h:0] a\r\n")
        screen.text = ""
        screen.console.finish("")
        assert screen.text == "[h:0] b[h:1] 10%"
