"""`tensors.json` of a directory: which parts of which tensors lie where. Reading it runs nothing.

Each part is given by its place in the whole tensor, its file, and the bytes there that torch.save wrote for it.
`.metadata`, which torch's readers need, says the same beside it, but is a pickle (`dcp_metadata`).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from msrun.runtime.checkpoint.catalogue import Catalogue, TensorKey, flat_name, read_key
from msrun.runtime.checkpoint.directory import TENSORS, find_contained, read_contained
from msrun.runtime.checkpoint.file_tensors import find_place, read_numbers
from msrun.runtime.sharding.layout import Box


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor, and where torch.save has written it."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, as far as a directory has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]


PartIndex = dict[TensorKey, StoredTensor]
Written = list[tuple[TensorKey, StoredPart]]
"""What one rank has written."""


def write_index(folder: Path, catalogue: Catalogue, written: Iterable[Written]) -> dict[str, int]:
    """Write the index, through to the disk; returns its CRC-32 by its name.

    Raises:
        OSError: as writing a file does.
    """
    parts: dict[TensorKey, list[dict[str, Any]]] = {key: [] for key in catalogue}
    for key, part in (found for of_rank in written for found in of_rank):
        place = {"file": part.file, "offset": part.offset, "length": part.length}
        parts[key].append({"offsets": part.box.offsets, "sizes": part.box.sizes, **place})
    tensors = [
        {"key": key, "dtype": str(entry.dtype).removeprefix("torch."), "shape": entry.shape, "parts": parts[key]}
        for key, entry in catalogue.items()
    ]
    content = json.dumps(tensors).encode()
    with (folder / TENSORS).open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return {TENSORS: zlib.crc32(content)}


def read_index(folder: Path) -> PartIndex:
    """Return what the index says, each part within its tensor and its file.

    Raises:
        DAMAGED: it is missing or damaged, or a file is missing or too short.
    """
    builder = IndexBuilder(folder)
    for item in json.loads(read_contained(folder, TENSORS)):
        parts = [(part["offsets"], part["sizes"], part) for part in item["parts"]]
        builder.add(read_key(item["key"]), item["shape"], item["dtype"], parts)
    return builder.tensors


class IndexBuilder:
    """Collects what an index says of a folder, whoever wrote it, and refuses what cannot be.

    Each byte of a file is there for one part, and each value of a tensor in one part: nothing that is read takes more
    memory than the files have bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: PartIndex = {}
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def add(self, key: TensorKey, shape: Any, dtype: Any, parts: Iterable[tuple[Any, Any, Mapping[str, Any]]]) -> None:
        """Add a tensor.

        Args:
            dtype: name of the type.
            parts: offsets, sizes, and a mapping with "file", "offset" and "length", of each.

        Raises:
            ValueError, KeyError, TypeError, OSError: what is said of it cannot be.
        """
        whole = find_place(0, shape, dtype, 1 << 63)
        name = flat_name(key)[:200]
        found = []
        for offsets, sizes, where in parts:
            file, (offset, length) = where["file"], read_numbers([where["offset"], where["length"]])
            self._take(file, offset, length)
            part = find_place(0, sizes, dtype, length)
            box = Box(whole.shape, read_numbers(offsets), part.shape)
            edges = zip(box.shape, box.offsets, box.sizes, strict=True)
            if any(begin + size > edge for edge, begin, size in edges):
                raise ValueError(f"a part of {name} is outside of it")
            found.append(StoredPart(box, file, offset, length))
        if key in self.tensors or sum(math.prod(part.box.sizes) for part in found) > math.prod(whole.shape):
            raise ValueError(f"parts of {name} are there twice")
        self.tensors[key] = StoredTensor(whole.shape, whole.dtype, tuple(found))

    def _take(self, file: Any, offset: int, length: int) -> None:
        if file not in self._sizes:
            self._sizes[file] = find_contained(self._folder, file).stat().st_size
            self._taken[file] = 0
        self._taken[file] += length
        if max(offset + length, self._taken[file]) > self._sizes[file]:
            raise ValueError(f"{file} has {self._sizes[file]} bytes, fewer than its parts")
