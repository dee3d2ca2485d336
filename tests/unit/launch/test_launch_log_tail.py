"""Pieces of a growing log: whole lines, states of a progress bar, or the bytes as they are."""

from __future__ import annotations

import tempfile
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.launch.log_tail import MAX_HELD_BYTES, STATE_S, Cutter, LineCutter, LogTail, RawLineCutter

PIECES = st.lists(st.one_of(st.binary(max_size=30), st.sampled_from([b"\r", b"\n", b"\r\n", b"ab\r"])), max_size=12)


@given(PIECES)
def test_lines_come_whole_however_the_file_grows(pieces: list[bytes]) -> None:
    with tempfile.NamedTemporaryFile() as file, closing(LogTail(0, file.name)) as tail:
        lines = []
        for piece in pieces:
            file.write(piece)
            file.flush()
            lines += tail.read()
        lines += tail.read(at_end=True)
    whole = b"".join(pieces)
    expected = whole.split(b"\n") if not whole.endswith(b"\n") else whole.split(b"\n")[:-1]
    last_states = [line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in expected]
    assert lines == (last_states if whole else [])


@given(PIECES, st.sampled_from([Cutter, RawLineCutter]))
def test_raw_bytes_are_those_of_the_file(pieces: list[bytes], cutter: type[Cutter]) -> None:
    with tempfile.NamedTemporaryFile() as file, closing(LogTail(0, file.name, cutter=cutter)) as tail:
        shown = []
        for piece in pieces:
            file.write(piece)
            file.flush()
            shown += tail.read()
            assert cutter is not Cutter or file.tell() == sum(map(len, shown)), "nothing is held back"
        shown += tail.read(at_end=True)
    assert b"".join(shown) == b"".join(pieces)
    if cutter is RawLineCutter:
        assert all(piece.endswith((b"\r", b"\n")) for piece in shown[:-1]), "others may write between"
        assert not any(first.endswith(b"\r") and then.startswith(b"\n") for first, then in pairwise(shown))


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"10%\r20%\r30%\n", [b"30%\n"]),
        (b"a\r\nb\r\n", [b"a\n", b"b\n"]),
        (b"\n\n", [b"\n", b"\n"]),
        (b"no end", [b"no end\n"]),
        (b"\xff\xfe\0\n", [b"\xff\xfe\0\n"]),
    ],
)
def test_progress_bar_shows_its_last_state(tmp_path: Path, content: bytes, lines: list[bytes]) -> None:
    (tmp_path / "log").write_bytes(content)
    with closing(LogTail(0, str(tmp_path / "log"))) as tail:
        assert tail.read(at_end=True) == lines


@pytest.mark.parametrize("bar", [b"\r 5%\r10%", b" 5%\r10%\r", b"\r 5%\r10%\r\r"])
def test_unfinished_bar_has_a_state(bar: bytes) -> None:
    cutter = LineCutter()
    assert cutter.feed(b"epoch 1\n") == [b"epoch 1\n"]
    assert cutter.feed(bar) == []
    assert cutter.state == b"10%"


@pytest.mark.parametrize("held", [b"no carriage return", b"\r 50%\r    \r", b""])
def test_what_is_no_bar_or_a_bar_taken_away_has_no_state(held: bytes) -> None:
    cutter = LineCutter()
    cutter.feed(held)
    assert cutter.state == b"" and cutter.take_state(1e9) == []


def test_state_is_taken_every_few_seconds_and_the_last_one_not_twice() -> None:
    cutter = LineCutter()
    cutter.feed(b"\r10%")
    assert cutter.take_state(100.0) == [], "a short bar shows its last state alone"
    assert cutter.take_state(100.0 + STATE_S) == [b"10%\n"]
    cutter.feed(b"\r100%")
    assert cutter.take_state(100.0 + STATE_S) == []
    assert cutter.take_state(100.0 + 2 * STATE_S) == [b"100%\n"]
    assert cutter.feed(b"\nmore\n") == [b"more\n"], "the last state has been shown"


def test_long_bar_is_not_held_whole() -> None:
    cutter = LineCutter()
    for _ in range(3):
        assert cutter.feed(b"\r" + b"x" * (MAX_HELD_BYTES // 2)) == []
    assert cutter.end() == [b"x" * (MAX_HELD_BYTES // 2) + b"\n"]


@pytest.mark.parametrize("cutter", [Cutter, RawLineCutter])
def test_endless_line_is_shown_in_pieces(tmp_path: Path, cutter: type[Cutter]) -> None:
    size = 3 * MAX_HELD_BYTES
    (tmp_path / "log").write_bytes(b"x" * size)
    with closing(LogTail(0, str(tmp_path / "log"), cutter=cutter)) as tail:
        assert b"".join(tail.read(at_end=True)) == b"x" * size


def test_endless_line_of_text_is_shown_in_pieces(tmp_path: Path) -> None:
    size = 3 * MAX_HELD_BYTES
    (tmp_path / "log").write_bytes(b"x" * size)
    with closing(LogTail(0, str(tmp_path / "log"))) as tail:
        assert b"".join(tail.read(at_end=True)).replace(b"\n", b"") == b"x" * size


def test_log_that_appears_late_is_read_from_its_begin(tmp_path: Path) -> None:
    with closing(LogTail(0, str(tmp_path / "log"))) as tail:
        assert tail.read() == []
        (tmp_path / "log").write_bytes(b"first\n")
        assert tail.read() == [b"first\n"]
