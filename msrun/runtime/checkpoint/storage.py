"""How checkpoints reach the disk, over torch.distributed.checkpoint: its plans, its writers, its agreement on errors.

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
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from msrun.errors import CheckpointError
from msrun.runtime.agreement import Group, describe, gather
from msrun.runtime.checkpoint.directory import (
    DAMAGED,
    MANIFEST,
    STATE,
    TENSORS,
    Manifest,
    complete_directory,
    manifest_text,
    read_record,
)
from msrun.runtime.checkpoint.index import (
    METADATA,
    NETWORK,
    Index,
    Part,
    StoredTensor,
    TensorKey,
    covers,
    data_offset,
    flat_name,
    raw_bytes,
    write_index,
)
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.sharding.layout import Box
from msrun.runtime.world import get_rank

_CHUNK_BYTES = 1 << 20
"""One write of 4 MB and more costs Linux ten times the time for its bytes: it looks for pages that lie together."""
_FLUSH_BYTES = 32 << 20
Parts = Mapping[TensorKey, Chunk]
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def save_parts(parts: Parts, writer: StorageWriter, planner: PartPlanner, group: Group, *, alone: bool) -> None:
    """Have torch plan and write. All ranks of the group call it together.

    Raises:
        CheckpointError: what this rank met, else what the first other rank met; the same on every rank.
    """
    state = {flat_name(key): part for key, part in parts.items()}
    try:
        save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as error:
        own = 0 if alone else dist.get_rank(group)
        rank, (failure, _) = min(error.failures.items(), key=lambda found: (found[0] != own, found[0]))
        if not isinstance(failure, OSError | CheckpointError):
            raise failure from None
        raise CheckpointError(describe(failure) if rank == own else f"rank {rank}: {describe(failure)}") from None


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


def share_out(parts: Parts, ranks: Sequence[int], *, to_first: bool) -> Parts:
    """Return those parts that this rank is to write of what several ranks hold. All ranks call it together.

    Args:
        ranks: that write together with this one.
        to_first: the lowest rank writes what it has; else the one with the fewest bytes so far.
    """
    plans = gather(plan_of(parts))
    mine = keep_shares([plans[rank] for rank in ranks], to_first=to_first)[ranks.index(get_rank())]
    return {key: part for key, part in parts.items() if key in mine}


def keep_shares(plans: list[SavePlan], *, to_first: bool) -> list[set[TensorKey]]:
    """Return what each rank writes of what several ranks plan to."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=to_first)
    return [{plan.planner_data[item.index.fqn] for item in plan.items} for plan in planner._dedup_save_plans(plans)]


class PartPlanner(DefaultSavePlanner):
    """Plans the writing of parts, of which no two ranks have the same.

    Args:
        needs_all: the parts of all ranks must make every tensor whole.
    """

    def __init__(self, parts: Parts, *, needs_all: bool = False) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan, self._needs_all = plan_of(parts), needs_all

    def create_local_plan(self) -> SavePlan:
        """Return what this rank has."""
        return self._plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return torch's index. A directory may hold some parts alone, of the ranks that see it: torch refuses those.

        Raises:
            CheckpointError: no rank holds some part of a tensor that is to be written whole.
        """
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items() if self._needs_all else ():
            assert isinstance(tensor, TensorStorageMetadata)
            if not covers([box_of(tensor.size, chunk) for chunk in tensor.chunks], tensor.size):
                raise CheckpointError(
                    f"{name}: the ranks hold parts that do not make the whole: save it with integrated_save=False"
                )
        metadata.planner_data = {name: key for plan in plans for name, key in plan.planner_data.items()}
        return plans, metadata

    def read(self, write_item: WriteItem) -> Tensor:
        """Return the values of a part, row by row, on the host."""
        value: Tensor = self.state_dict[write_item.index.fqn].tensor
        return value.detach().cpu().contiguous()


def box_of(shape: Sequence[int], chunk: ChunkStorageMetadata) -> Box:
    """Return where torch says that a part is."""
    return Box(tuple(shape), tuple(chunk.offsets), tuple(chunk.sizes))


class _DurableFile:
    """A file whose content is on its way to the disk while more is written.

    Raises:
        OSError: as writing a file does; also from the methods.
    """

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
        """Write one tensor, row by row."""
        self._values = raw_bytes(tensor)
        with torch.serialization.skip_data():
            torch.save(_reserve(tuple(tensor.shape), tensor.dtype), cast("BinaryIO", self))
        assert not self._values, "torch leaves room for the values of every tensor"
        self.flush()

    def write(self, data: bytes) -> int:
        """Take what torch writes."""
        self._pending.append(bytes(data))
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Put the values where torch leaves room for them."""
        assert (offset, whence) == (len(self._values), os.SEEK_CUR), "torch passes by the room for the values"
        self.flush()
        self._file.write(self._values)
        self._place, self._values = self._place + offset, memoryview(b"")
        return self._place

    def tell(self) -> int:
        """Return where in the file the next byte goes."""
        return self._place

    def flush(self) -> None:
        """Write what torch has written; the system's errors come from here, not out of torch's words for them."""
        pending, self._pending = b"".join(self._pending), []
        self._file.write(memoryview(pending))


