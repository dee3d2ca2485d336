"""Many names in few letters, as Slurm and pdsh write them: `node[01-03,07].dc` is node01.dc, node02.dc, ..."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from msrun.errors import UsageError

MAX_HOSTS = 16_384
MAX_LIST_CHARS = 1_000_000
MAX_DIGITS = 9
MAX_SHOWN_CHARS = 60

_GROUP = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?\Z")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*)\Z", re.DOTALL)


def expand(text: str, source: str = "host list") -> list[str]:
    """Return the names of a list such as `node[01-03,07].dc,login1`, in its order.

    Several groups in one name are all combined (`rack[1-2]n[1-4]`); the width of a range's first number is kept. A
    group with a colon is an IPv6 address (`[::1]:8`) and stays as it is, and so does what follows a name.

    Args:
        source: what the text is, for errors: an option, a variable, or a file with its line.

    Raises:
        UsageError: a bracket that does not close, no range, a range that runs backwards, an empty name, or more names
            than `MAX_HOSTS`.
    """
    if len(text) > MAX_LIST_CHARS:
        raise UsageError(f"{source}: more than {MAX_LIST_CHARS} characters; write ranges: node[0001-1024]")
    names: list[str] = []
    for piece in split_outside(text, ",", source):
        word = piece.strip()
        if not word:
            raise UsageError(f"{source}: {shorten(text)!r} has an empty name; write h1,h2 with nothing between commas")
        names += _expand_word(word, source, MAX_HOSTS - len(names))
    return names


def fold(names: Iterable[str]) -> str:
    """Return names in few letters, `node[01-03,07],login1`: neighbours that differ in their last number share a group.

    `expand` gives the names back, in their order.
    """
    folded: list[tuple[str, str, list[str]]] = []
    for name in names:
        match = None if set(name) & set("[]:") else _LAST_NUMBER.match(name)
        is_foldable = match is not None and len(match[2]) <= MAX_DIGITS
        head, number, tail = match.groups() if match and is_foldable else (name, "", "")
        last = folded[-1] if folded else ("", "", [""])
        if number and last[2][0] and last[:2] == (head, tail):
            last[2].append(number)
        else:
            folded.append((head, tail, [number]))
    return ",".join(_fold_group(*group) for group in folded)


def split_outside(text: str, mark: str, source: str = "host list") -> list[str]:
    """Split at a mark that stands in no brackets.

    Raises:
        UsageError: a bracket without its other half, or one within another.
    """
    pieces, begin, is_inside = [], 0, False
    for index, letter in enumerate(text):
        if letter in "[]":
            if (letter == "[") == is_inside:
                raise UsageError(
                    f"{source}: {shorten(text)!r} has a {letter} without its other half; write node[01-16]"
                )
            is_inside = not is_inside
        elif letter == mark and not is_inside:
            pieces.append(text[begin:index])
            begin = index + 1
    if is_inside:
        _refuse_half("[", text, source)
    return [*pieces, text[begin:]]


def shorten(text: str) -> str:
    """Return a text as an error may quote it."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def _refuse_half(letter: str, text: str, source: str) -> NoReturn:
    raise UsageError(f"{source}: {shorten(text)!r} has a {letter} without its other half; write node[01-16]")


def _expand_word(word: str, source: str, room: int) -> list[str]:
    """Return the names of one word; at most `room`."""
    parts = _GROUP.split(word)  # text, group, text, group, ..., text
    choices: list[list[str]] = []
    count = 1
    for index, part in enumerate(parts):
        if index % 2 == 0:
            choices.append([part])
        elif ":" in part:
            choices.append([f"[{part}]"])
        else:
            ranges = [_read_range(piece, word, source) for piece in part.split(",")]
            count *= sum(last - first + 1 for first, last, _ in ranges)
            if count > room:
                break
            choices.append([number for one in ranges for number in _numbers(*one)])
    if count > room:
        raise UsageError(f"{source}: {shorten(word)!r} makes more than {MAX_HOSTS} hosts; give fewer")
    return ["".join(letters) for letters in itertools.product(*choices)]


def _read_range(piece: str, word: str, source: str) -> tuple[int, int, int]:
    """Return first, last and width of `01-16` or `7`."""
    match = _RANGE.match(piece)
    first, last = (match[1], match[2] or match[1]) if match else ("", "")
    if not match or len(first) > MAX_DIGITS or len(last) > MAX_DIGITS:
        raise UsageError(f"{source}: {shorten(piece)!r} in {shorten(word)!r} is no range; write node[01-16,20]")
    if int(first) > int(last):
        raise UsageError(f"{source}: {piece} in {shorten(word)!r} runs backwards; write {last}-{first}")
    if last[0] == "0" and len(last) != len(first):
        raise UsageError(
            f"{source}: {piece} in {shorten(word)!r} is of two widths; write both ends with as many digits"
        )
    return int(first), int(last), len(first)


def _numbers(first: int, last: int, width: int) -> Iterator[str]:
    return (str(number).zfill(width) for number in range(first, last + 1))


def _fold_group(head: str, tail: str, numbers: list[str]) -> str:
    if len(numbers) == 1:
        return f"{head}{numbers[0]}{tail}"
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"{head}[{','.join(first if first == last else f'{first}-{last}' for first, last in runs)}]{tail}"
