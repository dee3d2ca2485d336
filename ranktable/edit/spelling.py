"""Which known key a strange one is meant to be, by the schema of its object.

A key is taken for another when they differ in letter case, underscores, dashes or a plural s only (`deviceIp`,
`devices`), and also in a letter or two when the other is required and missing. Keys that are known for other readers
stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache

from ranktable.codec.codec import codec_names, codec_of
from ranktable.codec.detect import TELLING_KEYS, detect_dialect
from ranktable.codec.schema import Field, Schema

_SEPARATORS = re.compile(r"[\s_-]+")
_CLOSE = 0.85
_OF_OTHERS = frozenset({"Servers", "Clients", "oxc_group_list", "endpoint_list"})
"""Telling keys of kinds that are known by name only."""


def schema_for(value: Mapping[str, object]) -> Schema:
    """Return the schema of the table, or one of the keys of all dialects where its own keys do not tell which it is."""
    detection = detect_dialect(value)
    codec = codec_of(detection.dialect.name) if detection else None
    return codec.schema if codec else _any_schema()


@cache
def _any_schema() -> Schema:
    schemas = [codec.schema for name in codec_names() if (codec := codec_of(name))]
    return Schema(_join(schemas), _OF_OTHERS.union(TELLING_KEYS, *(schema.extras for schema in schemas)))


def _join(schemas: list[Schema]) -> tuple[Field, ...]:
    """Return the fields of several kinds of object; the objects below those of one name are joined too."""
    named: dict[str, list[Field]] = {}
    for schema in schemas:
        for field in schema.fields:
            named.setdefault(field.name, []).append(field)
    return tuple(replace(fields[0], of=_join_below(fields)) for fields in named.values())


def _join_below(fields: list[Field]) -> Schema | None:
    below = [field.of if isinstance(field.of, Schema) else field.of({}) for field in fields if field.of is not None]
    return Schema(_join(below), frozenset().union(*(schema.extras for schema in below))) if below else None


def find_misspelt(members: Mapping[str, object], schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield each strange key of an object with the known key that it is meant to be."""
    if members.keys() <= schema.kinds.keys():
        return
    taken = set(members)
    by_form = {_normalise(key): key for key, kind in schema.kinds.items() if kind != "misplaced"}
    wanted = {_normalise(f.name): f.name for f in schema.fields if f.missing == "error" and f.name not in members}
    for name in members:
        if name in schema.kinds:
            continue
        close = get_close_matches(_normalise(name), wanted, n=1, cutoff=_CLOSE)
        meant = by_form.get(_normalise(name)) or (wanted[close[0]] if close else None)
        if meant is not None and meant not in taken:
            taken.add(meant)
            yield name, meant


def _normalise(name: str) -> str:
    return _SEPARATORS.sub("", name).lower().rstrip("s")
