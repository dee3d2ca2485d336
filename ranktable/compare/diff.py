"""What two tables say differently, server by server and device by device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ranktable.compare.facts import Facts, Fields, Subject, collect_facts
from ranktable.model import RankTable

ChangeKind = Literal["added", "removed", "changed"]

_HOLDER = {
    "device": "server",
    "super_pod_server": "super_pod",
    "cluster_server": "cluster",
    "cluster_super_pod": "cluster",
}
"""Whose coming and going includes that of the item."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. "changed" is about one field; "added" and "removed" are about all of the subject."""

    kind: ChangeKind
    subject: Subject
    field: str = ""
    """The key that changed; empty for what was added or removed."""
    before: str | None = None
    """The value in the first table as JSON; None where it has none."""
    after: str | None = None
    fields: Mapping[str, str] | None = None
    """What was added or removed, as JSON by key; None for a change."""
    num_parts: int = 0
    """How many devices or members came or went with the server, super pod or cluster."""


def diff_tables(first: RankTable, second: RankTable) -> tuple[Change, ...]:
    """Return what `second` says otherwise than `first`; empty when both say the same.

    Servers are matched by server_id, devices by server_id and device_id; the order of lists and keys does not count.
    The devices of a server that was added or removed are counted there, not listed. `digest_table` of two tables is
    equal exactly when this is empty.
    """
    before, after = collect_facts(first), collect_facts(second)
    removed, added = _find_lone("removed", before, after), _find_lone("added", after, before)
    return (*removed, *added, *_find_changed(before, after))


def _find_lone(kind: ChangeKind, facts: Facts, others: Facts) -> Iterator[Change]:
    """Yield the subjects that only `facts` has, without those that go with their holder."""
    num_parts: dict[Subject, int] = {}
    lone = [subject for subject in facts if subject not in others]
    for subject in lone:
        holder = _holder_of(subject)
        if holder is not None:
            num_parts[holder] = num_parts.get(holder, 0) + 1
    for subject in lone:
        if _holder_of(subject) in others or subject.item not in _HOLDER:
            yield Change(kind, subject, fields=facts[subject], num_parts=num_parts.get(subject, 0))


def _holder_of(subject: Subject) -> Subject | None:
    holder = _HOLDER.get(subject.item)
    return None if holder is None else Subject(holder, subject.name, subject.copy)


def _find_changed(before: Facts, after: Facts) -> Iterator[Change]:
    for subject, fields in before.items():
        others = after.get(subject)
        if others is not None and others != fields:
            yield from _compare(subject, fields, others)


def _compare(subject: Subject, before: Fields, after: Fields) -> Iterator[Change]:
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield Change("changed", subject, key, before.get(key), after.get(key))
