"""Checks of the integers that a user passes, with one wording for all messages."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from msrun.errors import UsageError


def is_integer(value: object) -> bool:
    """True for Python and numpy integers, not for bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def parse_count(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """Return `value` as int.

    Raises:
        UsageError: it is no integer or out of range; the message names `name`, the value and the range.
    """
    if not is_integer(value) or value < minimum or (maximum is not None and value > maximum):
        allowed = f"of at least {minimum}" if maximum is None else f"in {minimum}..{maximum}"
        raise UsageError(f"{name}={value!r}; it must be an integer {allowed}")
    return int(value)


def parse_counts(name: str, value: Any, *, lengths: tuple[int, ...], minimum: int) -> tuple[int, ...]:
    """Return one integer or a sequence of them as a tuple.

    Raises:
        UsageError: the length is none of `lengths`, or an element is no integer of at least `minimum`.
    """
    counts = (value,) if is_integer(value) else tuple(value) if isinstance(value, Iterable) else ()
    if len(counts) not in lengths or not all(is_integer(count) and count >= minimum for count in counts):
        choices = " or ".join(str(length) for length in lengths)
        raise UsageError(f"{name}={value!r}; give {choices} integers of at least {minimum}")
    return tuple(int(count) for count in counts)


def parse_sizes(sizes: Any, count: int) -> list[int]:
    """Return whole numbers of samples that add up to `count`, of such numbers or of shares that add up to 1.

    Raises:
        UsageError: they do not add up, or one is below 1.
    """
    listed = list(sizes) if isinstance(sizes, Iterable) else []
    numbers = listed
    if listed and all(isinstance(size, float) and 0 < size < 1 for size in listed) and abs(sum(listed) - 1) < 1e-6:
        numbers = [round(size * count) for size in listed]
        numbers[0] += count - sum(numbers)
    if not numbers or not all(is_integer(size) and size >= 1 for size in numbers) or sum(numbers) != count:
        raise UsageError(f"split: sizes={sizes!r}; give integers that add up to {count}, or shares that add up to 1")
    return [int(size) for size in numbers]
