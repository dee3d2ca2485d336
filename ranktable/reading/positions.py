"""Where a path of a JSON text stands, and where and why a text is no JSON.

Finds where the members of a JSON text stand. Works on text that a JSON parser has accepted already.

The text is walked only where something is looked for; the parser in C skips the rest.

Says in plain words why a text is not JSON: which of the usual mistakes it is, and where it really stands.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from ranktable.problem import Position, join_index, join_key, parent_path
from ranktable.reading.foreign import name_text

MAX_STEPS = 1_500_000
"""Most members and items that are looked at; what stands behind them gets the place of its holder."""

_find_space = re.compile(r"[ \t\n\r]*").match
_skip_value = json.JSONDecoder().raw_decode
_LAST_COMMA = re.compile(r",\s*\Z")
_SAYS_TRUNCATED = "Unterminated string"
_BARE_KEY = re.compile(r"[A-Za-z_][\w-]*\s*:")
_QUOTE_IT = "write a string in double quotes"
# What the text looks like where the parser gave up, in the order of the tests.
_LOOKS = tuple(
    (re.compile(pattern), message, remedy)
    for pattern, message, remedy in (
        (r"//|/\*|#", "a comment stands here, which JSON does not allow", "remove the comment"),
        (r"\.\.|\u2026", "an elision (...) stands here instead of entries", "write the entries that it leaves out"),
        (
            r"['`\u2018\u2019\u201c\u201d]",
            "a quotation mark stands here that JSON does not know",
            'use the plain double quote "',
        ),
        (r"True|False|None", "True, False and None are no JSON values", _QUOTE_IT),
        (r"-?(?:NaN|Infinity)", "NaN and Infinity are no JSON values", _QUOTE_IT),
        (r"undefined\b", "undefined is no JSON value", _QUOTE_IT),
        (r"\{[{%]|\$\{?\w|<[\w ]+>|%\(?\w", "a placeholder of a template stands here", "fill the template in first"),
        (r"[<=>]{7}", "a mark of a merge conflict stands here", "resolve the conflict first"),
        (r"\0", "NUL bytes stand here", "write the file again; its end never reached the disk"),
        (
            r"[\u00a0\u2000-\u200f\u2028\u2029\u3000\ufeff]",
            "a blank that JSON does not know stands here",
            "use plain spaces",
        ),
        (r"[\uff0c\uff1a\uff1b\uff3b\uff3d\uff5b\uff5d]", "a full-width sign stands here", "use the plain sign"),
        (r"[-+]?(?:0[xXoObB\d]|\.\d)|[+]\d", "a number stands here that JSON does not know", _QUOTE_IT),
        (r",", "a comma stands here with nothing before it", "remove it, or write what is missing"),
        (r"[=;]", "JSON knows only : between key and value and , between members", "write the right sign"),
    )
)
_PARSER_SAYS = (
    ("Expecting property name", "a key stands here without double quotes", "put it in double quotes"),
    ("Invalid \\escape", "a backslash stands here that starts no escape of JSON", "double it, or remove it"),
    (
        "Invalid control character",
        "a line break or control character stands inside a string",
        "close the string before it",
    ),
)


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


class _Enough(Exception):
    """Ends a walk."""


class _Walk(ABC):
    """A walk over the containers of a text; a subclass says which to enter and what to note down."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._steps_left = MAX_STEPS

    def start(self) -> None:
        """Walk until the end of the text, or until enough has been seen."""
        with suppress(_Enough):
            self._visit(self._after_space(0), "")

    def _count_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise _Enough

    @abstractmethod
    def _note(self, path: str, offset: int, *, is_repeat: bool) -> None:
        """Take note of a member (its key is at `offset`) or of an item of an array."""

    @abstractmethod
    def _pass(self, path: str, offset: int) -> int:
        """Visit the value at `offset`, or skip it; return where it ends."""

    def _visit(self, offset: int, path: str) -> int:
        opening = self.text[offset]
        if opening == "{":
            return self._visit_object(offset, path)
        return self._visit_array(offset, path) if opening == "[" else _skip_value(self.text, offset)[1]

    def _visit_object(self, offset: int, path: str) -> int:
        seen: set[str] = set()
        offset = self._after_space(offset + 1)
        while self.text[offset] != "}":
            self._count_step()
            key, end = _skip_value(self.text, offset)
            member = join_key(path, key)
            self._note(member, offset, is_repeat=key in seen)
            seen.add(key)
            colon = self._after_space(end)
            offset = self._after_comma(self._pass(member, self._after_space(colon + 1)))
        return offset + 1

    def _visit_array(self, offset: int, path: str) -> int:
        index = 0
        offset = self._after_space(offset + 1)
        while self.text[offset] != "]":
            self._count_step()
            item = join_index(path, index)
            self._note(item, offset, is_repeat=False)
            offset = self._after_comma(self._pass(item, offset))
            index += 1
        return offset + 1

    def _after_space(self, offset: int) -> int:
        match = _find_space(self.text, offset)
        return match.end() if match else offset

    def _after_comma(self, offset: int) -> int:
        offset = self._after_space(offset)
        return self._after_space(offset + 1) if self.text[offset] == "," else offset


