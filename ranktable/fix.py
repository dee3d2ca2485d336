"""Repairs the mechanical faults of a table: those whose right form follows from what stands there.

Never made up: ids, addresses, versions. Never changed: the status, because only the producer of a table knows whether
it is complete; a key that stands twice; text of which a person must say what belongs there (elisions, brackets).
A key is taken for another when they differ in letter case, underscores, dashes or a plural s only (`deviceIp`,
`devices`), and also in a letter or two when the other is required and missing.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ranktable.document import Document, Lines, parse_document
from ranktable.errors import InvalidTableError, JsonTextError
from ranktable.kinds import find_near_keys
from ranktable.problem import Position, join_key, show_value
from ranktable.schema import Schema, find_near, fits_kind, walk_tree
from ranktable.tables import detect_table

Members = dict[str, object]
_SEPARATORS = re.compile(r"[\s_-]+")
_CLOSE = 0.85
_DECIMAL = re.compile(r"\s*\+?([0-9]{1,10})\s*")
_RULES = {"server_id": "R7", "device_id": "R8", "rank_id": "R9", "device_ip": "R13", "host_ip": "R15"}
"""The rule that a blank around a value breaks; R4 for all others."""
_IDENTITIES = frozenset({"server_id", "super_pod_id", "cluster_id", "group", "pod_name"})
_MAX_PASSES = 3
_MAX_SHOWN = 40
# No possessive quantifiers: Python 3.11.2 matches groups under them wrongly. Each piece can match in one way only, so
# that nothing is tried again and again.
_COMMENT = r"//[^\n]*(?=\n|\Z)|\#[^\n]*(?=\n|\Z)|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/"
_TOKEN = re.compile(
    rf"""
    (?P<string>"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z))
    |(?P<comment>{_COMMENT})
    |(?P<open_comment>/\*.*)
    |(?P<last_comma>,(?=\s*(?:(?:{_COMMENT})\s*)*[}}\]]))
    |'(?P<single>[^'\\\n]*(?:\\[^\n][^'\\\n]*)*)(?P<closed>'?)
    |(?<!\w)(?P<word>True|False|None)\b
    """,
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_QUOTES_WITHIN = re.compile(r'\\.|"', re.DOTALL)


class Repair(NamedTuple):
    """A fault that was put right: the rule it broke, where, and what was done, such as `0 -> "0"`."""

    rule: str
    path: str
    """JSON path; empty for a repair of the text, which has a position, or of the file as a whole."""
    change: str
    position: Position | None = None

    def __str__(self) -> str:
        place = self.path or (f"line {self.position.line}" if self.position else "the file")
        return f"{self.rule} {place}: {self.change}"


class Fixed(NamedTuple):
    """A table with its mechanical faults repaired: the JSON object, and what was repaired."""

    value: Members
    repairs: tuple[Repair, ...]


def fix_table(data: bytes, source: str = "<bytes>") -> Fixed:
    """Return the table in `data` with its mechanical faults repaired, in the order: text, keys, values, counts.

    Raises JsonTextError for text that cannot be repaired, InvalidTableError for keys that stand twice,
    UnknownDialectError and UnsupportedDialectError.
    """
    document, repairs = parse_leniently(data, source)
    if document.repeated_keys:  # which one is meant is for a person to say
        raise InvalidTableError(source, document.repeated_keys)
    value = document.value
    for written, meant in find_near_keys(value).items():
        if written != meant and meant not in value and _normalise(written) == _normalise(meant):
            _rename(value, {written: meant})
            repairs.append(Repair("R31", join_key("", written), f"renamed to {meant!r}"))
    for _ in range(_MAX_PASSES):  # a repair may show that it is another kind of table
        schema = detect_table(document).dialect.known_schema
        spelling = [*_fix_keys(value, schema), *_strip_blanks(value, schema)]
        repairs += spelling
        if not spelling:
            break
    repairs += _fix_values(value, detect_table(document).dialect.known_schema)
    repairs += _fix_counts(value, detect_table(document).dialect.known_schema)
    return Fixed(value, tuple(repairs))


def parse_leniently(data: bytes, source: str = "<bytes>") -> tuple[Document, list[Repair]]:
    """Return the JSON object in `data`, and what had to be repaired to read it: nothing for what is JSON in UTF-8.

    Raises JsonTextError for what cannot be repaired, with its line in the text as it was.
    """
    body = data.removeprefix(codecs.BOM_UTF8)
    repairs = [Repair("R1", "", "a byte order mark -> taken out")] if len(body) < len(data) else []
    try:
        return parse_document(body, source), repairs
    except JsonTextError as error:
        try:
            repaired, text_repairs = repair_text(body.decode("utf-8"))
        except UnicodeDecodeError:
            raise error from None
    return parse_document(repaired.encode("utf-8"), source), [*repairs, *text_repairs]


def repair_text(text: str) -> tuple[str, list[Repair]]:
    """Return the text with its mistakes repaired, line by line where it was, and the repairs; JSON stays as it is."""
    lines = Lines(text)
    pieces: list[str] = []
    repairs: list[Repair] = []
    end, last = 0, "["  # a comma that follows nothing but a bracket or a comma stands for an entry that is not there
    for match in _TOKEN.finditer(text):
        between, before = text[end : match.start()], match.group()
        end = match.end()
        last = between.rstrip()[-1:] or last
        after = before if match["last_comma"] and last in "[{," else _right_token(match)
        pieces += [between, after]
        if not match["comment"]:
            last = before[-1:]
        if after != before:
            shown = _shorten(after) if after.strip() else "taken out"
            repairs.append(Repair("R1", "", f"{_shorten(before)} -> {shown}", lines.position_at(match.start())))
    return "".join([*pieces, text[end:]]), repairs


def _right_token(match: re.Match[str]) -> str:
    """Return what belongs in the place of a token; comments leave blanks so that columns stay."""
    if match["comment"]:
        return re.sub(r"[^\n]", " ", match.group())
    if match["last_comma"]:
        return " "
    if match["word"]:
        return _WORDS[match["word"]]
    if match["single"] is None or not match["closed"]:
        return match.group()
    escaped = {"\\'": "'", '"': '\\"'}
    return f'"{_QUOTES_WITHIN.sub(lambda found: escaped.get(found.group(), found.group()), match["single"])}"'


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _rename(members: Members, names: Mapping[str, str]) -> None:
    renamed = {names.get(name, name): member for name, member in members.items()}
    members.clear()
    members.update(renamed)


def _fix_keys(value: Members, schema: Schema) -> Iterator[Repair]:
    """Rename misspelt keys."""
    for members, its_schema, path in walk_tree(value, schema):
        misspelt = dict(find_misspelt(members, its_schema))
        if misspelt:
            _rename(members, misspelt)
        for name, meant in misspelt.items():
            yield Repair("R31", join_key(path, name), f"renamed to {meant!r}")


def find_misspelt(members: Mapping[str, object], schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield each strange key of an object with the known key that it is meant to be."""
    taken, demanded = set(members), {field.name for field in schema.fields if field.missing == "error"}
    for name in [name for name in members if name not in schema.kinds]:
        meant = find_near(name, schema.kinds, _CLOSE)
        if meant and meant not in taken and (meant in demanded or _normalise(name) == _normalise(meant)):
            taken.add(meant)
            yield name, meant


def _normalise(name: str) -> str:
    return _SEPARATORS.sub("", name).lower().rstrip("s")


def _strip_blanks(value: Members, schema: Schema) -> Iterator[Repair]:
    """Strip blanks from values, but for ids that would be those of another then: two servers would be one."""
    spelt: dict[tuple[str, str], set[str]] = {}
    for members, its_schema, _ in walk_tree(value, schema):
        for role in _IDENTITIES & its_schema.by_role.keys():
            text = members.get(its_schema.by_role[role].name)
            if isinstance(text, str):
                spelt.setdefault((role, _strip(text)), set()).add(text)
    kept = {text for (_, text), forms in spelt.items() if len(forms) > 1}
    for members, its_schema, path in walk_tree(value, schema):
        for key in its_schema.kinds.keys() & members.keys():
            before = members[key]
            if isinstance(before, str) and key != "status" and _strip(before) != before and _strip(before) not in kept:
                members[key] = _strip(before)
                yield Repair(_RULES.get(key, "R4"), join_key(path, key), _replaced(before, members[key]))


def _strip(value: str) -> str:
    """Strip blanks from a value and from the addresses of a list with commas."""
    return ",".join(part.strip() for part in value.split(",")) if value.strip() else value


def _fix_values(value: Members, schema: Schema) -> Iterator[Repair]:
    """Give values the type and form that the dialect wants."""
    for members, its_schema, path in walk_tree(value, schema, enters_unread=False):
        for field in its_schema.fields:
            before = members.get(field.name)
            if field.name not in members or fits_kind(before, field.kind):
                continue
            place = join_key(path, field.name)
            if field.kind == "texts" and isinstance(before, list):
                for index, item in enumerate(before):
                    after = _retype(item, "text", field.name)
                    if after is not None and after != item:
                        before[index] = after
                        yield Repair("R4", f"{place}[{index}]", _replaced(item, after))
                continue
            after = _retype(before, field.kind, field.name)
            if after is not None and after != before:
                members[field.name] = after
                rule = field.rule if type(after) is type(before) else "R4"
                yield Repair(rule, place, _replaced(before, after))


def _retype(value: object, kind: str, key: str) -> str | int | None:
    """Return a number as a string, and a decimal string as a number or without leading zeros and blanks."""
    if kind in ("text", "number") and not isinstance(value, str | bool):
        is_written = isinstance(value, int) or (isinstance(value, float) and key == "version")
        return str(value) if is_written else None
    match = _DECIMAL.fullmatch(value) if isinstance(value, str) else None
    if match is None or kind not in ("number", "integer"):
        return None
    return int(match[1]) if kind == "integer" else str(int(match[1]))


def _fix_counts(value: Members, schema: Schema) -> Iterator[Repair]:
    """Set each count to the number of entries that it counts; add one whose absence is worth a warning."""
    for members, its_schema, path in walk_tree(value, schema):
        for field in its_schema.fields:
            number = field.count.of(members) if field.count else None
            if not field.count or not number:
                continue
            place, before = join_key(path, field.name), members.get(field.name)
            after = number if field.kind == "integer" else str(number)
            if field.name not in members and field.missing == "warning":
                kept = dict(members)
                members.clear()
                for name, member in kept.items():
                    members |= {field.name: after, name: member} if name == field.count.steps[0] else {name: member}
                yield Repair("R5", place, f"added {show_value(after)}")
            elif isinstance(before, str | int) and not isinstance(before, bool) and after != before:
                members[field.name] = after
                yield Repair(field.rule, place, f"{_replaced(before, after)}, as many as are listed")


def _replaced(before: object, after: object) -> str:
    return f"{show_value(before)} -> {show_value(after)}"
