"""Whole lines from a growing file, and a console whose readers may go."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.launch.console import MAX_HELD_BYTES, LogTail
from msrun.launch.output import discard_output


@given(st.lists(st.binary(max_size=30), max_size=8))
def test_lines_come_whole_however_the_file_grows(pieces: list[bytes]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        tail = LogTail(0, file.name)
        lines = []
        for piece in pieces:
            file.write(piece)
            file.flush()
            lines += tail.read_lines()
        lines += tail.read_lines(at_end=True)
    whole = b"".join(pieces)
    expected = whole.split(b"\n") if not whole.endswith(b"\n") else whole.split(b"\n")[:-1]
    assert lines == ([] if not whole else [line.rstrip(b"\r").rpartition(b"\r")[2] for line in expected])


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"10%\r20%\r30%\n", [b"30%"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\n\n", [b"", b""]),
        (b"no end", [b"no end"]),
        (b"\xff\xfe\0\n", [b"\xff\xfe\0"]),
    ],
)
def test_progress_bar_shows_its_last_state(tmp_path: Path, content: bytes, lines: list[bytes]) -> None:
    (tmp_path / "log").write_bytes(content)
    assert LogTail(0, str(tmp_path / "log")).read_lines(at_end=True) == lines


def test_endless_line_is_shown_in_pieces(tmp_path: Path) -> None:
    size = 3 * MAX_HELD_BYTES
    (tmp_path / "log").write_bytes(b"x" * size)
    pieces = LogTail(0, str(tmp_path / "log")).read_lines(at_end=True)
    assert b"".join(pieces) == b"x" * size


def test_log_that_appears_late_is_read_from_its_begin(tmp_path: Path) -> None:
    tail = LogTail(0, str(tmp_path / "log"))
    assert tail.read_lines() == []
    (tmp_path / "log").write_bytes(b"first\n")
    assert tail.read_lines() == [b"first"]


def test_discarded_output_is_written_nowhere_and_without_an_error() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        discard_output(stream)
        stream.write("into nothing")
