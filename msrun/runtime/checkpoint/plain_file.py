"""Whole tensors in one file, which torch.load reads as the network's state dict: `integrated_save=True`.

It is the zip file that torch.save writes. torch makes it first, with room for the values of the network's tensors; they
follow one at a time, so no more than one is ever in memory. More records stand behind torch's own, which torch.load
does not look at: the state of the optimizer (`optimizer/N`), what is no tensor of a layout (`state.pt`), where the
tensors lie (`tensors.json`) and where training was (`checkpoint.json`). Every record has its CRC-32 in the zip's own
directory, which stands at the end: a file that was cut off has none.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrun.runtime.checkpoint.catalogue import NETWORK, TensorKey, flat_name, read_key
from msrun.runtime.checkpoint.directory import DAMAGED, MANIFEST, TENSORS, Manifest, damaged, manifest_text, read_record
from msrun.runtime.checkpoint.file_tensors import FileTensors, chunks_of, find_place, raw_bytes
from msrun.runtime.checkpoint.torch_saving import Flusher, data_offset, reserve, system_errors

STATE = "state.pt"
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
                room[names[0]] = reserve(shape, dtype)
        for name, same in tied.items():
            room[name] = room[same]
        self._stream = path.open("w+b")
        self._flusher = Flusher(self._stream.fileno())
        try:
            with system_errors(), torch.serialization.skip_data():
                torch.save(room, self._stream)
            self._zip = zipfile.ZipFile(self._stream, "a")
        except BaseException:
            self._stream.close()
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
            record.CRC = 0
            self._stream.seek(offset)
            for chunk in chunks_of(data):
                record.CRC = zlib.crc32(chunk, record.CRC)
                self._stream.write(chunk)
                self._flusher.note(len(chunk))
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
        self._stream.flush()
        self._flusher.finish()
        self._flusher.close()
        self._stream.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._flusher.close()
        self._zip.fp = None  # its directory is not wanted any more
        self._stream.close()

    def _append(self, name: str, data: memoryview) -> int:
        record = zipfile.ZipInfo(f"{_ROOT}/{name}")
        begin = self._zip.start_dir + _HEADER_BYTES + len(record.filename) + 20 + 4  # zip64's field, our padding
        padding = -begin % _ALIGNMENT
        record.extra = struct.pack(f"<2sH{padding}x", b"FB", padding)
        with self._zip.open(record, "w", force_zip64=True) as stream:
            offset = self._stream.tell()
            for chunk in chunks_of(data):
                stream.write(chunk)
                self._flusher.note(len(chunk))
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


def open_plain_file(path: Path) -> FileTensors:
    """Return a reader of one file.

    Raises:
        CheckpointError: the file is missing, damaged or not of ours.
    """
    try:
        end = path.stat().st_size
        found = {
            read_key(place["key"]): find_place(place["offset"], place["shape"], place["dtype"], end)
            for place in json.loads(read_record(path, TENSORS)).values()
        }
    except DAMAGED as error:
        raise damaged(path, error) from None
    return FileTensors(path, found)
