"""Where the tensors of a checkpoint are: what an index says, refused where it cannot be, and how values are read.

The indexes are `tensors.json` of a directory and of a file, the header of a safetensors file, and `.metadata` of
torch.distributed.checkpoint. That one is a pickle, and torch's readers run what it names: here it is read as records
(`inert_pickle`), and only where a directory has no index of ours.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import pickle
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.directory import (
    DAMAGED,
    TENSORS,
    explain,
    find_contained,
    read_contained,
    read_record,
    write_through,
)
from msrun.runtime.inert_pickle import Named, load_inert
from msrun.runtime.sharding.layout import Box, whole
from msrun.runtime.world import world

if TYPE_CHECKING:
    from msrun.runtime.parallel.parameters.network_state import NetworkState

NETWORK = "model"
OPTIMIZER = "optimizer"
TensorKey = tuple[str, ...]
"""(NETWORK, name) or (OPTIMIZER, parameter name, key): the path that torch's tools give a tensor in a nested dict.
What belongs to one rank alone has `rank_N` before it."""
METADATA = ".metadata"
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""Name in an index -> type of element."""
_MOST_DIMS = 64
"""torch copies no tensor of more."""
_MOST_CORNERS = 1 << 16
"""Of a box; a tensor is cut along a few dimensions."""


def flat_name(key: TensorKey) -> str:
    """Return a tensor's name in the files."""
    return ".".join(key)


def own_key(key: TensorKey, global_rank: int) -> TensorKey:
    """Return the key of a tensor that belongs to one rank alone: a parameter cut by hand, and its optimizer state."""
    return (f"rank_{global_rank}", *key)


def key_of(state: NetworkState, name: str, *more: str) -> TensorKey:
    """Return where a checkpoint has a tensor of a network, or with `more` the optimizer's state of it."""
    key = (OPTIMIZER if more else NETWORK, name, *more)
    return own_key(key, world().global_rank) if name in state.own else key


@dataclass(frozen=True)
class Part:
    """Values of a box in a tensor: in memory, bare in a file, or as torch.save wrote them into one."""

    box: Box
    path: Path
    offset: int = 0
    length: int = 0
    is_bare: bool = False
    is_plain: bool = field(default=False, compare=False)
    """What torch.save wrote holds the values row by row, and nothing else."""
    tensor: Tensor | None = None

    def read(self, dtype: torch.dtype, inside: tuple[slice, ...], target: Tensor) -> None:
        """Copy some of its values into a tensor; another type of element is converted."""
        if self.tensor is not None:
            target.copy_(self.tensor.detach()[inside])
            return
        with self.path.open("rb") as stream:
            begin, view = self.offset, _FileView(stream, self.offset, self.length)
            if self.is_plain:
                begin += find_values(view, math.prod(self.box.sizes) * dtype.itemsize)
            elif not self.is_bare:
                value = load_weights(io.BufferedReader(view))
                if not isinstance(value, Tensor) or tuple(value.shape) != self.box.sizes:
                    raise ValueError("a part has another shape than its index says")
                target.copy_(value.detach()[inside])
                return
            self._read_rows(stream, begin, dtype, inside, target)

    def _read_rows(
        self, stream: io.BufferedReader, begin: int, dtype: torch.dtype, inside: tuple[slice, ...], target: Tensor
    ) -> None:
        """Read the rows of which something is wanted, which lie together."""
        rows, row_shape = (inside[0], self.box.sizes[1:]) if inside else (slice(0, 1), ())
        row_bytes = math.prod(row_shape) * dtype.itemsize
        is_direct = target.shape[1:] == row_shape and target.dtype == dtype and target.is_contiguous()
        is_direct = is_direct and target.device.type == "cpu"
        values = target if is_direct else torch.empty((rows.stop - rows.start, *row_shape), dtype=dtype)
        stream.seek(begin + rows.start * row_bytes)
        if stream.readinto(raw_bytes(values)) != (rows.stop - rows.start) * row_bytes:
            raise EOFError("it ends too early")
        if not is_direct:
            target.copy_(values[(slice(None), *inside[1:])] if inside else values[0])


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, as far as it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[Box, Part]


Index = dict[TensorKey, StoredTensor]


