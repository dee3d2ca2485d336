"""torch.save as checkpoints need it: with the system's own errors, and with values that go straight into the file."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import mmap
import os
import pickle
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from msrun.runtime.checkpoint.file_tensors import chunks_of, raw_bytes

_FLUSH_BYTES = 32 << 20


class Flusher:
    """Flushes one open file, beside its writer, whenever some megabytes have been written since the last time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._waiting = 0

    def note(self, count: int) -> None:
        """Say that so many more bytes are written.

        Raises:
            OSError: earlier ones could not reach the disk; also from `finish`.
        """
        self._waiting += count
        if self._waiting < _FLUSH_BYTES or (self._thread is not None and self._thread.is_alive()):
            return
        self._raise()
        self._waiting = 0
        self._thread = threading.Thread(target=self._flush, name="msrun-flush", daemon=True)
        with contextlib.suppress(RuntimeError):  # no new threads while the interpreter ends: all is flushed at the end
            self._thread.start()
            return
        self._thread = None

    def finish(self) -> None:
        """Return when all of the file has reached the disk."""
        self.close()
        self._raise()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Wait for what is going on; harmless to call again."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _flush(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


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


class TensorStream:
    """Writes what torch.save writes of tensors one after another, and sums it up.

    torch makes the records with room for the values (`torch.serialization.skip_data`); where it would pass the room by,
    the values go into the file straight from the tensor's memory, without torch's copy and checksum of them.
    """

    def __init__(self, file: BinaryIO | io.FileIO) -> None:
        self._file = file
        self._flusher = Flusher(file.fileno())
        self._place = 0
        self._pending: list[bytes] = []
        """of torch's small records"""
        self._values = memoryview(b"")
        self.checksum = 0

    def save(self, tensor: Tensor) -> None:
        """Write one tensor, which may be on any device, row by row.

        Raises:
            OSError: as writing a file does.
        """
        self._values = raw_bytes(tensor)
        with torch.serialization.skip_data():
            torch.save(reserve(tuple(tensor.shape), tensor.dtype), self)  # type: ignore[arg-type]  # it writes and seeks
        assert not self._values, "torch leaves room for the values of every tensor"

    def write(self, data: bytes) -> int:
        """Take what torch writes."""
        self._pending.append(bytes(data))
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Put the values where torch leaves room for them."""
        assert (offset, whence) == (len(self._values), os.SEEK_CUR), "torch passes by the room for the values"
        self.flush()
        for chunk in chunks_of(self._values):
            self._write(chunk)
        self._place += offset
        self._values = memoryview(b"")
        return self._place

    def tell(self) -> int:
        """Return where in the file the next byte goes."""
        return self._place

    def flush(self) -> None:
        """Write what torch has written."""
        pending, self._pending = b"".join(self._pending), []
        if pending:
            self._write(memoryview(pending))

    def _write(self, data: memoryview) -> None:
        self.checksum = zlib.crc32(data, self.checksum)
        done = 0
        while done < len(data):
            done += self._file.write(data[done:])
        self._flusher.note(len(data))

    def finish(self) -> None:
        """Return when all of the file has reached the disk."""
        self.flush()
        self._flusher.finish()

    def close(self) -> None:
        """Let go of the file, which stays open."""
        self._flusher.close()


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory nobody touches, so that the system never gives it any."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(dtype).view(shape)


def to_bytes(value: Any) -> bytes:
    """Return what torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def load_weights(source: Path | BinaryIO, *, mmap: bool = False) -> Any:
    """Return what torch.save wrote: tensors and plain values, whoever wrote it; nothing that it names is run.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or holds something else.
    """
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                if any(record.compress_type != zipfile.ZIP_STORED for record in archive.filelist):
                    raise ValueError("it is compressed, which may hide a size that no memory has")
        if not isinstance(source, Path):
            source.seek(0)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
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


_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a record in a zip file: the lengths of its name and of its extra field are the last of 30 bytes."""


def data_offset(stream: io.RawIOBase | BinaryIO, record: zipfile.ZipInfo) -> int:
    """Return where in a zip file the bytes of a record begin."""
    stream.seek(record.header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    return int(record.header_offset + _LOCAL_HEADER.size + name_length + extra_length)


def find_values(stream: BinaryIO, begin: int, length: int) -> tuple[int, int]:
    """Return offset and size of the values of a tensor that torch.save wrote into a part of a file.

    Raises:
        ValueError, zipfile.BadZipFile: there is no such thing.
    """
    view = FileView(stream, begin, length)
    with zipfile.ZipFile(view) as archive:
        record = next((record for record in archive.filelist if record.filename.endswith("/data/0")), None)
        if record is None or record.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it holds no tensor")
        return begin + data_offset(view, record), record.file_size


class FileView(io.RawIOBase):
    """Some bytes of a file as a file of their own."""

    def __init__(self, stream: BinaryIO, begin: int, length: int) -> None:
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

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._begin + self._place)
        data = self._stream.read(min(len(buffer), max(0, self._length - self._place)))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
