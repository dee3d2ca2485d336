"""Parts of tensors in the files of torch.distributed.checkpoint: written once, read back in any other cut.

Planners and metadata speak of boxes alone, so no DTensor and no device mesh is needed on either side. Which rank writes
what is known before the first byte, so writing itself needs no collective.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (  # a test looks after the private names
    DEFAULT_SUFFIX,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.catalogue import Catalogue
from msrun.runtime.checkpoint.directory import DAMAGED
from msrun.runtime.checkpoint.file_tensors import TensorPlace, read_box, reading
from msrun.runtime.checkpoint.tensor_key import TensorKey, flat_name
from msrun.runtime.checkpoint.torch_saving import TensorStream, find_values, system_errors
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.sharding.box import Box

METADATA = ".metadata"
Written = list[WriteResult]
"""torch's records of where the parts lie."""


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def write_parts(path: Path, parts: Iterable[tuple[TensorKey, Chunk]], rank: int) -> tuple[Written, dict[str, int]]:
    """Write parts into one file of a directory, through to the disk. No other rank is needed.

    torch's own writer keeps all tensors until its file is closed; here each may go as soon as it is written.

    Returns:
        Where each part lies, and the CRC-32 of the file by its name.

    Raises:
        OSError: as writing a file does.
    """
    name = f"__{rank}_0{DEFAULT_SUFFIX}"
    written = []
    with (
        system_errors(),
        (path / name).open("wb", buffering=0) as file,
        contextlib.closing(TensorStream(file)) as stream,
    ):
        for key, part in parts:
            begin = stream.tell()
            stream.save(part.tensor)
            length = stream.tell() - begin
            index = MetadataIndex(flat_name(key), torch.Size(part.box.offsets))
            written.append(WriteResult(index, length, _StorageInfo(name, begin, length)))
        stream.finish()
    return written, {name: stream.checksum}


def write_metadata(path: Path, catalogue: Catalogue, written: Sequence[Written]) -> dict[str, int]:
    """Write what torch needs to find the parts; returns the CRC-32 of the file by its name.

    Raises:
        OSError: as writing a file does.
    """
    tensors: dict[str, Any] = {}
    for key, entry in catalogue.items():
        chunks = [_chunk(box) for box, _ in entry.pieces]
        properties = TensorProperties(dtype=entry.dtype)
        tensors[flat_name(key)] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    found = Metadata(tensors, {flat_name(key): key for key in catalogue})
    FileSystemWriter(path).finish(found, list(written))
    return {METADATA: zlib.crc32((path / METADATA).read_bytes())}


class _LoadPlanner(DefaultLoadPlanner):
    """Names the tensors to be filled."""

    def __init__(self, parts: Mapping[str, Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].tensor


class PartFilesReader:
    """Reads parts of the tensors of one directory; each rank for itself.

    Args:
        is_plain: `write_parts` wrote it, so that the values lie row by row, and are read from where they lie without
            what torch.load would read around them.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, path: Path, *, is_plain: bool = True) -> None:
        self.path = path
        self._is_plain = is_plain
        self._places: dict[tuple[str, Box], tuple[Path, TensorPlace]] = {}
        self._reader = FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}; load another one") from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors: dict[str, TensorStorageMetadata] = {
            name: value
            for name, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        paths = metadata.planner_data or {}
        self.keys: list[TensorKey] = [tuple(paths[name]) for name in self._tensors if name in paths]

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return tuple(self._tensors[flat_name(key)].size)

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return self._tensors[flat_name(key)].properties.dtype

    def boxes(self, key: TensorKey) -> list[Box]:
        """Return the parts that the files have."""
        found = self._tensors[flat_name(key)]
        return [Box(tuple(found.size), tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted."""
        for key, part in parts.items():
            common = (box.intersect(part.box) for box in self.boxes(key))
            if sum(math.prod(box.sizes) for box in common if box is not None) != math.prod(part.box.sizes):
                raise CheckpointError(
                    f"checkpoint {self.path}: parts of {flat_name(key)} are missing; load another one"
                )
        if self._is_plain:
            self._fill_plainly(parts)
            return
        flat = {flat_name(key): part for key, part in parts.items()}
        items = []
        for name, part in flat.items():
            items += create_read_items_for_chunk_list(name, self._tensors[name], [_chunk(part.box)])
        try:
            self._reader.read_data(LoadPlan(items), _LoadPlanner(flat)).wait()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise CheckpointError(f"checkpoint {self.path} cannot be read: {reason}; load another one") from None

    def _fill_plainly(self, parts: Mapping[TensorKey, Chunk]) -> None:
        of_file: dict[Path, list[tuple[TensorPlace, Box, Tensor]]] = {}
        for key, part in parts.items():
            for box in self.boxes(key):
                common = box.intersect(part.box)
                if common is not None:
                    path, place = self._place(key, box)
                    inside = Box(box.sizes, tuple(s.start for s in common.slices_in(box)), common.sizes)
                    target = part.tensor.detach()[common.slices_in(part.box)]
                    of_file.setdefault(path, []).append((place, inside, target))
        for path, wanted in of_file.items():
            with reading(path) as descriptor:
                for place, box, target in wanted:
                    read_box(descriptor, place, box, target)

    def _place(self, key: TensorKey, box: Box) -> tuple[Path, TensorPlace]:
        """Return where the values of a part lie, inside of what torch.save wrote for it."""
        name = flat_name(key)
        if (name, box) not in self._places:
            stored = self._reader.storage_data[MetadataIndex(name, torch.Size(box.offsets))]
            path = self.path / stored.relative_path
            place = TensorPlace(0, box.sizes, self.dtype(key))
            try:
                with path.open("rb") as stream:
                    offset, size = find_values(stream, stored.offset, stored.length)
            except DAMAGED as error:
                raise CheckpointError(f"checkpoint {path} cannot be read: {error}; load another one") from None
            if size != place.bytes_count:
                raise CheckpointError(f"checkpoint {path} cannot be read: {name} has {size} bytes; load another one")
            self._places[name, box] = path, replace(place, offset=offset)
        return self._places[name, box]