def index_of(path: Path, tensors: Mapping[TensorKey, Tensor], boxes: Mapping[TensorKey, Box] | None = None) -> Index:
    """Return the index of tensors in memory.

    Args:
        path: where they come from, for messages.
        tensors: whole ones, but for those of `boxes`.
        boxes: which parts they are.
    """
    found: Index = {}
    for key, value in tensors.items():
        box = (boxes or {}).get(key) or whole(value.shape)
        found[key] = StoredTensor(box.shape, value.dtype, {box: Part(box, path, tensor=value)})
    return found


def covers(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Return whether parts make the whole: each element is in one of them.

    Each corner of each box counts, with signs that take turns; where boxes meet, their corners cancel out, and what is
    left are the corners of what they make.
    """
    found = [box for box in boxes if math.prod(box.sizes)]
    cut = [dim for dim, edge in enumerate(shape) if any(box.sizes[dim] != edge for box in found)]
    if 1 << len(cut) > _MOST_CORNERS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [*((box, 1) for box in found), (whole(shape), -1)]:
        edges = ((box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in cut)
        for corner in itertools.product(*(((begin, 1), (end, -1)) for begin, end in edges)):
            corners[tuple(place for place, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not math.prod(shape) or not any(corners.values())


# -- indexes --------------------------------------------------------------------------------------------------------


class _Builder:
    """Collects what an index says, whoever wrote it, and refuses what cannot be.

    Each byte of a file is there for one part, and each value of a tensor in one part: nothing that is read takes more
    memory than the files have bytes.

    Args:
        find: path of a file by its name in the index.
        is_bare: the values lie there bare.
    """

    def __init__(self, find: Callable[[Any], Path], *, is_bare: bool) -> None:
        self.index: Index = {}
        self._find, self._is_bare, self.is_plain = find, is_bare, False
        self._files: dict[str, tuple[Path, int, set[tuple[int, int]]]] = {}
        self._taken: Counter[str] = Counter()

    def add(self, key: Any, shape: Any, dtype: Any, parts: Iterable[tuple[Any, Any, Any, Any, Any]]) -> None:
        """Add a tensor.

        Args:
            dtype: name of the type.
            parts: offsets, sizes, file, and offset and length in it, of each; no length for bare values.
        """
        if not isinstance(key, list | tuple) or len(key) < 2 or not all(isinstance(part, str) for part in key):
            raise ValueError("a tensor's key must be a list of two names or more")
        key, name = tuple(key), flat_name(tuple(key))[:200]
        shape, _ = _measure(shape, dtype)
        found: dict[Box, Part] = {}
        for offsets, sizes, file, offset, length in parts:
            sizes, size = _measure(sizes, dtype)
            box = Box(shape, _numbers(offsets), sizes)
            edges = zip(box.shape, box.offsets, box.sizes, strict=True)
            if any(begin + count > edge for edge, begin, count in edges):
                raise ValueError(f"a part of {name} is outside of it")
            length = size if length is None else length
            if length != size if self._is_bare else length < size:
                raise ValueError(f"a part of {name} takes {size} bytes, not {length}")
            path = self._take(file, *_numbers([offset, length]))
            found[box] = Part(box, path, offset, length, self._is_bare, self.is_plain)
        if key in self.index or sum(math.prod(box.sizes) for box in found) > math.prod(shape):
            raise ValueError(f"parts of {name} are there twice")
        self.index[key] = StoredTensor(shape, DTYPES[dtype], found)

    def _take(self, file: Any, offset: int, length: int) -> Path:
        if file not in self._files:
            path = self._find(file)
            self._files[file] = path, path.stat().st_size, set()
        path, size, places = self._files[file]
        if (offset, length) not in places or not self._is_bare:  # tied tensors are one in a file
            self._taken[file] += length
        places.add((offset, length))
        if max(offset + length, self._taken[file]) > size:
            raise ValueError(f"{path.name} has {size} bytes, fewer than its parts")
        return path


def _numbers(given: Any) -> tuple[int, ...]:
    """Return what a file gives as a shape, or as the begin of a part."""
    if not isinstance(given, list | tuple) or len(given) > _MOST_DIMS:
        raise ValueError(f"a shape must be a list of at most {_MOST_DIMS} numbers")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in given):
        raise ValueError("the numbers of a shape must be whole and 0 or more")
    return tuple(given)


def _measure(shape: Any, dtype: Any) -> tuple[tuple[int, ...], int]:
    """Return shape and bytes of a tensor that a file tells of."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{str(dtype)[:80]!r} is no type of element")
    numbers, itemsize = _numbers(shape), DTYPES[dtype].itemsize
    if math.prod(edge or 1 for edge in numbers) * itemsize >= 1 << 63:
        raise ValueError(f"no memory has a tensor of shape {numbers}")
    return numbers, math.prod(numbers) * itemsize


