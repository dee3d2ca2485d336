"""Where samples come from: random access to rows of named columns, in numpy, without any order of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from msrun.errors import UsageError


class SampleSource(Protocol):
    """Rows 0 .. num_samples - 1 of several columns."""

    @property
    def column_names(self) -> tuple[str, ...]: ...

    @property
    def num_samples(self) -> int: ...

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return one array per column, of shape (len(indices), ...), that the caller may change."""
        ...


class ColumnParts:
    """One column that lies in several arrays, one after the other; nothing is copied until rows are taken.

    `dtype`, if given, is what taken rows are cast to.
    """

    def __init__(self, parts: Sequence[np.ndarray], dtype: np.dtype | type | None = None) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self._parts])
        self._dtype = dtype

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


class ArraySource:
    """Columns that are arrays in memory or mapped files.

    Raises:
        UsageError: there is no column, or the columns differ in length.
    """

    def __init__(self, columns: Mapping[str, ColumnParts]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise UsageError(f"columns have lengths {lengths}; a dataset needs at least one column, all of one length")
        self._columns = dict(columns)
        self._num_samples = next(iter(lengths.values()))

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        return [column.take(indices) for column in self._columns.values()]
