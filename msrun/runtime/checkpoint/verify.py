"""Whether the files of a checkpoint are as they were written: their checksums, summed up again in pieces."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msrun.errors import CheckpointError
from msrun.runtime.agreement import describe
from msrun.runtime.checkpoint.directory import DAMAGED, read_manifest
from msrun.runtime.checkpoint.plain_file import name_records
from msrun.runtime.checkpoint.reader import check_set, find_set

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class CheckedFile:
    """One file of a directory, or one record of a file."""

    path: Path
    name: str
    bytes_count: int
    fault: str
    """What is wrong, in words; empty when nothing is."""
    is_summed: bool = True
    """False when there is no checksum to compare with: an earlier version wrote it."""


def verify_checkpoint(path: Path) -> Iterator[CheckedFile]:
    """Read every file of a checkpoint, and of the directories that belong to it, and compare its CRC-32.

    Raises:
        CheckpointError: there is no checkpoint, or it is not complete.
    """
    found, manifest = find_set([path])
    if not manifest.world_size:
        raise CheckpointError(f"msrun has not written {path}, so nothing is known of its checksums")
    check_set(path, manifest, found)
    for number in sorted(found):
        yield from _verify_directory(found[number]) if found[number].is_dir() else _verify_file(found[number])


def _verify_directory(path: Path) -> Iterator[CheckedFile]:
    manifest = read_manifest(path)
    assert manifest is not None, "it was there a moment ago"
    for name, bytes_count in sorted(manifest.files.items()):
        expected, fault = manifest.checksums.get(name), ""
        try:
            actual = _sum_up(path / name)
            if expected is not None and actual != expected:
                fault = f"CRC-32 is {actual:08x}, {expected:08x} was written"
        except OSError as error:
            fault = describe(error)
        yield CheckedFile(path, name, bytes_count, fault, expected is not None)


def _sum_up(path: Path) -> int:
    checksum = 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _verify_file(path: Path) -> Iterator[CheckedFile]:
    names = name_records(path)
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            fault = ""
            try:
                with archive.open(record) as stream:
                    while stream.read(_CHUNK_BYTES):
                        pass
            except DAMAGED as error:
                fault = "its CRC-32 is not the one that was written" if "CRC" in str(error) else str(error)
            yield CheckedFile(path, names.get(record.filename, record.filename), record.file_size, fault)
