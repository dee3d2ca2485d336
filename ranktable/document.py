"""Bytes to JSON, strictly: one object in UTF-8, no doubled keys unnoticed, no odd numbers, bounded size and depth.

And where its members stand. PyYAML's composer would tell most of it, but refuses what JSON allows: surrogate escapes,
keys of over 1,024 letters.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections.abc import Callable, Collection, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, NoReturn

from ranktable.bounded_text import is_deeper
from ranktable.errors import JsonTextError
from ranktable.faults import Fault, explain_fault, name_bytes
from ranktable.files import STDIN_NAME, read_source
from ranktable.problem import Position, Problem, join_key, parent_path

MAX_DEPTH = 64
"""Deepest nesting that is read; the deepest known dialect needs 6."""
MAX_OBJECTS = 1_000_000
"""Most objects that a text may hold; a table has one per device and few more."""
MAX_MEMBERS = 8_000_000
"""Most commas that a text may hold, so most members and items."""
MAX_REPEATS = 1000
"""Most repeated keys that are listed; one is enough to refuse a table."""

MAX_STEPS = 1_500_000
"""Most members and items that are looked at; what stands behind them gets the place of its holder."""

_skip_space = re.compile(r"[ \t\n\r]*").match
_skip_value = json.JSONDecoder().raw_decode
Step = tuple[str, int, bool]
"""The path of a member or an item, where it stands, and whether its object has had the key before."""
_MAX_DIGITS = 400
_TOO_DEEP = Fault(0, f"the text is nested deeper than {MAX_DEPTH} levels", "write a plain table")
_SAVE_AS_UTF8 = "save the file as UTF-8, for example with iconv"


class Document(NamedTuple):
    """One JSON object with where it came from."""

    source: str
    """Name for messages: the path as given, or `<stdin>`."""
    text: str
    value: dict[str, object]
    has_bom: bool = False
    """True when the file starts with a UTF-8 byte order mark."""
    repeated_keys: tuple[Problem, ...] = ()
    """Keys that their objects have had before, as findings of rule R32; parsers keep the last one without a word."""
    size_bytes: int = 0
    is_link: bool = False
    """True when the file was reached through a symbolic link of its own name."""


def parse_document(data: bytes, source: str = "<bytes>") -> Document:
    """Return the JSON object that `data` holds.

    Raises JsonTextError, with line and column, for anything else, for NaN and numbers of more than 400 digits, nesting
    deeper than 64, and more than a million objects. Of repeated keys the first 1,000 are listed in the result.
    """
    text, has_bom = _decode_text(data, source)
    for mark, most, noun in ((b"{", MAX_OBJECTS, "objects"), (b",", MAX_MEMBERS, "members")):
        if data.count(mark) > most:
            _refuse(text, source, Fault(0, f"the text has more than {most:,} {noun}", "write one table per job"))
    has_repeats = False

    def build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal has_repeats
        built = dict(pairs)
        has_repeats = has_repeats or len(built) < len(pairs)
        return built

    value = _load(text, source, build_object)
    if not isinstance(value, dict):
        _refuse(text, source, _wrong_top(value))
    if is_deeper(value, MAX_DEPTH):
        _refuse(text, source, _TOO_DEEP)
    repeats = find_repeated_keys(text, MAX_REPEATS) if has_repeats else ()
    return Document(source, text, value, has_bom, tuple(repeats), len(data))


def _decode_text(data: bytes, source: str) -> tuple[str, bool]:
    foreign = name_bytes(data)
    if foreign:
        _refuse("", source, Fault(0, *foreign))
    encoding = json.detect_encoding(data).upper()
    if not encoding.startswith("UTF-8"):
        _refuse("", source, Fault(0, f"the file is {encoding}, a rank table must be UTF-8", _SAVE_AS_UTF8))
    has_bom = data.startswith(codecs.BOM_UTF8)
    body = data.removeprefix(codecs.BOM_UTF8)
    try:
        return body.decode("utf-8"), has_bom
    except UnicodeDecodeError as error:
        before = body[: error.start].decode("utf-8")
        message = f"byte 0x{body[error.start]:02x} is not UTF-8; the file may be Latin-1, GBK or binary"
        _refuse(before, source, Fault(len(before), message, _SAVE_AS_UTF8))


def _load(text: str, source: str, build_object: object) -> object:
    try:
        return json.loads(
            text,
            object_pairs_hook=build_object,  # type: ignore[arg-type]
            parse_constant=_parse_float,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
    except json.JSONDecodeError as error:
        _refuse(text, source, explain_fault(text, error))
    except ValueError as error:
        _refuse(text, source, Fault(0, str(error), "write a plain value"))
    except RecursionError:
        _refuse(text, source, _TOO_DEEP)


def _parse_float(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal[:20]} is no JSON value, or too large to be kept")
    return number


def _parse_int(literal: str) -> int:
    if len(literal) > _MAX_DIGITS:
        raise ValueError(f"the number has more than {_MAX_DIGITS} digits")
    return int(literal)


def _wrong_top(value: object) -> Fault:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return Fault(0, "the file is a JSON string that holds a table as text", "encode the table once, not twice")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        return Fault(0, "the top of the file is an array, not an object", "remove the outer square brackets")
    kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    what = kinds.get(type(value), "a number")
    return Fault(0, f"the top of the file is {what}, not an object", "start it with {")


def _refuse(text: str, source: str, fault: Fault) -> NoReturn:
    raise JsonTextError(source, Lines(text).position_at(fault.offset), fault.message, fault.remedy)


def read_document(path: str | os.PathLike[str]) -> Document:
    """Return the JSON object of the file at `path`, not yet taken for a table; raises ReadError, JsonTextError."""
    name, data = read_source(path)
    is_link = name != STDIN_NAME and Path(name).is_symlink() and Path(name).is_file()
    return parse_document(data, name)._replace(is_link=is_link)


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
            child = f"{path}[{index}]"
            index += 1
        yield child, start, is_repeat
        offset = _after_space(text, (yield from _walk(text, offset, child, enters, enters(child))))
        if text[offset] == ",":
            offset = _after_space(text, offset + 1)
    return offset + 1


def _after_space(text: str, offset: int) -> int:
    match = _skip_space(text, offset)
    return match.end() if match else offset


def find_repeated_keys(text: str, limit: int) -> list[Problem]:
    """Return a finding for each key that its object has had before, at most `limit`, in the order of the text."""
    message, remedy = "the key stands twice in its object; parsers keep the last one silently", "keep one of the two"
    lines = Lines(text)
    steps = islice(_walk(text, _after_space(text, 0), "", lambda _: True), MAX_STEPS)
    repeats = (
        Problem(path, "R32", "error", message, remedy, position=lines.position_at(offset))
        for path, offset, is_repeat in steps
        if is_repeat
    )
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