class _PathWalk(_Walk):
    """Looks for given paths, and enters only what holds one of them."""

    def __init__(self, text: str, wanted: Collection[str]) -> None:
        super().__init__(text)
        self._wanted = wanted
        self._lines = Lines(text)
        self.found = {"": Position(1, 1)}

    def _note(self, path: str, offset: int, *, is_repeat: bool) -> None:  # noqa: ARG002
        if path in self._wanted:
            self.found[path] = self._lines.position_at(offset)

    def _pass(self, path: str, offset: int) -> int:
        return self._visit(offset, path) if path in self._wanted else _skip_value(self.text, offset)[1]


class _RepeatWalk(_Walk):
    """Looks for keys that their object has had before, and enters only what holds one."""

    def __init__(self, text: str, limit: int) -> None:
        super().__init__(text)
        self._limit = limit
        self._lines = Lines(text)
        self._has_repeat = False
        self._decode = json.JSONDecoder(object_pairs_hook=self._check_pairs).raw_decode
        self.found: list[tuple[str, Position]] = []

    def _check_pairs(self, pairs: list[tuple[str, object]]) -> None:
        self._has_repeat = self._has_repeat or len(dict(pairs)) < len(pairs)

    def _note(self, path: str, offset: int, *, is_repeat: bool) -> None:
        if is_repeat:
            self.found.append((path, self._lines.position_at(offset)))
        if len(self.found) >= self._limit:
            raise _Enough

    def _pass(self, path: str, offset: int) -> int:
        if self.text[offset] not in "{[":
            return _skip_value(self.text, offset)[1]
        self._has_repeat = False
        end = self._decode(self.text, offset)[1]
        return self._visit(offset, path) if self._has_repeat else end


def find_repeated_keys(text: str, limit: int) -> list[tuple[str, Position]]:
    """Return path and place of each key that its object has had before, at most `limit`, in the order of the text."""
    walk = _RepeatWalk(text, limit)
    walk.start()
    return walk.found


def locate_paths(text: str, paths: Collection[str]) -> dict[str, Position]:
    """Return where each of `paths` stands; a path that is absent gets the place of its nearest holder."""
    walk = _PathWalk(text, {ancestor for path in paths for ancestor in _with_ancestors(path)})
    walk.start()
    return {path: next(walk.found[step] for step in _with_ancestors(path) if step in walk.found) for path in paths}


def _with_ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = parent_path(path)
    yield ""


class Fault(NamedTuple):
    """Where a text stops to be JSON, why, and what to do."""

    offset: int
    message: str
    remedy: str


def explain_fault(text: str, error: json.JSONDecodeError) -> Fault:
    """Return the fault behind `error`; its place is that of the mistake, not where the parser gave up."""
    offset = error.pos
    rest = text[offset : offset + 40]
    comma = _LAST_COMMA.search(text[max(0, offset - 4096) : offset])
    if not text.strip():
        return Fault(0, "the file is empty", "write the table again")
    foreign = name_text(text)
    if foreign:
        return Fault(len(text) - len(text.lstrip()), *foreign)
    if error.msg.startswith("Illegal trailing comma"):
        return _trailing_comma(offset)
    if comma and rest[:1] in ("}", "]"):
        return _trailing_comma(offset - len(comma.group()))
    if offset >= len(text.rstrip()) or error.msg.startswith(_SAYS_TRUNCATED):
        return Fault(offset, "the text ends in the middle of the table", "copy or write the whole file again")
    if text[offset - 1 : offset] == "0" and rest[:1] in tuple("0123456789xX"):
        return Fault(offset - 1, "a number stands here that JSON does not know", _QUOTE_IT)
    if text[offset - 1 : offset + 1] == "{{":
        return Fault(offset - 1, "a placeholder of a template stands here", "fill the template in first")
    return _explain_character(offset, rest, error.msg)


def _trailing_comma(offset: int) -> Fault:
    return Fault(offset, "a comma stands after the last item, which JSON does not allow", "remove the comma")


def _explain_character(offset: int, rest: str, parser_says: str) -> Fault:
    for pattern, message, remedy in _LOOKS:
        if pattern.match(rest):
            return Fault(offset, message, remedy)
    for says, message, remedy in _PARSER_SAYS:
        if parser_says.startswith(says) and (says != "Expecting property name" or _BARE_KEY.match(rest)):
            return Fault(offset, message, remedy)
    shown = ascii(rest[:1])
    if rest[:1] and not (rest[0].isascii() and rest[0].isprintable()):
        return Fault(offset, f"the character {shown} stands here, which JSON does not know", "replace it")
    if parser_says.startswith("Extra data") and rest[:1] in ("}", "]"):
        return Fault(offset, "there is a closing bracket too many", "remove it")
    if parser_says.startswith("Extra data") and rest[:1] == "{":
        return Fault(offset, "a second object follows after the table", "keep one JSON object in the file")
    if parser_says.startswith("Extra data"):
        return Fault(offset, "text follows after the end of the table", "keep one JSON object in the file")
    if rest[:1] in ("}", "]"):
        return Fault(offset, f"{rest[0]} closes what another bracket has opened", "write the bracket that fits")
    if parser_says.startswith("Expecting ',' delimiter"):
        return Fault(offset, "a comma or a closing bracket is missing before this place", "add it")
    return Fault(offset, f"the text is not JSON here ({parser_says})", "correct the text at this place")
