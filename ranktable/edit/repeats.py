"""Keys that stand twice in one object: dropped when both say the same, refused when they differ (rule R32)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ranktable.codec import describe_repeat
from ranktable.edit.repair import Repair
from ranktable.errors import InvalidTableError
from ranktable.problem import join_index, join_key
from ranktable.reading.document import Document


class _Members(dict[str, object]):
    """An object that remembers which of its keys stood there with different values."""

    __slots__ = ("differing",)
    differing: frozenset[str]


def drop_repeats(document: Document) -> list[Repair]:
    """Return a repair for each repeated key; the value of `document` has each key once already.

    Raises InvalidTableError with every key whose values differ: which one is meant cannot be known.
    """
    if not document.repeated_keys:
        return []
    differing = list(_find_differing(json.loads(document.text, object_pairs_hook=_build), ""))
    if differing:
        raise InvalidTableError(document.source, [describe_repeat(path) for path in differing])
    return [
        Repair("R32", repeat.path, "stood twice with the same value, is there once", repeat.position)
        for repeat in document.repeated_keys
    ]


def _build(pairs: list[tuple[str, object]]) -> _Members:
    built = _Members(pairs)
    built.differing = frozenset(
        key for key, value in pairs if len(built) < len(pairs) and not _is_same(built[key], value)
    )
    return built


def _is_same(one: object, other: object) -> bool:
    """Compare as JSON does: 1, 1.0 and true are three values."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _find_differing(value: object, path: str) -> Iterator[str]:
    if isinstance(value, _Members):
        yield from (join_key(path, key) for key in value if key in value.differing)
        for key, member in value.items():
            yield from _find_differing(member, join_key(path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_differing(item, join_index(path, index))