def write_index(folder: Path, index: Index) -> bytes:
    """Write the index of a directory, through to the disk; returns what is in it."""
    tensors = []
    for key, stored in index.items():
        parts = [
            {"offsets": box.offsets, "sizes": box.sizes, "file": part.path.name}
            | {"offset": part.offset, "length": part.length}
            for box, part in stored.parts.items()
        ]
        dtype = str(stored.dtype).removeprefix("torch.")
        tensors.append({"key": key, "dtype": dtype, "shape": stored.shape, "parts": parts})
    content = json.dumps(tensors).encode()
    write_through(folder / TENSORS, content)
    return content


def read_directory(folder: Path, name: str = "") -> Index:
    """Return what the index of a directory says.

    Args:
        name: which one; left out: ours where there is one, else torch's.
    """
    builder = _Builder(lambda file: find_contained(folder, file), is_bare=False)
    if (name or TENSORS) == TENSORS and (name or (folder / TENSORS).exists()):
        builder.is_plain = True
        for item in json.loads(read_contained(folder, TENSORS)):
            parts = [tuple(part[n] for n in ("offsets", "sizes", "file", "offset", "length")) for part in item["parts"]]
            builder.add(item["key"], item["shape"], item["dtype"], parts)
    else:
        _read_metadata(folder, builder)
    return builder.index


def read_file(path: Path) -> Index:
    """Return what the index of a file of ours says."""
    builder = _Builder(lambda _: path, is_bare=True)
    for place in json.loads(read_record(path, TENSORS)).values():
        shape = place["shape"]
        begin = [0] * len(shape) if isinstance(shape, list) else None
        builder.add(place["key"], shape, place["dtype"], [(begin, shape, "", place["offset"], None)])
    return builder.index


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


def _read_metadata(folder: Path, builder: _Builder) -> None:
    """Add what torch's index says; values that are no tensors are left out."""
    root = load_inert(read_contained(folder, METADATA), lambda module, name: name in _NAMES.get(module, ()))
    content = _state(root, "Metadata")
    paths: dict[str, Any] = content["planner_data"] or {}
    places = {}
    for found, where in content["storage_data"].items():
        if (place := _state(found, "MetadataIndex")).get("offset") is not None:
            places[place["fqn"], _size(place["offset"])] = _state(where, "_StorageInfo")
    for name, item in content["state_dict_metadata"].items():
        key = _key(paths.get(name, (name,)))
        if key is None or _name(item) != "TensorStorageMetadata":
            continue
        tensor = _state(item, "TensorStorageMetadata")
        parts = []
        for chunk in (_state(chunk, "ChunkStorageMetadata") for chunk in tensor["chunks"]):
            place = places[name, offsets := _size(chunk["offsets"])]
            if place.get("transform_descriptors"):
                raise ValueError("its tensors are compressed: save it without an extension")
            parts.append((offsets, _size(chunk["sizes"]), place["relative_path"], place["offset"], place["length"]))
        dtype = _name(_state(tensor["properties"], "TensorProperties", tuple)[0])
        builder.add(key, _size(tensor["size"]), dtype, parts)


def _name(value: Any) -> str:
    return value.name if isinstance(value, Named) or (isinstance(value, type) and issubclass(value, Named)) else ""


def _state(value: Any, name: str, kind: type = dict) -> Any:
    if _name(value) != name or not isinstance(value.state, kind):
        raise ValueError(f"it holds something else where a {name} belongs")
    return value.state


def _size(value: Any) -> tuple[int, ...]:
    if _name(value) != "Size" or len(value.args) != 1:
        raise ValueError("it holds something else where a Size belongs")
    return _numbers(value.args[0])


def _key(path: Any) -> TensorKey | None:
    """Return the key of a tensor by its path in the dict that was saved; None for what is in a list."""
    if not isinstance(path, list | tuple) or not path or not all(isinstance(part, str) for part in path):
        return None
    first, *others = path
    if not others:
        return NETWORK, first
    return (NETWORK, ".".join(others)) if first == NETWORK else (first, *others)


# -- safetensors: eight bytes with the length of a JSON header, the header, and the values (huggingface/safetensors) --

