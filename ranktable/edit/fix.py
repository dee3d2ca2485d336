"""Repairs the mechanical faults of a table: those whose right form follows from what stands there.

Never made up: ids, addresses, versions. Never changed: the status, because only the producer of a table knows whether
it is complete; a value that stands twice with different contents, because only a person knows which one is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ranktable.codec import find_codec
from ranktable.codec.codec import Codec
from ranktable.edit.counts import fix_counts
from ranktable.edit.reorder import reorder_ranks
from ranktable.edit.repair import Repair, find_holder, replaced
from ranktable.edit.repeats import drop_repeats
from ranktable.edit.spelling import TABLE, Kind, find_misspelt
from ranktable.problem import Problem, join_index, join_key
from ranktable.reading.document import Document
from ranktable.reading.lenient import TextRepair, parse_leniently

_DECIMAL = re.compile(r"\s*\+?([0-9]{1,10})\s*")
_RULES = {"server_id": "R7", "device_id": "R8", "rank_id": "R9", "device_ip": "R13", "host_ip": "R15"}
"""The rule that a blank around a value breaks; R4 for all others."""
_MAX_PASSES = 3


@dataclass(frozen=True, slots=True)
class Fixed:
    """A table with its mechanical faults repaired: the JSON object, what was repaired, and what could not be."""

    value: dict[str, object]
    repairs: tuple[Repair, ...]
    notes: tuple[str, ...] = ()
    """Why something that was asked for was not done."""


def fix_table(data: bytes, source: str = "<bytes>", *, reorder: bool = False) -> Fixed:
    """Return the table in `data` with its mechanical faults repaired, in the order: text, keys, values, counts.

    `reorder` numbers the ranks anew in the string order of the server ids, and the device ids of each server (R9 to
    R12). Raises JsonTextError for text that cannot be repaired, InvalidTableError for keys that stand twice with
    different values, UnknownDialectError and UnsupportedDialectError.
    """
    document, text_repairs = parse_leniently(data, source)
    repairs = [_describe_text(repair) for repair in text_repairs]
    repairs += drop_repeats(document)
    value = document.value
    repairs += _fix_object(value, "", TABLE)
    _, codec = find_codec(Document(source, document.text, value))
    repairs += _fix_values(value, codec)
    repairs += fix_counts(value)
    notes: list[str] = []
    if reorder:
        repairs += reorder_ranks(value, notes)
    return Fixed(value, tuple(repairs), tuple(notes))


def _describe_text(repair: TextRepair) -> Repair:
    after = repair.after or "taken out"
    return Repair("R1", "", f"{repair.before} -> {after}", repair.position)


def _fix_object(members: dict[str, object], path: str, kind: Kind) -> Iterator[Repair]:
    """Rename misspelt keys and strip blanks, here and in the objects below."""
    misspelt = dict(find_misspelt(members, kind))
    if misspelt:
        renamed = {misspelt.get(name, name): value for name, value in members.items()}
        members.clear()
        members.update(renamed)
        for name, meant in misspelt.items():
            yield Repair("R31", join_key(path, name), f"renamed to {meant!r}")
    for key in kind.keys & members.keys():
        value = members[key]
        if isinstance(value, str) and key != "status" and _strip(value) != value:
            members[key] = _strip(value)
            yield Repair(_RULES.get(key, "R4"), join_key(path, key), replaced(value, members[key]))
    for key, item_kind in kind.items.items():
        items = members.get(key)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict):
                yield from _fix_object(item, join_index(join_key(path, key), index), item_kind)


def _strip(value: str) -> str:
    """Strip blanks from a value and from the addresses of a list with commas."""
    return ",".join(part.strip() for part in value.split(",")) if value.strip() else value


def _fix_values(value: dict[str, object], codec: Codec) -> Iterator[Repair]:
    """Give values the type and form that the dialect wants, until nothing changes any more."""
    for _ in range(_MAX_PASSES):
        repairs = [repair for problem in codec.check_structure(value) for repair in _fix_value(value, problem)]
        yield from repairs
        if not repairs:
            return


def _fix_value(value: dict[str, object], problem: Problem) -> Iterator[Repair]:
    if not problem.is_form and problem.path != "version":  # an id that stands twice is for a person
        return
    found = find_holder(value, problem.path)
    if found is None:
        return
    holder, key = found
    before = holder[key]  # type: ignore[index]
    after = _retype(before, key) if problem.rule == "R4" else _plain_number(before)
    if after is not None and after != before:
        holder[key] = after  # type: ignore[index]
        yield Repair(problem.rule, problem.path, replaced(before, after))


def _retype(value: object, key: str | int) -> str | int | None:
    """Return a number as a string and a decimal string as a number: the dialect wants the other of the two."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int) or (isinstance(value, float) and key == "version"):
        return str(value)
    match = _DECIMAL.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) if match else None


def _plain_number(value: object) -> str | None:
    """Return a decimal string without leading zeros and blanks; None for all else."""
    match = _DECIMAL.fullmatch(value) if isinstance(value, str) else None
    return str(int(match[1])) if match else None
