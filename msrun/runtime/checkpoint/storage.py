"""How checkpoints reach the disk: with torch.distributed.checkpoint's plans and index, through to it, and summed up.

A directory is what torch's `FileSystemWriter` writes, with a checksum of every file and an index of ours. A file with
whole tensors is the zip file that torch.save writes: torch makes it first, with room for the values of the network's
tensors; they follow one at a time, so no more than one is ever in memory. More records stand behind torch's own, which
torch.load does not look at: the state of the optimizer (`optimizer/N`), what is no tensor of a layout (`state.pt`),
where the tensors lie (`tensors.json`) and where training was (`checkpoint.json`). Every record has its CRC-32 in the
zip's own directory, which stands at the end: a file that was cut off has none.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,
)  # a test looks after the private name
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from msrun.errors import CheckpointError
from msrun.runtime.agreement import Group, gather
from msrun.runtime.checkpoint import directory
from msrun.runtime.checkpoint import index as indexes
from msrun.runtime.checkpoint.index import Index, flat_name
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.sharding.layout import Box
from msrun.runtime.world import get_rank

_CHUNK_BYTES = 1 << 20
"""One write of 4 MB and more costs Linux ten times the time for its bytes: it looks for pages that lie together."""
_FLUSH_BYTES = 32 << 20
Parts = Mapping[indexes.TensorKey, Chunk]
Pieces = dict[indexes.TensorKey, list[tuple[int, Box, torch.dtype]]]
"""Tensor -> the ranks that have a part of it, and which one."""


def plan_of(parts: Parts) -> SavePlan:
    """Return what torch is told of parts."""
    items = []
    for key, part in parts.items():
        box = part.box
        if math.prod(box.sizes) or not math.prod(box.shape):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=part.tensor.dtype), torch.Size(box.shape))
            items.append(WriteItem(MetadataIndex(flat_name(key), chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={flat_name(key): key for key in parts})


def share_out(parts: Parts, ranks: Sequence[int], *, to_first: bool) -> tuple[Parts, Pieces]:
    """Return those parts that this rank is to write of what several ranks hold, and what all of them have. All ranks
    call it together.

    Args:
        ranks: that write together with this one.
        to_first: the lowest rank writes what it has; else the one with the fewest bytes so far.
    """
    plans = gather(plan_of(parts))
    shares = keep_shares([plans[rank] for rank in ranks], to_first=to_first)
    pieces: Pieces = {}
    for rank, plan in zip(ranks, shares, strict=True):
        for item in plan.items:
            key, data = plan.planner_data[item.index.fqn], cast("TensorWriteData", item.tensor_data)
            pieces.setdefault(key, []).append((rank, _box_of(data), data.properties.dtype))
    mine = {item.index.fqn for item in shares[ranks.index(get_rank())].items}
    return {key: part for key, part in parts.items() if flat_name(key) in mine}, pieces


def keep_shares(plans: list[SavePlan], *, to_first: bool) -> list[SavePlan]:
    """Return what each rank writes of what several ranks plan to."""
    return list(DefaultSavePlanner(dedup_save_to_lowest_rank=to_first)._dedup_save_plans(plans))


def _box_of(data: Any) -> Box:
    """Return where torch says that a part is."""
    return Box(tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


class _DurableFile:
    """A file whose content is on its way to the disk while more is written."""

    def __init__(self, path: Path, mode: str) -> None:
        self.stream = cast("BinaryIO", path.open(mode, buffering=0))
        self.checksum = 0
        self._flushing: threading.Thread | None = None
        self._failure: OSError | None = None
        self._waiting = 0

    def write(self, data: memoryview) -> None:
        """Write bytes, and sum them up."""
        for begin in range(0, len(data), _CHUNK_BYTES):
            chunk = data[begin : begin + _CHUNK_BYTES]
            self.checksum = zlib.crc32(chunk, self.checksum)
            done = 0
            while done < len(chunk):
                done += self.stream.write(chunk[done:])
            self._waiting += len(chunk)
        if self._waiting >= _FLUSH_BYTES and (self._flushing is None or not self._flushing.is_alive()):
            self._raise()
            self._waiting = 0
            self._flushing = threading.Thread(target=self._flush, name="msrun-flush", daemon=True)
            try:
                self._flushing.start()
            except RuntimeError:  # no new threads while the interpreter ends: all is flushed at the end
                self._flushing = None

    def finish(self) -> None:
        """Return when all of the file has reached the disk."""
        if self._flushing is not None:
            self._flushing.join()
        self._raise()
        os.fsync(self.stream.fileno())
        self.stream.close()

    def close(self) -> None:
        """Close the file as it is; harmless to call again."""
        if self._flushing is not None:
            self._flushing.join()
        self.stream.close()

    def _flush(self) -> None:
        try:
            os.fdatasync(self.stream.fileno())
        except OSError as error:
            self._failure = error

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


class _TensorStream:
    """Writes what torch.save writes of tensors one after another.

    torch makes the records with room for the values (`torch.serialization.skip_data`); where it would pass the room by,
    the values go into the file straight from the tensor's memory, without torch's copy and checksum of them. torch's
    own writer keeps all tensors until its file is closed; here each may go as soon as it is written.
    """

    def __init__(self, file: _DurableFile) -> None:
        self._file, self._place, self._values = file, 0, memoryview(b"")
        self._pending: list[bytes] = []
        """of torch's small records"""

    def save(self, tensor: Tensor) -> None:
        self._values = indexes.raw_bytes(tensor)
        with torch.serialization.skip_data():
            torch.save(_reserve(tuple(tensor.shape), tensor.dtype), cast("BinaryIO", self))
        assert not self._values, "torch leaves room for the values of every tensor"
        self.flush()

    def write(self, data: bytes) -> int:
        self._pending.append(bytes(data))
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert (offset, whence) == (len(self._values), os.SEEK_CUR), "torch passes by the room for the values"
        self.flush()
        self._file.write(self._values)
        self._place, self._values = self._place + offset, memoryview(b"")
        return self._place

    def tell(self) -> int:
        return self._place

    def flush(self) -> None:
        pending, self._pending = b"".join(self._pending), []
        self._file.write(memoryview(pending))


