"""Where samples come from: random access to rows of named columns, in numpy, without any order of its own."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol

import numpy as np
import torch

from msrun.data.operations import ColumnChoice, MapStep
from msrun.errors import UsageError


class SampleSource(Protocol):
    """Rows 0 .. num_samples - 1 of several columns."""

    column_names: tuple[str, ...]
    num_samples: int

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Return one array per column, of shape (k, ...), that the caller may change.

        `sample_keys` is (k, 2): pass number, sample index.
        """
        ...


class ColumnParts:
    """One column that lies in several arrays, one after the other; nothing is copied until rows are taken.

    `dtype`, if given, is what taken rows are cast to.
    """

    def __init__(self, parts: Sequence[np.ndarray], dtype: np.dtype | type | None = None) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self._parts])
        self._dtype = dtype
        self._shared: dict[int, torch.Tensor | _MappedArray] = {}
        """Parts that other processes can map."""

    def __getstate__(self) -> dict[str, Any]:
        """Send a worker process where the arrays are, not what is in them: a mapped file, or memory that is shared."""
        if get_spawning_popen() is None:
            return self.__dict__
        for i, part in enumerate(self._parts):
            if i not in self._shared and (found := _find_mapped(part) or _share(part)) is not None:
                self._shared[i] = found
                if isinstance(found, torch.Tensor):
                    self._parts[i] = found.numpy()
        return {**self.__dict__, "_parts": [self._shared.get(i, part) for i, part in enumerate(self._parts)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parts = [part if isinstance(part, np.ndarray) else part.numpy() for part in state["_parts"]]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return a copy of the rows `indices` (int64, each in [0, len)), of shape (len(indices), ...)."""
        if len(self._parts) == 1:
            taken = np.array(self._parts[0][indices])
        else:
            taken = self._take_over_parts(indices)
        return taken if self._dtype is None else taken.astype(self._dtype, copy=False)

    def _take_over_parts(self, indices: np.ndarray) -> np.ndarray:
        part_numbers = np.searchsorted(self._ends, indices, side="right")
        first = self._parts[0]
        taken = np.empty((len(indices), *first.shape[1:]), first.dtype)
        for part_number in np.unique(part_numbers):
            is_here = part_numbers == part_number
            start = self._ends[part_number] - len(self._parts[part_number])
            taken[is_here] = self._parts[part_number][indices[is_here] - start]
        return taken


@dataclass(frozen=True)
class _MappedArray:
    """Where in a file an array is."""

    path: str
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    def numpy(self) -> np.ndarray:
        """Map it."""
        content = np.memmap(self.path, np.uint8, mode="r")
        return np.ndarray(self.shape, self.dtype, content, self.offset_bytes, self.strides)


def _find_mapped(part: np.ndarray) -> _MappedArray | None:
    """Return where in a file an array is that `np.memmap` has mapped read-only from its beginning, or cut out of it."""
    mapping = getattr(part, "_mmap", None)
    if not isinstance(part, np.memmap) or mapping is None or part.mode != "r":
        return None
    begin = np.frombuffer(mapping, np.uint8).ctypes.data
    file_begin = part.offset - part.offset % mmap.ALLOCATIONGRANULARITY
    offset = part.ctypes.data - begin + file_begin
    return _MappedArray(str(part.filename), offset, part.shape, part.strides, part.dtype)


def _share(part: np.ndarray) -> torch.Tensor | None:
    """Return an array as a copy in memory that other processes can map; None if torch has no such type."""
    try:
        return torch.from_numpy(np.array(part, order="K")).share_memory_()
    except TypeError:
        return None


class ArraySource:
    """Columns that are arrays in memory or mapped files."""

    def __init__(self, columns: Mapping[str, ColumnParts]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise UsageError(f"columns have lengths {lengths}; a dataset needs at least one column, all of one length")
        self._columns = dict(columns)
        self.column_names, self.num_samples = tuple(columns), next(iter(lengths.values()))

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Return the rows of each column."""
        return [column.take(sample_keys[:, 1]) for column in self._columns.values()]


def read_through(
    source: SampleSource, steps: Sequence[MapStep | ColumnChoice], sample_keys: np.ndarray
) -> list[np.ndarray]:
    """Return the columns of a source behind the maps of a dataset."""
    columns = source.read(sample_keys)
    for step in steps:
        columns = step.apply(columns, sample_keys)
    return columns


class MappedSource:
    """Rows `indices` of a source, behind the maps of a dataset."""

    def __init__(
        self,
        source: SampleSource,
        steps: Sequence[MapStep | ColumnChoice],
        column_names: Sequence[str],
        indices: np.ndarray,
    ) -> None:
        self._source = source
        self._steps = tuple(steps)
        self.column_names, self.num_samples = tuple(column_names), len(indices)
        self._indices = indices

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Read and map the rows."""
        keys = np.stack([sample_keys[:, 0], self._indices[sample_keys[:, 1]]], axis=1)
        return read_through(self._source, self._steps, keys)


class ZippedSource:
    """The columns of all sources; as many rows as the shortest has."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = tuple(sources)
        self.column_names = tuple(name for source in sources for name in source.column_names)
        self.num_samples = min(source.num_samples for source in sources)

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Read the same rows of each."""
        return [column for source in self._sources for column in source.read(sample_keys)]


class ConcatenatedSource:
    """The rows of all sources, which have the same columns, one source after the other."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = tuple(sources)
        self._ends = np.cumsum([source.num_samples for source in self._sources])
        self.column_names, self.num_samples = sources[0].column_names, int(self._ends[-1])

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Read the rows of each and put them where they were asked for."""
        numbers = np.searchsorted(self._ends, sample_keys[:, 1], side="right")
        order = np.argsort(numbers, kind="stable")
        parts = []
        for number in np.unique(numbers):
            own = sample_keys[order][numbers[order] == number].copy()
            own[:, 1] -= self._ends[number] - self._sources[number].num_samples
            parts.append(self._sources[number].read(own))
        back = np.argsort(order, kind="stable")
        return [np.concatenate(column)[back] for column in zip(*parts, strict=True)]
