"""Whole numbers in few letters, `0-3,8`: ranks, devices, processors and the numbers in host names are read here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from ranktable.record import Record

MAX_DIGITS = 9
LARGEST = 10**MAX_DIGITS - 1

_RANGE = rf"([0-9]{{1,{MAX_DIGITS}}})(?:-([0-9]{{1,{MAX_DIGITS}}})(?:/([1-9][0-9]{{0,5}}))?)?"

T = TypeVar("T")


class RangeError(ValueError):
    """A text that is no list of ranges."""

    def __init__(self, piece: str, reason: Literal["form", "backwards", "beyond", "many"], turned: str = "") -> None:
        """`piece` is the faulty part of the text; `turned` the range that was meant where it runs backwards, `3-7`."""
        super().__init__(piece)
        self.piece = piece
        self.reason = reason
        self.turned = turned


class NumberRange(Record):
    """One range as it was written: `08-16/2`."""

    numbers: range
    first: str
    last: str


def read_range(text: str, largest: int = LARGEST, *, has_steps: bool = False) -> NumberRange:
    """Read `7`, `0-3` or, with steps, `0-8/2`; raises RangeError, also for numbers above `largest`."""
    match = re.fullmatch(_RANGE, text)
    if match is None or (match[3] and not has_steps):
        raise RangeError(text, "form")
    first, last = match[1], match[2] or match[1]
    if int(first) > int(last):
        raise RangeError(text, "backwards", f"{last}-{first}")
    if int(last) > largest:
        raise RangeError(text, "beyond")
    return NumberRange(range(int(first), int(last) + 1, int(match[3] or 1)), first, last)


def read_ranges(text: str, max_numbers: int, largest: int = LARGEST) -> list[int]:
    """Return the numbers of `0-3,8` in its order, with repeats; raises RangeError also for more than `max_numbers`."""
    numbers: list[int] = []
    for piece in text.split(","):
        found = read_range(piece.strip(), largest).numbers
        if len(numbers) + len(found) > max_numbers:
            raise RangeError(piece.strip(), "many")
        numbers += found
    return numbers


def find_runs(items: Iterable[T], follows: Callable[[T, T, T], bool]) -> list[tuple[T, T]]:
    """Return first and last of each run of items; `follows(first, last, item)` tells whether an item continues one."""
    runs: list[tuple[T, T]] = []
    for item in items:
        if runs and follows(*runs[-1], item):
            runs[-1] = runs[-1][0], item
        else:
            runs.append((item, item))
    return runs


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of numbers, in their order: 4, 5, 0 -> (4, 5), (0, 0)."""
    return find_runs(numbers, lambda _, last, number: number == last + 1)


def fold_runs(runs: Iterable[tuple[T, T]], separator: str = ", ") -> str:
    """Return runs as text: `0-3, 8`."""
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def fold_numbers(numbers: Iterable[int], separator: str = ", ") -> str:
    """Return numbers as text, ascending and each once: 5, 1, 0 -> `0-1, 5`."""
    return fold_runs(runs_of(sorted(set(numbers))), separator)
