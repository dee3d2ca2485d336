"""Finds where the members of a JSON text stand. Works on text that a JSON parser has accepted already."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ranktable.problem import Position, join_index, join_key, parent_path

_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


@dataclass(slots=True)
class _Frame:
    """An open object or array during the walk."""

    path: str
    is_object: bool
    index: int = 0
    member: str = ""
    expects_key: bool = True
    seen: set[str] = field(default_factory=set)

    @property
    def child(self) -> str:
        return self.member if self.is_object else join_index(self.path, self.index)


@dataclass(frozen=True, slots=True)
class Mark:
    """One member of an object or item of an array: its path, its offset, and whether its key was there before."""

    path: str
    offset: int
    is_repeat: bool = False


def walk_marks(text: str) -> Iterator[Mark]:
    """Yield a mark for each member (at its key) and each array item (at its value), in the order of the text."""
    stack: list[_Frame] = []
    for match in _PIECE.finditer(text):
        piece, top = match.group(), stack[-1] if stack else None
        if piece in "}]":
            stack.pop()
        elif piece == ":":
            continue
        elif piece == ",":
            _advance(top)
        elif top is not None and top.is_object and top.expects_key:
            yield _enter_key(top, piece, match.start())
        else:
            if top is not None and not top.is_object:
                yield Mark(top.child, match.start())
            if piece in "{[":
                stack.append(_Frame(top.child if top else "", is_object=piece == "{"))


def _advance(frame: _Frame | None) -> None:
    if frame is not None:
        frame.index += 1
        frame.expects_key = True


def _enter_key(frame: _Frame, piece: str, offset: int) -> Mark:
    key: str = json.loads(piece)
    frame.member = join_key(frame.path, key)
    frame.expects_key = False
    is_repeat = key in frame.seen
    frame.seen.add(key)
    return Mark(frame.member, offset, is_repeat)


class Lines:
    """Turns offsets of one text into lines and columns."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def position_at(self, offset: int) -> Position:
        """Return line and column of `offset`."""
        line = bisect_right(self._starts, offset)
        return Position(line, offset - self._starts[line - 1] + 1)


def locate_paths(text: str, paths: Collection[str]) -> dict[str, Position]:
    """Return where each of `paths` stands; a path that is absent gets the place of its nearest holder."""
    wanted = {ancestor for path in paths for ancestor in _with_ancestors(path)}
    lines = Lines(text)
    found = {"": Position(1, 1)}
    for mark in walk_marks(text):
        if mark.path in wanted:
            found[mark.path] = lines.position_at(mark.offset)
    return {path: next(found[step] for step in _with_ancestors(path) if step in found) for path in paths}


def _with_ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = parent_path(path)
    yield ""
