"""`.metadata` of torch.distributed.checkpoint: written for torch's own readers, and read without running anything.

It is a pickle, and torch's readers run what it names. Here it is read as records (`inert_pickle`), and only where a
directory has no index of ours: one that torch or an earlier msrun wrote.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,
)  # a test looks after the private name
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from msrun.runtime.checkpoint.catalogue import NETWORK, Catalogue, TensorKey, flat_name
from msrun.runtime.checkpoint.directory import read_contained
from msrun.runtime.checkpoint.file_tensors import DTYPES, read_numbers
from msrun.runtime.checkpoint.part_index import IndexBuilder, PartIndex, StoredPart, Written
from msrun.runtime.inert_pickle import Named, load_inert

METADATA = ".metadata"
_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *DTYPES},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath"},  # of the folder it was written to
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
    "builtins": {"getattr"},  # enumerations of Python 3.11; nothing is called
}


def write_metadata(folder: Path, catalogue: Catalogue, written: Sequence[Written]) -> dict[str, int]:
    """Write what torch needs to find the parts; returns the CRC-32 of the file by its name.

    Raises:
        OSError: as writing a file does.
    """
    tensors: dict[str, Any] = {}
    for key, entry in catalogue.items():
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in entry.pieces]
        properties = TensorProperties(dtype=entry.dtype)
        tensors[flat_name(key)] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    found = Metadata(tensors, {flat_name(key): key for key in catalogue})
    FileSystemWriter(folder).finish(found, [[_result(*part) for part in of_rank] for of_rank in written])
    return {METADATA: zlib.crc32((folder / METADATA).read_bytes())}


def _result(key: TensorKey, part: StoredPart) -> WriteResult:
    index = MetadataIndex(flat_name(key), torch.Size(part.box.offsets))
    return WriteResult(index, part.length, _StorageInfo(part.file, part.offset, part.length))


def read_metadata(folder: Path) -> PartIndex:
    """Return where the tensors lie; values that are no tensors are left out.

    Raises:
        DAMAGED: it is missing or damaged, names something else than torch's own writer does, or says what cannot be.
    """
    root = load_inert(read_contained(folder, METADATA), lambda module, name: name in _NAMES.get(module, ()))
    content = _state(root, "Metadata")
    paths: dict[str, Any] = content["planner_data"] or {}
    places = {
        (index["fqn"], _size(index["offset"])): _state(where, "_StorageInfo")
        for index, where in ((_state(key, "MetadataIndex"), where) for key, where in content["storage_data"].items())
        if index.get("offset") is not None
    }
    builder = IndexBuilder(folder)
    for name, item in content["state_dict_metadata"].items():
        key = _key(paths.get(name, (name,)))
        if key is not None and _name(item) == "TensorStorageMetadata":
            tensor = _state(item, "TensorStorageMetadata")
            dtype = _name(_state(tensor["properties"], "TensorProperties", tuple)[0])
            chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in tensor["chunks"]]
            boxes = [(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
            parts = [(offsets, sizes, _place(places[name, offsets])) for offsets, sizes in boxes]
            builder.add(key, _size(tensor["size"]), dtype, parts)
    return builder.tensors


def _place(stored: dict[str, Any]) -> dict[str, Any]:
    if stored.get("transform_descriptors"):
        raise ValueError("its tensors are compressed: save it without an extension")
    return {"file": stored["relative_path"], "offset": stored["offset"], "length": stored["length"]}


def _name(value: Any) -> str:
    return value.name if isinstance(value, Named) or (isinstance(value, type) and issubclass(value, Named)) else ""


def _state(value: Any, name: str, kind: type = dict) -> Any:
    if _name(value) != name or not isinstance(value.state, kind):
        raise ValueError(f"it holds something else where a {name} belongs")
    return value.state


def _size(value: Any) -> tuple[int, ...]:
    if _name(value) != "Size" or len(value.args) != 1:
        raise ValueError("it holds something else where a Size belongs")
    return read_numbers(value.args[0])


def _key(path: Any) -> TensorKey | None:
    """Return the key of a tensor by its path in the dict that was saved; None for what is in a list."""
    if not isinstance(path, list | tuple) or not path or not all(isinstance(part, str) for part in path):
        return None
    first, *others = path
    if not others:
        return NETWORK, first
    return (NETWORK, ".".join(others)) if first == NETWORK else (first, *others)