@dataclass(frozen=True)
class PartsFile:
    """What one rank has written of a directory."""

    name: str
    checksum: int
    plan: SavePlan
    places: list[tuple[int, int]]
    """Offset and length of each item of the plan."""


def write_parts(
    folder: Path,
    number: int,
    parts: Parts,
    read: Callable[[indexes.TensorKey, Chunk], Tensor] = lambda _, part: part.tensor,
) -> PartsFile:
    """Write a file with parts of which no other rank has the same, through to the disk.

    Args:
        number: of the rank among those that write into the folder.
        read: gives the values of a part.
    """
    name, plan = f"__{number}_0.distcp", plan_of(parts)
    file = _DurableFile(folder / name, "wb")
    places = []
    try:
        stream = _TensorStream(file)
        for item in plan.items:
            key, begin = plan.planner_data[item.index.fqn], stream.tell()
            with system_errors():
                stream.save(read(key, parts[key]))
            places.append((begin, stream.tell() - begin))
        file.finish()
    finally:
        file.close()
    return PartsFile(name, file.checksum, plan, places)


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise the system's error where torch covers it up: a full disk is "unexpected pos" in its words."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        below: BaseException | None = error
        while below is not None and not isinstance(below, OSError):
            below = below.__cause__ or below.__context__
        if below is None:
            raise
        raise OSError(below.errno, below.strerror) from None


def finish_directory(temporary: Path, files: Sequence[PartsFile], state: bytes, manifest: directory.Manifest) -> None:
    """Write what a directory has beside its tensors: where they lie, for torch and for msrun, and the state."""
    by_name = {file.name: file for file in files}  # in a dry run all ranks have one
    plans, metadata = create_default_global_save_plan([file.plan for file in by_name.values()])
    metadata.planner_data = {name: key for plan in plans for name, key in plan.planner_data.items()}
    results, index = [], cast("Index", {})
    for plan, file in zip(plans, by_name.values(), strict=True):
        for item, (offset, length) in zip(plan.items, file.places, strict=True):
            results.append(WriteResult(item.index, length, _StorageInfo(file.name, offset, length)))
            box, dtype = _box_of(item.tensor_data), cast("TensorWriteData", item.tensor_data).properties.dtype
            stored = index.setdefault(plan.planner_data[item.index.fqn], indexes.StoredTensor(box.shape, dtype, {}))
            stored.parts[box] = indexes.Part(box, Path(file.name), offset, length)
    FileSystemWriter(temporary).finish(metadata, [results])
    checksums = {name: file.checksum for name, file in by_name.items()}
    checksums[indexes.METADATA] = zlib.crc32((temporary / indexes.METADATA).read_bytes())
    checksums[directory.TENSORS] = zlib.crc32(indexes.write_index(temporary, index))
    checksums[directory.STATE] = zlib.crc32(state)
    directory.write_through(temporary / directory.STATE, state)
    directory.complete_directory(temporary, replace(manifest, checksums=checksums))


def bring_together(
    parts: Parts, pieces: Pieces, writers: Sequence[int], group: Group
) -> Iterator[tuple[indexes.TensorKey, Tensor | None]]:
    """Yield every tensor, whole on the ranks that write it, one after another. All ranks call it together."""
    rank = get_rank()
    for key, owners in pieces.items():
        whole, (_, first, dtype), is_writer = None, owners[0], rank in writers
        if is_writer and [owner for owner, _, _ in owners] != [rank]:
            whole = torch.empty(first.shape, dtype=dtype)
        for owner, box, _ in owners:
            part = parts[key].tensor.detach().cpu().contiguous() if owner == rank else None
            if part is not None:
                for writer in writers:
                    if writer != rank:
                        dist.send(part.view(-1).view(torch.uint8), writer, group)
                if whole is None and is_writer:
                    whole = part
                    break
            if whole is not None:
                there = whole[box.slices]
                if part is None:
                    part = there if there.is_contiguous() else torch.empty_like(there)
                    dist.recv(part.view(-1).view(torch.uint8), owner, group)
                if part is not there:
                    there.copy_(part)
        yield key, whole


