"""Three digests of a rank table: of its bytes, of its JSON, and of what it says.

Every rank of a job must read the same text: HCCL compares a checksum of it between the ranks. Equal bytes are that;
equal JSON differs in blanks and the order of keys only; equal meaning places the same ranks on the same devices.
Source: HCCL's check of consistency between ranks.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Literal

from ranktable.codec import decode_table
from ranktable.compare.facts import canonical, collect_facts
from ranktable.model import RankTable
from ranktable.reading.document import parse_document
from ranktable.reading.source import read_source

DigestKind = Literal["bytes", "json", "meaning"]
DIGEST_KINDS: tuple[DigestKind, ...] = ("bytes", "json", "meaning")
"""From the strictest to the most lenient: what is equal in one is equal in all after it."""

_MEANING_SALT = b"ranktable meaning 1\n"
"""Goes first into the digest of the meaning, and changes when what counts as meaning does."""


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

    def closest_kind(self, other: FileDigest) -> DigestKind | None:
        """Return the strictest kind in which both files are equal, None when they differ in all."""
        return next((kind for kind in DIGEST_KINDS if self.sha256_of[kind] == other.sha256_of[kind]), None)


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
        "json": _sha256(canonical(document.value).encode("ascii")),
        "meaning": digest_table(table),
    }
    return FileDigest(source, len(data), len(table.servers), table.world_size, digests)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
