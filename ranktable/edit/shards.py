"""A table's text in shards below a limit of size, with an index, and the way back.

Kubernetes refuses a ConfigMap above 1 MiB. Shards carry the bytes of one file, compressed or not; the index names them
with sizes and sha256, of each and of the whole. Source: Volcano's design of sharded rank tables (shards of 800 KiB; an
index goes to the cluster after its shards; the assembled file is replaced as a whole, the old one kept on any failure).
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ranktable.codec.layout import render_json
from ranktable.errors import EditError, ShardError
from ranktable.model import COMPLETED
from ranktable.reading.document import parse_document
from ranktable.reading.source import MAX_BYTES, read_bytes
from ranktable.write_folder import write_folder

Compression = Literal["none", "gzip"]
COMPRESSIONS: tuple[Compression, ...] = ("none", "gzip")
INDEX_NAME = "index.json"

_FORMAT = "ranktable-shards/1"
_MIN_SHARD_BYTES = 1024
_SIZE = re.compile(r"([1-9][0-9]{0,11})\s*(|B|KiB|MiB|KB|MB)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "kb": 1000, "mb": 1000**2}
_SHARD_NAME = re.compile(r"shard_[0-9]{3,6}\.bin")
_AGAIN = "copy the shards and their index again"


@dataclass(frozen=True, slots=True)
class Sharded:
    """The shards of a text by name, and the index over them."""

    shards: Mapping[str, bytes]
    index: Mapping[str, object]


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 800KiB, 1MiB or 819200; raises EditError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise EditError(f"size {text[:40]!r} is not one", "write 800KiB, 1MiB or a number of bytes")
    return int(match.group(1)) * _UNITS[match.group(2).lower()]


def shard_bytes(data: bytes, max_bytes: int, compression: Compression = "none") -> Sharded:
    """Return `data` in shards of at most `max_bytes` bytes; raises EditError for less than 1 KiB each."""
    if max_bytes < _MIN_SHARD_BYTES:
        raise EditError(f"shards of {max_bytes} bytes are too small", f"write {_MIN_SHARD_BYTES} or more")
    if compression not in COMPRESSIONS:
        raise EditError(f"compression {compression!r} is not known", f"choose one of {', '.join(COMPRESSIONS)}")
    if not data:
        raise EditError("there is nothing to put into shards", "give a rank table")
    packed = gzip.compress(data, mtime=0) if compression == "gzip" else data
    pieces = [packed[start : start + max_bytes] for start in range(0, len(packed), max_bytes)]
    shards = {f"shard_{number:03d}.bin": piece for number, piece in enumerate(pieces)}
    index = {
        "format": _FORMAT,
        "status": COMPLETED,
        "compression": compression,
        "size_bytes": len(data),
        "sha256": _sha256(data),
        "packed_size_bytes": len(packed),
        "packed_sha256": _sha256(packed),
        "shards": [
            {"name": name, "size_bytes": len(piece), "sha256": _sha256(piece)} for name, piece in shards.items()
        ],
    }
    return Sharded(shards, index)


def write_shards(sharded: Sharded, folder: Path) -> Path:
    """Write the shards and their index into `folder`, which must be new or empty; return the path of the index.

    The folder is there with all of them or not at all. Raises WriteError.
    """
    index = render_json(dict(sharded.index)).encode("ascii")
    write_folder(folder, [*sharded.shards.items(), (INDEX_NAME, index)])
    return folder / INDEX_NAME


def join_shards(index: Path) -> bytes:
    """Return the bytes that the shards beside `index` make up.

    Raises ShardError for an index that is none or not completed, and for a shard or a whole of another size or sha256;
    ReadError for a shard that cannot be read; JsonTextError for an index that is no JSON.
    """
    document = parse_document(read_bytes(str(index)), str(index))
    listed = _check_index(document.value, str(index))
    packed = b"".join(_read_shard(index.parent, shard) for shard in listed)
    _check_whole(packed, document.value, "packed_", str(index))
    data = _unpack(packed, document.value, str(index))
    _check_whole(data, document.value, "", str(index))
    return data


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    size_bytes: int
    sha256: str


def _check_index(value: Mapping[str, object], source: str) -> list[_Shard]:
    if value.get("format") != _FORMAT:
        raise ShardError(source, f'it is no index of shards (its "format" is not "{_FORMAT}")', "name the index.json")
    if value.get("status") != COMPLETED:
        raise ShardError(source, f'its status is not "{COMPLETED}"', "wait until its writer is done")
    if value.get("compression") not in COMPRESSIONS:
        raise ShardError(source, "its compression is not known", f"it is one of {', '.join(COMPRESSIONS)}")
    entries = value.get("shards")
    if not isinstance(entries, list) or not entries:
        raise ShardError(source, "it lists no shards", _AGAIN)
    shards = [_check_entry(entry, number, source) for number, entry in enumerate(entries)]
    total = sum(shard.size_bytes for shard in shards)
    if total != value.get("packed_size_bytes") or total > MAX_BYTES:
        raise ShardError(source, f"its shards have {total} bytes, not what it says of the whole", _AGAIN)
    return shards


def _check_entry(entry: object, number: int, source: str) -> _Shard:
    """Take names of ours only: an index is not to point at other files."""
    members = entry if isinstance(entry, dict) else {}
    name, size, digest = members.get("name"), members.get("size_bytes"), members.get("sha256")
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not (isinstance(name, str) and _SHARD_NAME.fullmatch(name) and is_size and isinstance(digest, str)):
        raise ShardError(source, f"its shards[{number}] has no proper name, size and sha256", _AGAIN)
    return _Shard(name, cast(int, size), digest)


def _read_shard(folder: Path, shard: _Shard) -> bytes:
    path = str(folder / shard.name)
    piece = read_bytes(path)
    if len(piece) != shard.size_bytes:
        raise ShardError(path, f"it has {len(piece)} bytes, the index says {shard.size_bytes}", _AGAIN)
    if _sha256(piece) != shard.sha256:
        raise ShardError(path, "its sha256 is not that of the index", _AGAIN)
    return piece


def _unpack(packed: bytes, value: Mapping[str, object], source: str) -> bytes:
    """Unpack no more than the index says, so that a small shard cannot fill the memory."""
    if value["compression"] == "none":
        return packed
    size = value.get("size_bytes")
    if not isinstance(size, int) or not 0 <= size <= MAX_BYTES:
        raise ShardError(source, "its size_bytes is no size of a rank table", _AGAIN)
    unpacker = zlib.decompressobj(wbits=31)
    try:
        return unpacker.decompress(packed, size + 1)
    except zlib.error as error:
        raise ShardError(source, "the shards are not gzip", _AGAIN) from error


def _check_whole(data: bytes, value: Mapping[str, object], prefix: str, source: str) -> None:
    if len(data) != value.get(f"{prefix}size_bytes"):
        said = value.get(f"{prefix}size_bytes")
        raise ShardError(source, f"the whole has {len(data)} bytes, the index says {said}", _AGAIN)
    if _sha256(data) != value.get(f"{prefix}sha256"):
        raise ShardError(source, "the sha256 of the whole is not that of the index", _AGAIN)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