def check_whole(pieces: Pieces) -> None:
    """Refuse tensors of which no rank holds some part."""
    for key, owners in pieces.items():
        if not indexes.covers([box for _, box, _ in owners], owners[0][1].shape):
            raise CheckpointError(
                f"{flat_name(key)}: the ranks hold parts that do not make the whole: save it with integrated_save=False"
            )


_ROOT = "archive"
_ALIGNMENT = 64
_HEADER_BYTES = 30


class PlainFileWriter:
    """Writes one file; the tensors come in the order in which they were announced.

    Args:
        path: of the file, which is made.
        tensors: key, shape and type of all tensors, those of the network first.
        tied: name -> the name of the network's tensor that is the same one.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[tuple[indexes.TensorKey, tuple[int, ...], torch.dtype]],
        tied: Mapping[str, str],
    ) -> None:
        room: OrderedDict[str, Tensor] = OrderedDict()
        for (kind, *names), shape, dtype in tensors:
            if kind == indexes.NETWORK:
                room[names[0]] = _reserve(shape, dtype)
        for name, same in tied.items():
            room[name] = room[same]
        self._file = _DurableFile(path, "w+b")
        self._stream = self._file.stream
        try:
            with system_errors(), torch.serialization.skip_data():
                torch.save(room, self._stream)
            self._zip = zipfile.ZipFile(self._stream, "a")
        except BaseException:
            self._file.close()
            raise
        records = {info.filename: info for info in self._zip.filelist}
        self._network_records = iter([records[f"{_ROOT}/data/{number}"] for number in range(len(room) - len(tied))])
        self._count = 0
        self._places: dict[str, Any] = {}
        self._tied = tied

    def write(self, key: indexes.TensorKey, value: Tensor) -> None:
        """Write the next tensor, which may be on any device."""
        data = indexes.raw_bytes(value)
        if key[0] == indexes.NETWORK:
            record = next(self._network_records)
            offset = indexes.data_offset(self._stream, record)
            assert record.file_size == len(data), "the tensors come in the order in which torch has seen them"
            self._stream.seek(offset)
            self._file.checksum = 0
            self._file.write(data)
            record.CRC = self._file.checksum
        else:
            offset = self._append(f"{key[0]}/{self._count}", data)
            self._count += 1
        place = {"offset": offset, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        self._places[flat_name(key)] = {"key": key, **place}

    def finish(self, state: bytes, manifest: directory.Manifest) -> None:
        """Write the rest and have all of it reach the disk."""
        for name, same in self._tied.items():
            place = self._places[flat_name((indexes.NETWORK, same))]
            self._places[flat_name((indexes.NETWORK, name))] = {**place, "key": (indexes.NETWORK, name)}
        self._append(directory.STATE, memoryview(state))
        self._append(directory.TENSORS, memoryview(json.dumps(self._places).encode()))
        self._append(directory.MANIFEST, memoryview(directory.manifest_text(manifest).encode()))
        self._zip.close()
        self._file.finish()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._zip.fp = None  # its directory is not wanted any more
        self._file.close()

    def _append(self, name: str, data: memoryview) -> int:
        record = zipfile.ZipInfo(f"{_ROOT}/{name}")
        begin = self._zip.start_dir + _HEADER_BYTES + len(record.filename) + 20 + 4  # zip64's field, our padding
        padding = -begin % _ALIGNMENT
        record.extra = struct.pack(f"<2sH{padding}x", b"FB", padding)
        with self._zip.open(record, "w", force_zip64=True) as stream:
            offset = self._stream.tell()
            for chunk in chunks_of(data):
                stream.write(chunk)
        return offset


def name_records(path: Path) -> dict[str, str]:
    """Return record -> the tensor whose values it holds, for messages; empty when the file does not say."""
    try:
        names = {
            place["offset"]: name for name, place in json.loads(directory.read_record(path, directory.TENSORS)).items()
        }
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            offsets = {indexes.data_offset(stream, record): record.filename for record in archive.infolist()}
    except directory.DAMAGED:
        return {}
    return {record: names[offset] for offset, record in offsets.items() if offset in names}


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory nobody touches, so that the system never gives it any."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(dtype).view(shape)


def chunks_of(data: memoryview) -> Sequence[memoryview]:
    """Return bytes in the pieces in which files are written and summed up."""
    return [data[begin : begin + _CHUNK_BYTES] for begin in range(0, len(data), _CHUNK_BYTES)]


def to_bytes(value: Any) -> bytes:
    """Return what torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
