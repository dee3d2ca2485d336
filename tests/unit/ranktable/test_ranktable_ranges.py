"""Numbers as ranges, read and written: every user of them, one grammar."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable.hosts.ranges import LARGEST, RangeError, fold_numbers, fold_runs, read_range, read_ranges, runs_of

numbers = st.integers(0, 2000)


@pytest.mark.parametrize(
    ("given_numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 5], "0-2, 5"), ([5, 1, 0, 1], "0-1, 5"), ([1, 3, 5], "1, 3, 5")],
)
def test_numbers_are_folded(given_numbers: list[int], text: str) -> None:
    assert fold_numbers(given_numbers) == text
    assert fold_numbers(given_numbers, ",") == text.replace(" ", "")


@given(st.sets(numbers, min_size=1))
def test_any_set_survives_being_written_and_read(found: set[int]) -> None:
    assert read_ranges(fold_numbers(found), 2001) == sorted(found)


@given(st.lists(numbers, min_size=1))
def test_runs_keep_the_order(found: list[int]) -> None:
    runs = runs_of(found)
    assert [number for first, last in runs for number in range(first, last + 1)] == found
    assert read_ranges(fold_runs(runs), len(found)) == found


@pytest.mark.parametrize(
    ("text", "found"), [("7", [7]), ("007", [7]), (" 2-3 , 0 ", [2, 3, 0]), ("1,1", [1, 1]), ("08-10", [8, 9, 10])]
)
def test_lists_are_read_in_their_order(text: str, found: list[int]) -> None:
    assert read_ranges(text, 3) == found


@pytest.mark.parametrize(
    ("text", "reason", "piece"),
    [
        *((text, "form", text) for text in ("", "a", "1-", "-1", "1--2", "1-2-3", "+1", "0x1", "1.0", "²", "٣", "1 2")),
        ("0,,1", "form", ""),
        ("0-8/2", "form", "0-8/2"),
        ("1" * 5000, "form", "1" * 5000),
        ("0,9-3", "backwards", "9-3"),
        ("0-3,11", "beyond", "11"),
        ("0-3,4-9,1", "many", "1"),
        ("3-99999999999", "form", "3-99999999999"),
    ],
)
def test_what_is_no_list_is_refused_with_the_reason(text: str, reason: str, piece: str) -> None:
    with pytest.raises(RangeError) as caught:
        read_ranges(text, 10, 10)
    assert (caught.value.reason, caught.value.piece) == (reason, piece)
    assert caught.value.turned == ("3-9" if reason == "backwards" else "")


def test_steps_are_for_those_who_take_them() -> None:
    found = read_range("00-08/2", has_steps=True)
    assert (list(found.numbers), found.first, found.last) == ([0, 2, 4, 6, 8], "00", "08")
    for text in ("0-8/0", "8/2", "0-8/"):
        with pytest.raises(RangeError):
            read_range(text, has_steps=True)


def test_nothing_is_made_of_a_range_that_is_too_long() -> None:
    tracemalloc.start()
    try:
        assert len(read_range(f"0-{LARGEST}").numbers) == LARGEST + 1
        for text in (f"0-{LARGEST}", ",".join([f"0-{LARGEST}"] * 1000), f"0,{'0-999,' * 1000}1"):
            with pytest.raises(RangeError):
                read_ranges(text, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.text("0123456789-, /x", max_size=12))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        found = read_ranges(text, 50)
    except RangeError as error:
        assert error.piece in text
        return
    assert len(found) <= 50 and all(0 <= number <= LARGEST for number in found)
