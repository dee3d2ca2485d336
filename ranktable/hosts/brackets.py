"""Many names in few letters, as Slurm and pdsh write them: `node[01-03,07].dc` is node01.dc, node02.dc, ..."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from ranktable.errors import HostListError
from ranktable.hosts.ranges import MAX_DIGITS, RangeError, find_runs, fold_runs, read_range

MAX_HOSTS = 65_536
"""As many as a rank table of version 2.0 has ranks."""
MAX_LIST_CHARS = 4_000_000
MAX_SHOWN_CHARS = 60

_GROUP = r"\[([^][]*)\]"
_LAST_NUMBER = r"(?s)(.*?)([0-9]+)([^0-9]*)\Z"


def expand(text: str) -> list[str]:
    """Return the names of a list such as `node[01-03,07].dc,login1`, in its order.

    Several groups in one name are all combined (`rack[1-2]n[1-4]`); the width of a range's numbers is kept, and a range
    may have a step (`[0-8/2]`). A group with a colon is an IPv6 address (`[::1]:8`) and stays as it is, and so does
    what follows a name. Source: the host lists of Slurm and pdsh; the step is ClusterShell's. Raises HostListError: a
    bracket that does not close, no range, a range that runs backwards, an empty name, or more names than `MAX_HOSTS`.
    """
    if len(text) > MAX_LIST_CHARS:
        remedy = "write ranges: node[0001-1024]"
        raise HostListError(f"{quote(text)} has more than {MAX_LIST_CHARS} characters", remedy)
    names: list[str] = []
    for piece in split_outside(text, ","):
        word = piece.strip()
        if not word:
            raise HostListError(f"{quote(text)} has an empty name", "write h1,h2 with nothing between commas")
        names += _expand_word(word, MAX_HOSTS - len(names))
    return names


def fold(names: Iterable[str]) -> str:
    """Return names in few letters, `node[01-03,07],login1`: neighbours that differ in their last number share a group.

    `expand` gives the names back, in their order.
    """
    folded: list[tuple[str, str, list[str]]] = []
    for name in names:
        match = None if set(name) & set("[]:") else re.match(_LAST_NUMBER, name)
        is_foldable = match is not None and len(match[2]) <= MAX_DIGITS
        head, number, tail = match.groups() if match and is_foldable else (name, "", "")
        last = folded[-1] if folded else ("", "", [""])
        if number and last[2][0] and last[:2] == (head, tail):
            last[2].append(number)
        else:
            folded.append((head, tail, [number]))
    return ",".join(_fold_group(*group) for group in folded)


def split_outside(text: str, mark: str) -> list[str]:
    """Split at a mark that stands in no brackets; raises HostListError for a bracket without its other half."""
    pieces, begin, is_inside = [], 0, False
    for index, letter in enumerate(text):
        if letter in "[]":
            if (letter == "[") == is_inside:
                raise _half(letter, text)
            is_inside = not is_inside
        elif letter == mark and not is_inside:
            pieces.append(text[begin:index])
            begin = index + 1
    if is_inside:
        raise _half("[", text)
    return [*pieces, text[begin:]]


def shorten(text: str) -> str:
    """Return a text as an error may show it."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def quote(text: str) -> str:
    """Return a text as an error may quote it."""
    return repr(shorten(text))


def _half(letter: str, text: str) -> HostListError:
    return HostListError(f"{quote(text)} has a {letter} without its other half", "write node[01-16]")


def _expand_word(word: str, room: int) -> list[str]:
    """Return the names of one word; at most `room`."""
    parts = re.split(_GROUP, word)  # text, group, text, group, ..., text
    choices: list[Iterable[str]] = []
    count = 1
    for index, part in enumerate(parts):
        if index % 2 == 0 or ":" in part:
            choices.append([part if index % 2 == 0 else f"[{part}]"])
        else:
            ranges = [_read_range(piece.strip(), word) for piece in part.split(",")]
            count *= sum(len(numbers) for numbers, _ in ranges)
            choices.append(str(number).zfill(width) for numbers, width in ranges for number in numbers)
        if count > room:
            raise HostListError(f"{quote(word)} makes more than {MAX_HOSTS} hosts", "give fewer")
    return ["".join(letters) for letters in itertools.product(*choices)]


def _read_range(piece: str, word: str) -> tuple[range, int]:
    """Return the numbers of `01-16`, `0-8/2` or `7`, and their width, 0 where they have none."""
    try:
        found = read_range(piece, has_steps=True)
    except RangeError as error:
        if error.reason == "backwards":
            message = f"{quote(word)} has the range {piece}, which runs backwards"
            raise HostListError(message, f"write {error.turned}") from None
        raise HostListError(f"{quote(word)} has {quote(piece)} for a range", "write node[01-16,20]") from None
    is_padded = _is_padded(found.first, found.last)
    if is_padded and len(found.last) != len(found.first):
        remedy = "write both ends with as many digits"
        raise HostListError(f"{quote(word)} has the range {piece} with ends of two widths", remedy)
    return found.numbers, len(found.first) if is_padded else 0


def _fold_group(head: str, tail: str, numbers: list[str]) -> str:
    if len(numbers) == 1:
        return f"{head}{numbers[0]}{tail}"
    return f"{head}[{fold_runs(find_runs(numbers, _continues), ',')}]{tail}"


def _continues(first: str, last: str, number: str) -> bool:
    return int(number) == int(last) + 1 and (len(number) == len(first) or not _is_padded(first, number))


def _is_padded(*ends: str) -> bool:
    return any(len(end) > 1 and end[0] == "0" for end in ends)
