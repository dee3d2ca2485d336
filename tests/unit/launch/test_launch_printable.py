"""Text of others is only shown by a terminal, never obeyed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.launch.printable import one_line, printable, printable_bytes

HOSTILE = ("\x1b", "\x07", "\x9b", "\x90", "\x9d", "\x7f", "\r", "\x08", "\u202e", "\u2066", "\u2028")


@given(st.text() | st.lists(st.sampled_from([*HOSTILE, "a", "[31m", "]52;c;", "[2J", "\n", "\t"])).map("".join))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = printable(text)
    assert not set(HOSTILE) & set(shown)
    assert printable(shown) == shown
    assert one_line(text).isprintable()


@given(st.lists(st.sampled_from([*HOSTILE, "a", "[31m", "\x1b[1;32m", "\x1b[m", "]52;c;", "[2J", "\n"])).map("".join))
def test_colours_alone_may_stay_and_end_with_their_line(text: str) -> None:
    for line in printable(text, keep_colours=True).split("\n"):
        *sequences, rest = line.split("\x1b")
        assert not sequences or rest == "[0m"
        assert all(piece.startswith("[") and "m" in piece for piece in line.split("\x1b")[1:])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünï ☃\tand\nlines", "plain, ünï ☃\tand\nlines"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("50%\x1b[2K\x1b[1G60%", "50%60%"),
        ("\x1b]52;c;YQ==\x07", "\\x1b]52;c;YQ==\\x07"),
        ("\x1bPq\x1b\\", "\\x1bPq\\x1b\\"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb", "a\\u202eb"),
        ("carriage\rreturn", "carriage\\rreturn"),
    ],
)
def test_what_becomes_of_text(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_one_line_stays_one() -> None:
    assert one_line("a\nb\tc\x1b[2Jd") == "a\\nb\\tcd"


def test_bytes_become_what_text_becomes() -> None:
    """Bytes of which all are plain are not looked at one by one."""
    for number in range(256):
        data = bytes([number])
        assert printable_bytes(data) == printable(data.decode("utf-8", "backslashreplace")).encode(), number
