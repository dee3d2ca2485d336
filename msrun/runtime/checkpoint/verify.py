"""Whether the files of a checkpoint are as they were written, and whether what they say of each other is true."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.directory import DAMAGED, MANIFEST, TENSORS, explain, find_contained, read_manifest
from msrun.runtime.checkpoint.index import METADATA, covers, flat_name, read_directory
from msrun.runtime.checkpoint.reader import check_set, find_set, open_parts
from msrun.runtime.checkpoint.storage import name_records

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
    """Read every file of a checkpoint, and of the directories that belong to it; compare its CRC-32, and what is said.

    Raises:
        CheckpointError: there is no checkpoint, or it is not complete.
    """
    found, manifest = find_set([path])
    if not manifest.world_size:
        raise CheckpointError(f"msrun has not written {path}, so nothing is known of its checksums")
    check_set(path, manifest, found)
    is_right = True
    for number in sorted(found):
        for checked in _verify_directory(found[number]) if found[number].is_dir() else _verify_file(found[number]):
            is_right = is_right and not checked.fault
            yield checked
    fault = _look_at_whole(list(found.values())) if is_right else ""
    if fault:
        yield CheckedFile(found[min(found)], TENSORS, 0, fault)


def _verify_directory(path: Path) -> Iterator[CheckedFile]:
    manifest = read_manifest(path)
    assert manifest is not None, "it was there a moment ago"
    disagreeing, disagreement = _find_disagreement(path, manifest.files)
    if disagreeing and disagreeing not in manifest.files:
        yield CheckedFile(path, disagreeing, 0, disagreement)
    for name, bytes_count in sorted(manifest.files.items()):
        expected, fault = manifest.checksums.get(name), ""
        try:
            actual = _sum_up(find_contained(path, name))
            if expected is not None and actual != expected:
                fault = f"CRC-32 is {actual:08x}, {expected:08x} was written"
        except (OSError, ValueError) as error:
            fault = explain(error)
        if name == disagreeing:
            fault = fault or disagreement
        yield CheckedFile(path, name, bytes_count, fault, expected is not None)


def _find_disagreement(folder: Path, files: Collection[str]) -> tuple[str, str]:
    """Return which file of a directory says otherwise than another, and what; both empty when all agree.

    Args:
        files: those that have checksums.
    """
    name = TENSORS if (folder / TENSORS).exists() else METADATA
    try:
        index = read_directory(folder, name)
        for part in (part for stored in index.values() for part in stored.parts.values()):
            if str(part.path.relative_to(folder)) not in files:
                return part.path.name, f"{MANIFEST} does not name it"
        name = METADATA
        theirs = read_directory(folder, name)
    except DAMAGED as error:
        return name, explain(error)
    differing = next((key for key in {**index, **theirs} if index.get(key) != theirs.get(key)), None)
    return ("", "") if differing is None else (name, f"it says otherwise of {flat_name(differing)} than {TENSORS}")


def _look_at_whole(paths: list[Path]) -> str:
    """Return what is wrong when all that belongs together is opened: the parts of some tensor make no whole."""
    try:
        reader = open_parts(paths)
        reader.state()
    except CheckpointError as error:
        return str(error)
    broken = next((key for key, stored in reader.tensors.items() if not covers(stored.parts, stored.shape)), None)
    return f"the parts of {flat_name(broken)} do not make the whole" if broken is not None else ""


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
