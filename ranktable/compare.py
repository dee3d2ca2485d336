"""Compares tables: what a table says, what two say differently (a diff), and digests that are equal for equal tables.

What a table says, apart from how it says it, are facts: a value per server, device, super pod, cluster and group. The
order of keys and of lists, blanks and line breaks are none. Two tables with equal facts place the same ranks on the
same devices with the same properties; `diff` and `digest` both go by them, so that they cannot disagree. Nothing is
taken for granted of the table: servers and devices that stand twice are facts of their own.

Every rank of a job must read the same text: HCCL compares a checksum of it between the ranks. Equal bytes are that.
Source: HCCL's check of consistency between ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from ranktable.codec import decode_table
from ranktable.files import read_source
from ranktable.model import Cluster, Device, Group, RankTable, Server, SuperPod
from ranktable.reading.document import parse_document

Fields = dict[str, str]
"""Values by the names of their keys, as canonical JSON."""

_Item = TypeVar("_Item")
ChangeKind = Literal["added", "removed", "changed"]
_HOLDER = {
    "device": "server",
    "super_pod_server": "super_pod",
    "cluster_server": "cluster",
    "cluster_super_pod": "cluster",
}
"""Whose coming and going includes that of the item."""
DigestKind = Literal["bytes", "meaning"]
DIGEST_KINDS: tuple[DigestKind, ...] = ("bytes", "meaning")
"""Files of equal bytes have equal meanings."""
_MEANING_SALT = b"ranktable meaning 1\n"
"""Goes first into the digest of the meaning, and changes when what counts as meaning does."""


class Subject(NamedTuple):
    """What a fact is about: the table, a server, a device of a server, a member of a super pod, ..."""

    item: str
    """"table", "server", "device", "super_pod", "super_pod_server", "cluster", "cluster_server", "cluster_super_pod",
    "group"."""
    name: str = ""
    """The id of the server, super pod, cluster or group."""
    copy: int = 0
    """0, and 1, 2, ... for those that have the name of an earlier one."""
    part: str = ""
    """The device id, or the id of the member."""
    part_copy: int = 0


Facts = dict[Subject, Fields]


def collect_facts(table: RankTable) -> Facts:
    """Return every fact of the table; its cost is linear in the devices."""
    facts: Facts = {Subject("table"): _table_facts(table)}
    for server, copy in _number_copies(table.servers, lambda server: server.server_id, _server_content):
        facts[Subject("server", server.server_id, copy)] = _server_facts(server)
        for device, part_copy in _number_copies(server.devices, lambda device: device.device_id, _device_content):
            subject = Subject("device", server.server_id, copy, str(device.device_id), part_copy)
            facts[subject] = _device_facts(device)
    for pod, copy in _number_copies(table.super_pods, lambda pod: pod.super_pod_id, _pod_content):
        facts[Subject("super_pod", pod.super_pod_id, copy)] = _fields({}, pod.extra)
        facts.update(_members("super_pod_server", pod.super_pod_id, copy, pod.server_ids))
    for cluster, copy in _number_copies(table.clusters, lambda cluster: cluster.cluster_id, _cluster_content):
        facts[Subject("cluster", cluster.cluster_id, copy)] = _fields({}, cluster.extra)
        facts.update(_members("cluster_server", cluster.cluster_id, copy, cluster.server_ids))
        facts.update(_members("cluster_super_pod", cluster.cluster_id, copy, cluster.super_pod_ids))
    for group, copy in _number_copies(table.groups, lambda group: group.name, _group_content):
        facts[Subject("group", group.name, copy)] = _fields({}, group.extra)
    return facts


def canonical(value: object) -> str:
    """Return the one text of a JSON value: sorted keys, no blanks, ASCII.

    >>> canonical({"b": 1, "a": ["x"]})
    '{"a":["x"],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def same_json(first: object, second: object) -> bool:
    """True when the two are the same JSON value; the order of keys does not count, and 1, 1.0 and true differ."""
    return first is second or canonical(first) == canonical(second)


