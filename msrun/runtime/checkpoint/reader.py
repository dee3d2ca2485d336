"""One checkpoint to read from: a file, a directory, or the directories that the ranks of one save wrote apart."""

from __future__ import annotations

import io
import math
import os
import re
import time
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint import directory
from msrun.runtime.checkpoint.directory import MANIFEST, STATE, TENSORS
from msrun.runtime.checkpoint.index import (
    INDEX_SUFFIX,
    METADATA,
    NETWORK,
    Index,
    StoredTensor,
    TensorKey,
    covers,
    flat_name,
    index_of,
    load_torch_file,
    load_weights,
    read_directory,
    read_file,
    read_safetensors,
)
from msrun.runtime.checkpoint.storage import name_records
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.parallel.strategy_file import Strategy, read_strategy, shared_ranks
from msrun.runtime.sharding.layout import Box, whole


class CheckpointReader:
    """Reads parts of the tensors of one checkpoint; each rank for itself.

    Args:
        path: where it is, for messages and for what is no tensor.
        indexes: of its files and directories; of a part that several have, the first one's is read.
        is_foreign: msrun has not written them.
    """

    def __init__(self, path: Path, indexes: Sequence[Index], *, is_foreign: bool = False) -> None:
        self.path, self._is_foreign = path, is_foreign
        self.sources_count = len(indexes)
        self.tensors: Index = {}
        for index in indexes:
            for key, stored in index.items():
                first = self.tensors.setdefault(key, StoredTensor(stored.shape, stored.dtype, {}))
                if (stored.shape, stored.dtype) != (first.shape, first.dtype):
                    raise CheckpointError(
                        f"{path}: its files have {flat_name(key)} in different shapes or types: give those of one save"
                    )
                for box, part in stored.parts.items():
                    first.parts.setdefault(box, part)

    @property
    def network_names(self) -> list[str]:
        """Names of the network's tensors."""
        return [key[1] for key in self.tensors if key[0] == NETWORK]

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted."""
        for key, part in parts.items():
            stored, found = self.tensors[key], list(self.tensors[key].parts.values())
            chunks = [_chunk(one.box) for one in found]
            known = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
            items = create_read_items_for_chunk_list(flat_name(key), known, [_chunk(part.box)])
            if sum(math.prod(item.lengths) for item in items) != math.prod(part.box.sizes):
                raise CheckpointError(
                    f"checkpoint {self.path}: parts of {flat_name(key)} are missing; load another one"
                )
            for item in items if math.prod(part.box.sizes) else ():
                assert item.storage_index.index is not None
                one = found[item.storage_index.index]
                target = part.tensor.detach()[_slices(item.dest_offsets, item.lengths)]
                try:
                    one.read(stored.dtype, _slices(item.storage_offsets, item.lengths), target)
                except directory.DAMAGED as error:
                    raise directory.damaged(one.path, error) from None

    def read(self, key: TensorKey) -> Tensor:
        """Return a whole tensor."""
        stored = self.tensors[key]
        if sum(math.prod(box.sizes) for box in stored.parts) < math.prod(stored.shape):  # before it takes memory
            raise CheckpointError(f"checkpoint {self.path}: parts of {flat_name(key)} are missing; load another one")
        try:
            value = torch.empty(stored.shape, dtype=stored.dtype)
        except RuntimeError as error:  # more than there is memory
            raise directory.damaged(self.path, error) from None
        self.fill({key: Chunk(value, whole(stored.shape))})
        return value

    def state(self) -> dict[str, Any]:
        """Return what is no tensor of a layout; of a file that msrun has not written, that there is nothing."""
        if self._is_foreign:
            return {"extra": {}, "appended": {}, "optimizer": None, "random": {"now": [None], "epoch": [None]}}
        try:
            state = load_weights(io.BytesIO(directory.read_record(self.path, STATE)))
            if not _is_state(state):
                raise ValueError(f"{STATE} holds something else than the state of a training")
        except directory.DAMAGED as error:
            raise directory.damaged(self.path, error) from None
        return dict(state)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


_OF_RANDOM = {"torch": Tensor, "python": tuple, "numpy": tuple}


def _is_state(value: Any) -> bool:
    """Return whether a value has the form of what `save` writes as the state."""
    if not isinstance(value, dict) or not {"extra", "appended", "optimizer", "random"} <= value.keys():
        return False
    randoms = value["random"].values() if isinstance(value["random"], dict) else []
    optimizer = value["optimizer"] if value["optimizer"] is not None else {"groups": [], "state": {}}
    return (
        isinstance(value["extra"], dict)
        and isinstance(value["appended"], dict)
        and len(randoms) == 2
        and all(isinstance(states, list) and states for states in randoms)
        and _are([s for states in randoms for s in states if s is not None], list, _OF_RANDOM)
        and _are(optimizer.get("groups"), list, {"parameters": list, "settings": dict})
        and _are(optimizer.get("state"), dict, {"parts": list, "values": dict})
    )


def _are(values: Any, kind: type[list[Any] | dict[Any, Any]], fields: Mapping[str, type]) -> bool:
    """Return whether a list or dict holds dicts with fields of these types."""
    if not isinstance(values, kind):
        return False
    each: Iterable[Any] = values.values() if isinstance(values, dict) else values
    return all(
        isinstance(item, dict) and all(isinstance(item.get(name), of_type) for name, of_type in fields.items())
        for item in each
    )


def open_parts(paths: Sequence[Path]) -> CheckpointReader:
    """Return a reader of what of a checkpoint is here.

    Args:
        paths: of a complete checkpoint, or directories of one save.
    """
    path = paths[0]
    if directory.read_manifest(path) is not None:
        return CheckpointReader(path, [_read_index(found) for found in paths])
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        indexes = read_safetensors(path)
    elif path.is_dir():
        indexes = [_read_index(path)]
    else:
        indexes = [index_of(path, {(NETWORK, name): value for name, value in load_torch_file(path).items()})]
    return CheckpointReader(path, indexes, is_foreign=True)


def _read_index(path: Path) -> Index:
    try:
        return read_directory(path) if path.is_dir() else read_file(path)
    except directory.DAMAGED as error:
        raise directory.damaged(path, error) from None


def look_at(path: Path) -> directory.Manifest | None:
    """Return what a checkpoint says of itself, or could say if msrun had written it; None when it is not complete."""
    manifest = directory.read_manifest(path)
    if manifest is None and is_foreign(path):
        return directory.Manifest(directory.Position(), world_size=0, serial=0, saved_at=path.stat().st_mtime)
    return manifest


def find_set(paths: Sequence[Path]) -> tuple[dict[int, Path], directory.Manifest]:
    """Return the directories that one save wrote, by their number, as far as they are here.

    Args:
        paths: some of them, or all; those that the manifest names are looked for beside them.
    """
    found: dict[int, Path] = {}
    first: directory.Manifest | None = None
    for path in paths:
        manifest = look_at(path)
        if manifest is None:
            what = f"{path} is no complete checkpoint" if path.exists() else f"there is no checkpoint {path}"
            raise CheckpointError(f"{what}: give another one")
        first = first or manifest
        if manifest.save_id != first.save_id:
            raise CheckpointError(f"{paths[0]} and {path} are of different saves: give those of one")
        found.setdefault(manifest.place, path)
    assert first is not None, "at least one path is given"
    for number, place in enumerate(first.places):
        path = Path(os.path.normpath(paths[0].parent / place.path))
        if number not in found:
            other = directory.read_manifest(path)
            if other is not None and (other.save_id, other.place) == (first.save_id, number):
                found[number] = path
    return found, first


def check_set(path: Path, manifest: directory.Manifest, found: Collection[int]) -> None:
    """Refuse a set of directories that is not complete."""
    missing = [place for number, place in enumerate(manifest.places) if number not in found]
    if missing:
        ranks = ", ".join(str(rank) for rank in missing[0].ranks[:8])
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"checkpoint {path} is one of {len(manifest.places)} directories of one save, and that of rank {ranks} "
            f"({missing[0].path} beside it){more} is missing: copy all of them to where they were, or give them all to "
            "load_distributed_checkpoint"
        )


def open_checkpoint(paths: Sequence[Path], *, needs_all: bool = True) -> tuple[CheckpointReader, directory.Manifest]:
    """Return a reader of a checkpoint, of which one path is enough, and what it says of itself.

    Args:
        needs_all: False: of several directories some may be missing.
    """
    found, manifest = find_set(paths)
    if needs_all:
        check_set(paths[0], manifest, found)
    return open_parts(list(found.values())), manifest


def is_foreign(path: Path) -> bool:
    """Return whether a file or directory looks like one to read, which msrun has not written."""
    if path.is_dir() and not path.name.endswith((directory.SAVING, directory.REMOVING)):
        return (path / METADATA).is_file() and not any((path / name).exists() for name in (MANIFEST, STATE))
    if not path.is_file():
        return False
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        return True
    if not zipfile.is_zipfile(path):
        return False
    try:
        directory.read_record(path, MANIFEST)
    except directory.DAMAGED:
        return True
    return False


_RANK_FOLDER = re.compile(r"rank_(\d+)")
StrPath = str | os.PathLike[str]


def find_rank_checkpoints(folder: Path) -> dict[int, Path]:
    """Return rank -> its checkpoint: the last one by name in `rank_N`; or {0: folder} when it is a checkpoint itself.

    Raises:
        CheckpointError: there is none.
    """
    ranks = {int(found[1]): path for path in folder.glob("rank_*") if (found := _RANK_FOLDER.fullmatch(path.name))}
    if not ranks:
        return {0: folder}
    last = {}
    for rank, path in sorted(ranks.items()):
        names = {entry.name: entry for entry, _ in directory.find_checkpoints(path)}
        names |= {entry.name: entry for entry in path.iterdir() if is_foreign(entry)}
        if not names:
            raise CheckpointError(f"{path} has no checkpoint: copy that of rank {rank} there")
        last[rank] = names[max(names)]
    return last


def open_source(
    sources: Mapping[int, Path], strategy_file: StrPath | None = None, *, needs_all: bool = True
) -> tuple[CheckpointReader, directory.Manifest]:
    """Return a reader of a checkpoint, whole or in the ranks' files.

    Args:
        sources: rank -> its file or directory; one is enough where it is complete, or names the others.
        strategy_file: how the slices of plain torch.save files were cut.
        needs_all: refuse a set of which some are missing.
    """
    paths = [path.absolute() for path in sources.values()]
    if strategy_file is not None and all(is_foreign(path) for path in paths):
        return _open_slices(sources, read_strategy(strategy_file), needs_all=needs_all)
    return open_checkpoint(paths, needs_all=needs_all)


def _open_slices(
    sources: Mapping[int, Path], strategy: Strategy, *, needs_all: bool
) -> tuple[CheckpointReader, directory.Manifest]:
    count = shared_ranks([strategy])
    missing = [rank for rank in range(count) if rank not in sources]
    if missing and needs_all:
        raise CheckpointError(f"the strategy is one of {count} ranks, and the file of rank {missing[0]} is missing")
    indexes = []
    for rank, path in sources.items():
        tensors: dict[TensorKey, Tensor] = {(NETWORK, name): value for name, value in load_torch_file(path).items()}
        boxes: dict[TensorKey, Box] = {}
        for name, layout in strategy.items():
            box = layout.box(rank)
            value = tensors.get((NETWORK, name))
            if value is not None and box is not None:
                if tuple(value.shape) != box.sizes:
                    raise CheckpointError(
                        f"{path}: {name} has shape {tuple(value.shape)}, rank {rank} has {box.sizes} by the strategy: "
                        "give the strategy file of these checkpoints"
                    )
                boxes[NETWORK, name] = box
        indexes.append(index_of(path, tensors, boxes))
    manifest = directory.Manifest(directory.Position(), world_size=count, serial=0, saved_at=time.time())
    return CheckpointReader(next(iter(sources.values())), indexes, is_foreign=True), manifest


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
    manifest = directory.read_manifest(path)
    assert manifest is not None, "it was there a moment ago"
    disagreeing, disagreement = _find_disagreement(path, manifest.files)
    if disagreeing and disagreeing not in manifest.files:
        yield CheckedFile(path, disagreeing, 0, disagreement)
    for name, bytes_count in sorted(manifest.files.items()):
        expected, fault = manifest.checksums.get(name), ""
        try:
            actual = _sum_up(directory.find_contained(path, name))
            if expected is not None and actual != expected:
                fault = f"CRC-32 is {actual:08x}, {expected:08x} was written"
        except (OSError, ValueError) as error:
            fault = directory.explain(error)
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
    except directory.DAMAGED as error:
        return name, directory.explain(error)
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
            except directory.DAMAGED as error:
                fault = "its CRC-32 is not the one that was written" if "CRC" in str(error) else str(error)
            yield CheckedFile(path, names.get(record.filename, record.filename), record.file_size, fault)
