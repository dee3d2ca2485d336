"""Whole tensors that lie in a file as their bare values: any part of them is read from where it lies."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrun.runtime.checkpoint.catalogue import TensorKey
from msrun.runtime.checkpoint.directory import damaged
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.sharding.layout import Box, whole

_CHUNK_BYTES = 1 << 20
"""One write of 4 MB and more costs Linux ten times the time for its bytes: it looks for pages that lie together."""
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""Name in an index -> type of element."""
_MOST_DIMS = 64
"""torch copies no tensor of more."""


def read_numbers(given: Any) -> tuple[int, ...]:
    """Return what a file gives as a shape, or as the begin of a part.

    Raises:
        ValueError: it is no list of numbers that a tensor can have.
    """
    if not isinstance(given, list | tuple) or len(given) > _MOST_DIMS:
        raise ValueError(f"a shape must be a list of at most {_MOST_DIMS} numbers")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in given):
        raise ValueError("the numbers of a shape must be whole and 0 or more")
    return tuple(given)


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies."""

    offset: int
    """Of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_count(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def find_place(offset: Any, shape: Any, dtype: Any, end: int) -> TensorPlace:
    """Return where a tensor lies, by what a file says of it.

    Args:
        dtype: its name.
        end: of the bytes in which it lies.

    Raises:
        ValueError: nothing can lie there.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{str(dtype)[:80]!r} is no type of element")
    place = TensorPlace(offset, read_numbers(shape), DTYPES[dtype])
    if math.prod(edge or 1 for edge in place.shape) * place.dtype.itemsize >= 1 << 63:
        raise ValueError(f"no memory has a tensor of shape {place.shape}")
    if type(offset) is not int or not 0 <= offset <= end - place.bytes_count:
        raise ValueError(f"a tensor of {place.bytes_count} bytes must lie within the file's {end}")
    return place


class FileTensors:
    """Reads tensors, and parts of them, of one file."""

    def __init__(self, path: Path, places: Mapping[TensorKey, TensorPlace]) -> None:
        self.path = path
        self._places = places
        self.keys: list[TensorKey] = list(places)

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._places[key].shape

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return self._places[key].dtype

    def boxes(self, key: TensorKey) -> list[Box]:
        """Return the parts that the file has: the whole."""
        return [whole(self.shape(key))]

    def fill(self, parts: Mapping[TensorKey, Chunk]) -> None:
        """Fill tensors with the values of their boxes; another type of element is converted.

        Raises:
            CheckpointError: the file cannot be read, or ends too early.
        """
        with reading(self.path) as descriptor:
            for key, part in parts.items():
                read_box(descriptor, self._places[key], part.box, part.tensor)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """Open a file for `read_box`.

    Raises:
        CheckpointError: it cannot be read, or ends too early.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            yield stream.fileno()
    except OSError as error:
        raise damaged(path, error) from None
    except EOFError:
        raise damaged(path, EOFError("it ends too early")) from None


def read_box(descriptor: int, place: TensorPlace, box: Box, target: Tensor) -> None:
    """Read a part of a tensor: the rows of which it has something lie together, and the part is taken out of them.

    Raises:
        OSError: as reading does.
        EOFError: the file ends too early.
    """
    shape, dtype = place.shape, place.dtype
    if not target.numel():
        return
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    first, count = (box.offsets[0], box.sizes[0]) if shape else (0, 1)
    is_direct = (
        box.sizes[1:] == shape[1:] and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
    )
    rows = target.detach() if is_direct else torch.empty((count, *shape[1:]) if shape else (), dtype=dtype)
    data, offset, done = raw_bytes(rows), place.offset + first * row_bytes, 0
    while done < len(data):
        read = os.preadv(descriptor, [data[done:]], offset + done)
        if not read:
            raise EOFError
        done += read
    if not is_direct:
        target.detach().copy_(rows[(slice(None), *box.slices[1:])] if shape else rows)


def raw_bytes(value: Tensor) -> memoryview:
    """Return a tensor's values as they lie in memory, row by row; shared with a contiguous tensor on the CPU."""
    plain = value.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def chunks_of(data: memoryview) -> Sequence[memoryview]:
    """Return bytes in the pieces in which files are written and summed up."""
    return [data[begin : begin + _CHUNK_BYTES] for begin in range(0, len(data), _CHUNK_BYTES)]