def _number_copies(
    items: Iterable[_Item], name: Callable[[_Item], Hashable], content: Callable[[_Item], str]
) -> Iterator[tuple[_Item, int]]:
    """Yield each item with its number among those of its name, which are ordered by content, not by place."""
    by_name: dict[Hashable, list[_Item]] = {}
    for item in items:
        by_name.setdefault(name(item), []).append(item)
    for same in by_name.values():
        ordered = sorted(same, key=content) if len(same) > 1 else same
        yield from ((item, copy) for copy, item in enumerate(ordered))


def _table_facts(table: RankTable) -> Fields:
    known = {
        "dialect": table.dialect,
        "status": table.status,
        "server_count": table.declared_server_count,
    }
    return _fields(known, table.extra)


def _server_facts(server: Server) -> Fields:
    return _fields({"host_ip": server.host_ip, "pod_ip": server.pod_ip, "group": server.group}, server.extra)


def _device_facts(device: Device) -> Fields:
    known = {
        "rank_id": device.rank_id,
        "device_ip": device.device_ip,
        "super_device_id": device.super_device_id,
    }
    return _fields(known, device.extra)


def _fields(known: Mapping[str, object], extra: Mapping[str, object]) -> Fields:
    """Return the values that are there; a key that the file has beside the one of that name keeps a name of its own."""
    fields = {key: canonical(value) for key, value in known.items() if value is not None}
    fields.update((f"extra {key}" if key in fields else key, canonical(value)) for key, value in extra.items())
    return fields


def _members(item: str, name: str, copy: int, members: Iterable[str]) -> Facts:
    """Return a fact per member; a member that stands there more than once says how often."""
    counts = Counter(members)
    return {
        Subject(item, name, copy, member): {"times": str(count)} if count > 1 else {}
        for member, count in counts.items()
    }


def _device_content(device: Device) -> str:
    return canonical(_device_facts(device))


def _server_content(server: Server) -> str:
    devices = sorted(canonical([device.device_id, _device_facts(device)]) for device in server.devices)
    return canonical([_server_facts(server), devices])


def _pod_content(pod: SuperPod) -> str:
    return canonical([_fields({}, pod.extra), sorted(pod.server_ids)])


def _cluster_content(cluster: Cluster) -> str:
    return canonical([_fields({}, cluster.extra), sorted(cluster.server_ids), sorted(cluster.super_pod_ids)])


def _group_content(group: Group) -> str:
    return canonical(_fields({}, group.extra))


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


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The digests of one file, sha256 in hexadecimal."""

    source: str
    size_bytes: int
    num_servers: int
    num_devices: int
    sha256_of: dict[DigestKind, str]

    def kind_of(self, sha256: str) -> DigestKind | None:
        """Return which of the digests `sha256` is, None when it is none of them."""
        return next((kind for kind in DIGEST_KINDS if self.sha256_of[kind] == sha256), None)


def digest_table(table: RankTable) -> str:
    """Return the sha256 of what `table` says; equal exactly for tables between which `diff_tables` finds nothing."""
    facts = collect_facts(table)
    digest = hashlib.sha256(_MEANING_SALT)
    for subject in sorted(facts):
        digest.update(canonical([subject, facts[subject]]).encode("ascii") + b"\n")
    return digest.hexdigest()


def digest_file(path: str | os.PathLike[str]) -> FileDigest:
    """Return the digests of the rank table at `path` (`-` is standard input), whatever its status.

    Raises ReadError, JsonTextError, UnsupportedDialectError, UnknownDialectError, InvalidTableError, NotReadyError.
    """
    source, data = read_source(path)
    document = parse_document(data, source)
    table = decode_table(document)
    digests: dict[DigestKind, str] = {
        "bytes": _sha256(data),
        "meaning": digest_table(table),
    }
    return FileDigest(source, len(data), len(table.servers), table.world_size, digests)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
