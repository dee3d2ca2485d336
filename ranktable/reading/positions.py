"""Where the members of a JSON text stand. Works on text that a JSON parser has accepted already.

PyYAML's composer would tell most of it, but refuses what JSON allows: surrogate escapes, keys of over 1,024 letters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterator
from itertools import islice

from ranktable.problem import Position, join_index, join_key, parent_path

MAX_STEPS = 1_500_000
"""Most members and items that are looked at; what stands behind them gets the place of its holder."""

_skip_space = re.compile(r"[ \t\n\r]*").match
_skip_value = json.JSONDecoder().raw_decode
Step = tuple[str, int, bool]
"""The path of a member or an item, where it stands, and whether its object has had the key before."""


class Lines:
    """Turns offsets of one text into lines and columns; fast when they are asked for in ascending order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line = 1
        self._offset = 0

    def position_at(self, offset: int) -> Position:
        """Return line and column of `offset`."""
        if offset < self._offset:
            self._line, self._offset = 1, 0
        self._line += self._text.count("\n", self._offset, offset)
        self._offset = offset
        return Position(self._line, offset - self._text.rfind("\n", 0, offset))


def _walk(
    text: str, offset: int, path: str, enters: Callable[[str], bool], is_wanted: bool = True
) -> Generator[Step, None, int]:
    """Yield what stands in the value at `offset`, and in what `enters` is true of; return where the value ends."""
    opening = text[offset]
    if opening not in "{[" or not is_wanted:
        return _skip_value(text, offset)[1]
    seen: set[str] = set()
    index = 0
    offset = _after_space(text, offset + 1)
    while text[offset] not in "}]":
        start, is_repeat = offset, False
        if opening == "{":
            key, offset = _skip_value(text, offset)
            child, is_repeat = join_key(path, key), key in seen
            seen.add(key)
            offset = _after_space(text, _after_space(text, offset) + 1)
        else:
            child = join_index(path, index)
            index += 1
        yield child, start, is_repeat
        offset = _after_space(text, (yield from _walk(text, offset, child, enters, enters(child))))
        if text[offset] == ",":
            offset = _after_space(text, offset + 1)
    return offset + 1


def _after_space(text: str, offset: int) -> int:
    match = _skip_space(text, offset)
    return match.end() if match else offset


def find_repeated_keys(text: str, limit: int) -> list[tuple[str, Position]]:
    """Return path and place of each key that its object has had before, at most `limit`, in the order of the text."""
    lines = Lines(text)
    steps = islice(_walk(text, _after_space(text, 0), "", lambda _: True), MAX_STEPS)
    repeats = ((path, lines.position_at(offset)) for path, offset, is_repeat in steps if is_repeat)
    return list(islice(repeats, limit))


def locate_paths(text: str, paths: Collection[str]) -> dict[str, Position]:
    """Return where each of `paths` stands; a path that is absent gets the place of its nearest holder."""
    wanted = {ancestor for path in paths for ancestor in _with_ancestors(path)}
    lines, found = Lines(text), {"": Position(1, 1)}
    for path, offset, _ in islice(_walk(text, _after_space(text, 0), "", wanted.__contains__), MAX_STEPS):
        if path in wanted:
            found[path] = lines.position_at(offset)
    return {path: next(found[step] for step in _with_ancestors(path) if step in found) for path in paths}


def _with_ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = parent_path(path)
    yield ""