INDEX_SUFFIX = ".index.json"
HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The package refuses longer ones."""
SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
"""Name in the format -> type of element."""


def read_safetensors(path: Path) -> list[Index]:
    """Return what the headers of a file say, or of all files of Hugging Face's index."""
    if not path.name.endswith(INDEX_SUFFIX):
        return [_read_header(path)]
    cache = path.parent.parent.parent / "blobs"  # whither the links of Hugging Face's cache lead
    homes = [cache] if path.parent.parent.name == "snapshots" else []
    try:
        names = {*json.loads(path.read_text())["weight_map"].values()}
        paths = sorted(find_contained(path.parent, name, *homes) for name in names)
    except DAMAGED as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {explain(error)}; give another one") from None
    return [_read_header(found) for found in paths]


def _read_header(path: Path) -> Index:
    builder = _Builder(lambda _: path, is_bare=True)
    try:
        with path.open("rb") as stream:
            (length,) = HEADER_LENGTH.unpack(stream.read(HEADER_LENGTH.size))
            size = stream.seek(0, os.SEEK_END)
            if length > min(_MAX_HEADER_BYTES, size):
                raise ValueError(f"a header of {length} bytes")
            stream.seek(HEADER_LENGTH.size)
            header = json.loads(stream.read(length))
        begin, total = HEADER_LENGTH.size + length, 0
        for name, item in header.items():
            if name != "__metadata__":
                (first, end), shape = item["data_offsets"], item["shape"]
                dtype, zeros = str(SAFETENSORS[item["dtype"]]).removeprefix("torch."), [0] * len(shape)
                _numbers([first, end])
                builder.add((NETWORK, name), shape, dtype, [(zeros, shape, "", begin + first, end - first)])
                total += end - first
        if total > size - begin:
            raise ValueError("its tensors lie upon each other")
    except DAMAGED as error:
        raise CheckpointError(f"{path} is no complete safetensors file: {explain(error)}; give another one") from None
    return builder.index


# -- values ---------------------------------------------------------------------------------------------------------


def raw_bytes(value: Tensor) -> memoryview:
    """Return a tensor's values as they lie in memory, row by row; shared with a contiguous tensor on the CPU."""
    plain = value.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a record in a zip file: the lengths of its name and of its extra field are the last of 30 bytes."""


def data_offset(stream: io.RawIOBase | BinaryIO, record: zipfile.ZipInfo) -> int:
    """Return where in a zip file the bytes of a record begin."""
    stream.seek(record.header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    return int(record.header_offset + _LOCAL_HEADER.size + name_length + extra_length)


def find_values(view: _FileView, bytes_count: int) -> int:
    """Return where the values of a tensor begin in what torch.save wrote of it."""
    with zipfile.ZipFile(view) as archive:
        record = next((record for record in archive.filelist if record.filename.endswith("/data/0")), None)
        if record is None or record.compress_type != zipfile.ZIP_STORED or record.file_size != bytes_count:
            raise ValueError(f"a part of {bytes_count} bytes is not where its index says")
        return data_offset(view, record)


def load_weights(source: Path | BinaryIO | io.BufferedReader, *, mmap: bool = False) -> Any:
    """Return what torch.save wrote: tensors and plain values, whoever wrote it; nothing that it names is run."""
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                if any(record.compress_type != zipfile.ZIP_STORED for record in archive.filelist):
                    raise ValueError("it is compressed, which may hide a size that no memory has")
        if not isinstance(source, Path):
            source.seek(0)
        return torch.load(cast("Path", source), map_location="cpu", weights_only=True, mmap=mmap)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {unknown[1]}, and" if unknown else "it is damaged, or"
        raise ValueError(f"{what} holds more than tensors and plain values") from None
    except Exception as error:  # noqa: BLE001  bytes of any kind make torch raise anything
        raise ValueError(
            (str(error).splitlines() or [f"it is damaged ({type(error).__name__})"])[0].partition(". ")[0]
        ) from None


def load_torch_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a torch.save file, mapped into memory."""
    try:
        content = load_weights(path, mmap=True)
    except DAMAGED as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give another file") from None
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CheckpointError(f"{path} holds no dict of tensors: give one of torch.save(net.state_dict(), file)")
    return dict(content)


class _FileView(io.RawIOBase):
    """Some bytes of a file as a file of their own."""

    def __init__(self, stream: io.BufferedReader, begin: int, length: int) -> None:
        self._stream, self._begin, self._length, self._place = stream, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if self._place < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._begin + self._place)
        count = min(len(buffer), max(0, self._length - self._place))
        done = self._stream.readinto(memoryview(buffer)[:count])
        self._place += done
        return done
