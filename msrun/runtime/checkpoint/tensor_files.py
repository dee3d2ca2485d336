"""Parts of tensors in the files of torch.distributed.checkpoint: written once, read back in any other cut.

Which rank writes what is known before the first byte, so writing itself needs no collective. What is read says
`part_index`, or in directories without one, of torch and of earlier versions, `dcp_metadata`.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint import dcp_metadata
from msrun.runtime.checkpoint.catalogue import Catalogue, TensorKey, flat_name
from msrun.runtime.checkpoint.directory import DAMAGED, MANIFEST, TENSORS, damaged, explain
from msrun.runtime.checkpoint.file_tensors import TensorPlace, read_box, reading
from msrun.runtime.checkpoint.part_index import StoredPart, StoredTensor, Written, read_index, write_index
from msrun.runtime.checkpoint.torch_saving import FileView, TensorStream, find_values, load_weights, system_errors
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.sharding.layout import Box


def write_parts(path: Path, parts: Iterable[tuple[TensorKey, Chunk]], rank: int) -> tuple[Written, dict[str, int]]:
    """Write parts into one file of a directory, through to the disk. No other rank is needed.

    torch's own writer keeps all tensors until its file is closed; here each may go as soon as it is written.

    Returns:
        Where each part lies, and the CRC-32 of the file by its name.

    Raises:
        OSError: as writing a file does.
    """
    name = f"__{rank}_0.distcp"
    written: Written = []
    with (
        system_errors(),
        (path / name).open("wb", buffering=0) as file,
        contextlib.closing(TensorStream(file)) as stream,
    ):
        for key, part in parts:
            begin = stream.tell()
            stream.save(part.tensor)
            written.append((key, StoredPart(part.box, name, begin, stream.tell() - begin)))
        stream.finish()
    return written, {name: stream.checksum}


def write_indexes(path: Path, catalogue: Catalogue, written: Sequence[Written]) -> dict[str, int]:
    """Write where the parts lie, for msrun and for torch; returns the CRC-32 of both files by their names.

    Raises:
        OSError: as writing a file does.
    """
    return write_index(path, catalogue, written) | dcp_metadata.write_metadata(path, catalogue, written)


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
        self._places: dict[StoredPart, TensorPlace] = {}
        try:
            self._tensors = read_index(path) if (path / TENSORS).exists() else dcp_metadata.read_metadata(path)
        except DAMAGED as error:
            raise damaged(path, error) from None
        self.keys: list[TensorKey] = list(self._tensors)

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._tensors[key].shape

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return self._tensors[key].dtype

    def boxes(self, key: TensorKey) -> list[Box]:
        """Return the parts that the files have."""
        return [part.box for part in self._tensors[key].parts]

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted."""
        for key, part in parts.items():
            found = (box.intersect(part.box) for box in self.boxes(key))
            if sum(math.prod(box.sizes) for box in found if box is not None) != math.prod(part.box.sizes):
                raise CheckpointError(
                    f"checkpoint {self.path}: parts of {flat_name(key)} are missing; load another one"
                )
        of_file: dict[str, list[tuple[TensorKey, StoredPart, Box, Tensor]]] = {}
        for key, part in parts.items():
            for stored in self._tensors[key].parts:
                common = stored.box.intersect(part.box)
                if common is not None:
                    target = part.tensor.detach()[common.slices_in(part.box)]
                    offsets = tuple(there.start for there in common.slices_in(stored.box))
                    inside = Box(stored.box.sizes, offsets, common.sizes)
                    of_file.setdefault(stored.file, []).append((key, stored, inside, target))
        for file, wanted in of_file.items():
            if not self._is_plain:
                for key, stored, inside, target in wanted:
                    target.copy_(self._load(key, stored)[inside.slices])
                continue
            with reading(self.path / file) as descriptor:
                for key, stored, inside, target in wanted:
                    read_box(descriptor, self._place(key, stored), inside, target)

    def _place(self, key: TensorKey, part: StoredPart) -> TensorPlace:
        """Return where the values of a part lie, inside of what torch.save wrote for it."""
        if part not in self._places:
            try:
                self._places[part] = find_part(self.path, part, self.dtype(key))
            except DAMAGED as error:
                raise damaged(self.path / part.file, error) from None
        return self._places[part]

    def _load(self, key: TensorKey, part: StoredPart) -> Tensor:
        """Return a part that torch's own writer wrote, which keeps the strides of tensors."""
        try:
            with (self.path / part.file).open("rb") as stream:
                view = io.BufferedReader(FileView(stream, part.offset, part.length))
                value = load_weights(cast("BinaryIO", view))
            if not isinstance(value, Tensor) or tuple(value.shape) != part.box.sizes:
                raise ValueError(f"{flat_name(key)} has another shape than its index says")
        except DAMAGED as error:
            raise damaged(self.path / part.file, error) from None
        return value.detach()


def find_part(folder: Path, part: StoredPart, dtype: torch.dtype) -> TensorPlace:
    """Return where the values of a part lie that `write_parts` wrote.

    Raises:
        DAMAGED: it is not there.
    """
    place = TensorPlace(0, part.box.sizes, dtype)
    with (folder / part.file).open("rb") as stream:
        offset, size = find_values(stream, part.offset, part.length)
    if size != place.bytes_count or offset + size > part.offset + part.length:
        raise ValueError(f"a part has {size} bytes, and its index says {place.bytes_count}")
    return replace(place, offset=offset)


def find_fault(folder: Path, files: Collection[str], *, is_plain: bool) -> tuple[str, str]:
    """Return which file of a directory says otherwise than another, and what; both empty when all agree.

    Args:
        files: those that have checksums.
        is_plain: `write_parts` wrote them.
    """
    name = TENSORS if (folder / TENSORS).exists() else dcp_metadata.METADATA
    try:
        tensors = read_index(folder) if name == TENSORS else dcp_metadata.read_metadata(folder)
        parts = [(part, tensor.dtype) for tensor in tensors.values() for part in tensor.parts]
        for part, dtype in parts:
            name = part.file
            if name not in files:
                return name, f"{MANIFEST} does not name it"
            if is_plain:
                find_part(folder, part, dtype)
        name = dcp_metadata.METADATA
        theirs = dcp_metadata.read_metadata(folder)
    except DAMAGED as error:
        return name, explain(error)
    for key in {**tensors, **theirs}:
        if _said(tensors.get(key)) != _said(theirs.get(key)):
            return name, f"it says otherwise of {flat_name(key)} than {TENSORS}"
    return "", ""


def _said(tensor: StoredTensor | None) -> Any:
    return tensor and (tensor.shape, tensor.dtype, {*tensor.parts})
