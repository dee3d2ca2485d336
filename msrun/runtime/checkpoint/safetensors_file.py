"""Files in the safetensors format, and Hugging Face's index of several of them: written and read in place.

The format is eight bytes with the length of a JSON header, the header, and the values (huggingface/safetensors,
README). The `safetensors` package writes a file from tensors that are all in memory; here one is at a time, and reading
a part of a tensor reads that part. Tests hold the files against the package.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.catalogue import NETWORK, TensorKey
from msrun.runtime.checkpoint.directory import DAMAGED, explain, find_contained
from msrun.runtime.checkpoint.file_tensors import FileTensors, TensorPlace, chunks_of, find_place, raw_bytes

INDEX_SUFFIX = ".index.json"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000
"""The package refuses longer ones."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Type of element -> its name in the format."""
_TYPES = {name: str(dtype).removeprefix("torch.") for dtype, name in NAMES.items()}
Tensors = Sequence[tuple[str, tuple[int, ...], torch.dtype]]
"""Name, shape and type of what a file is to hold."""


def write_safetensors(stream: BinaryIO, tensors: Tensors, values: Iterator[Tensor]) -> None:
    """Write the content of one file.

    Args:
        values: of the tensors, in their order; each is taken when the one before is written.

    Raises:
        CheckpointError: a type of element that the format does not know.
        OSError: as writing a file does.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in tensors:
        if dtype not in NAMES:
            raise CheckpointError(f"{name} is {dtype}, which safetensors does not know: convert it before saving")
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(_LENGTH.pack(len(text)) + text)
    for _ in tensors:
        for chunk in chunks_of(raw_bytes(next(values))):
            stream.write(chunk)


def share_into_files(tensors: Tensors, max_bytes: int) -> list[Tensors]:
    """Return the tensors of each file, none above `max_bytes` but for one that alone is larger."""
    files: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    filled = 0
    for name, shape, dtype in tensors:
        size = torch.Size(shape).numel() * dtype.itemsize
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append((name, shape, dtype))
        filled += size
    return list(files)


def open_safetensors(path: Path) -> list[FileTensors]:
    """Return readers of a file, or of all files of an index.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if not path.name.endswith(INDEX_SUFFIX):
        return [_open(path)]
    cache = path.parent.parent.parent / "blobs"  # whither the links of Hugging Face's cache lead
    homes = [cache] if path.parent.parent.name == "snapshots" else []
    try:
        names = {*json.loads(path.read_text())["weight_map"].values()}
        paths = sorted(find_contained(path.parent, name, *homes) for name in names)
    except DAMAGED as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {explain(error)}; give another one") from None
    return [_open(found) for found in paths]


def _open(path: Path) -> FileTensors:
    try:
        with path.open("rb") as stream:
            (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
            size = stream.seek(0, os.SEEK_END)
            if length > min(_MAX_HEADER_BYTES, size):
                raise ValueError(f"a header of {length} bytes")
            stream.seek(_LENGTH.size)
            header = json.loads(stream.read(length))
        begin = _LENGTH.size + length
        places: dict[TensorKey, TensorPlace] = {}
        for name, item in header.items():
            if name != "__metadata__":
                first, end = item["data_offsets"]
                place = find_place(begin + first, item["shape"], _TYPES[item["dtype"]], begin + end)
                if first < 0 or place.bytes_count != end - first or begin + end > size:
                    raise ValueError(f"{name} is not all there")
                places[NETWORK, name] = place
        if sum(place.bytes_count for place in places.values()) > size - begin:
            raise ValueError("its tensors lie upon each other")
    except DAMAGED as error:
        raise CheckpointError(f"{path} is no complete safetensors file: {explain(error)}; give another one") from None
    return FileTensors(path, places)