class DirectoryWriter(FileSystemWriter):
    """Writes a directory, each rank its file; the first rank writes both indexes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.checksums: dict[str, int] = {}
        """CRC-32 of the files that this rank has written, by their names."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, through to the disk."""
        name, written = f"{plan.storage_data.prefix}0.distcp", []
        file = _DurableFile(Path(self.path) / name, "wb")
        try:
            stream = _TensorStream(file)
            for item in plan.items:
                begin = stream.tell()
                with system_errors():
                    stream.save(cast("PartPlanner", planner).read(item))
                length = stream.tell() - begin
                written.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
            file.finish()
        finally:
            file.close()
        self.checksums[name] = file.checksum
        return _done(written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write where the parts lie, for torch and for msrun."""
        super().finish(metadata, results)
        self.checksums[METADATA] = zlib.crc32((Path(self.path) / METADATA).read_bytes())
        places = {(found.index.fqn, found.index.offset): found.storage_data for rank in results for found in rank}
        index: Index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            stored = StoredTensor(tuple(tensor.size), tensor.properties.dtype, {})
            for chunk in tensor.chunks:
                place, box = places[name, chunk.offsets], box_of(tensor.size, chunk)
                stored.parts[box] = Part(box, Path(place.relative_path), place.offset, place.length)
            index[metadata.planner_data[name]] = stored
        self.checksums[TENSORS] = zlib.crc32(write_index(Path(self.path), index))


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise the system's error where torch covers it up: a full disk is "unexpected pos" in its words.

    Raises:
        OSError: what the system said.
    """
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


def finish_directory(temporary: Path, state: bytes, manifest: Manifest, checksums: Mapping[str, int]) -> None:
    """Write what a directory has beside its tensors, and have all of it reach the disk.

    Raises:
        OSError: as writing a file does.
    """
    with (temporary / STATE).open("wb") as stream:
        stream.write(state)
        stream.flush()
        os.fsync(stream.fileno())
    complete_directory(temporary, replace(manifest, checksums={**checksums, STATE: zlib.crc32(state)}))


_Piece = tuple[int, TensorWriteData, WriteItem]
"""The rank that has a part, and what torch is told of it."""


class WholeFilesWriter(StorageWriter):
    """Writes files with whole tensors: their writers get the parts of one tensor at a time.

    Args:
        path: of the file that this rank writes.
        writers: the ranks that write one, each on a host of its own.
        order: of the network's tensors.
        tied: name -> the name of the network's tensor that is the same one.
        group: of the ranks' messages.
    """

    def __init__(
        self, path: Path, writers: Sequence[int], order: Sequence[str], tied: Mapping[str, str], group: Group
    ) -> None:
        super().__init__()
        self._path, self._writers, self._tied, self._group = path, writers, tied, group
        self._position = {flat_name((NETWORK, name)): number for number, name in enumerate(order)}
        self.file: PlainFileWriter | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell every rank who has which parts of every tensor, in the order in which they are sent."""
        pieces: dict[str, list[_Piece]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                assert item.tensor_data is not None
                pieces.setdefault(item.index.fqn, []).append((rank, item.tensor_data, item))
        keys = {name: key for plan in plans for name, key in plan.planner_data.items()}
        names = sorted(pieces, key=lambda name: self._position.get(name, len(self._position)))
        return [replace(plan, storage_data=[(keys[name], pieces[name]) for name in names]) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Send every tensor to the ranks that write a file, one after another."""
        rank, failure = get_rank(), None
        tensors: list[tuple[TensorKey, list[_Piece]]] = plan.storage_data
        if rank in self._writers:
            room = [(key, tuple(data.size), data.properties.dtype) for key, ((_, data, _), *_) in tensors]
            try:
                self.file = PlainFileWriter(self._path, room, self._tied)
            except OSError as error:
                failure = error
        for key, pieces in tensors:
            value = self._bring_together(pieces, planner)
            if self.file is None or value is None or failure is not None:
                continue
            try:
                self.file.write(key, value)
            except OSError as error:  # the others send on: they learn of it at the end
                failure = error
        if failure is not None:
            raise failure
        return _done([])

    def _bring_together(self, pieces: list[_Piece], planner: SavePlanner) -> Tensor | None:
        """Return a whole tensor on the ranks that write it."""
        rank, whole = get_rank(), None
        if rank in self._writers and [owner for owner, _, _ in pieces] != [rank]:
            whole = torch.empty(pieces[0][1].size, dtype=pieces[0][1].properties.dtype)
        for owner, data, item in pieces:
            part = cast("PartPlanner", planner).read(item) if owner == rank else None
            if part is not None:
                for writer in self._writers:
                    if writer != rank:
                        dist.send(part.view(-1).view(torch.uint8), writer, self._group)
                if whole is None and rank in self._writers:
                    return part
            if whole is not None:
                there = whole[box_of(whole.shape, data.chunk).slices]
                if part is None:
                    part = there if there.is_contiguous() else torch.empty_like(there)
                    dist.recv(part.view(-1).view(torch.uint8), owner, self._group)
                if part is not there:
                    there.copy_(part)
        return whole

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: every writer ends its own file."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)


def _done(written: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(written)
    return future


_ROOT = "archive"
_ALIGNMENT = 64
_HEADER_BYTES = 30


class PlainFileWriter:
    """Writes one file; the tensors come in the order in which they were announced.

    Args:
        path: of the file, which is made.
        tensors: key, shape and type of all tensors, those of the network first.
        tied: name -> the name of the network's tensor that is the same one.

    Raises:
        OSError: as writing a file does; also from the other methods.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[tuple[TensorKey, tuple[int, ...], torch.dtype]],
        tied: Mapping[str, str],
    ) -> None:
        room: OrderedDict[str, Tensor] = OrderedDict()
        for (kind, *names), shape, dtype in tensors:
            if kind == NETWORK:
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

    def write(self, key: TensorKey, value: Tensor) -> None:
        """Write the next tensor, which may be on any device."""
        data = raw_bytes(value)
        if key[0] == NETWORK:
            record = next(self._network_records)
            offset = data_offset(self._stream, record)
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

    def finish(self, state: bytes, manifest: Manifest) -> None:
        """Write the rest and have all of it reach the disk."""
        for name, same in self._tied.items():
            place = self._places[flat_name((NETWORK, same))]
            self._places[flat_name((NETWORK, name))] = {**place, "key": (NETWORK, name)}
        self._append(STATE, memoryview(state))
        self._append(TENSORS, memoryview(json.dumps(self._places).encode()))
        self._append(MANIFEST, memoryview(manifest_text(manifest).encode()))
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
    """Return record -> the tensor whose values it holds, for messages; empty when the file does not say.

    Raises:
        OSError: it cannot be read.
    """
    try:
        names = {place["offset"]: name for name, place in json.loads(read_record(path, TENSORS)).items()}
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            offsets = {data_offset(stream, record): record.filename for record in archive.infolist()}
    except DAMAGED:
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
