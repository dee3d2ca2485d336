"""Datasets made of the user's own arrays or objects, with the same pipeline and the same sharding law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrun.errors import UsageError
from msrun.runtime.data.dataset import Dataset
from msrun.runtime.data.source import ArraySource, ColumnParts


class NumpySlicesDataset(Dataset):
    """Rows of arrays in memory.

    `data` is {column name: array}, or one array, or a tuple of arrays named by `column_names` (default `column_0`,
    `column_1`, ...). Arrays are not copied until read. The keyword parameters are those of `Dataset`.

    Raises:
        UsageError: the arrays differ in length or the names do not fit.
    """

    def __init__(self, data: Any, column_names: str | Sequence[str] | None = None, **parameters: Any) -> None:
        super().__init__(ArraySource(_named_columns(data, column_names)), **parameters)


class GeneratorDataset(Dataset):
    """Samples of an object with `__len__` and `__getitem__`, whose items are values or tuples of values.

    Items are fetched by index, so that every rank can fetch its part alone; a bare generator cannot be split and is
    refused. The items of a column must all have one shape. The keyword parameters are those of `Dataset`.

    Raises:
        UsageError: no random access, or items that do not fit `column_names`.
    """

    def __init__(self, source: Any, column_names: str | Sequence[str], **parameters: Any) -> None:
        if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            raise UsageError(
                f"GeneratorDataset: {type(source).__name__} has no __getitem__ and __len__; give an object with random "
                "access, such as a list of the samples"
            )
        super().__init__(ItemSource(source, _as_names(column_names)), **parameters)


class ItemSource:
    """Columns that are fetched one sample at a time by `items[index]`."""

    def __init__(self, items: Any, column_names: tuple[str, ...]) -> None:
        self._items = items
        self._column_names = column_names

    @property
    def column_names(self) -> tuple[str, ...]:
        return self._column_names

    @property
    def num_samples(self) -> int:
        return len(self._items)

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        rows = [self._row(int(index)) for index in indices]
        columns = list(zip(*rows, strict=True))
        try:
            return [np.stack(column) for column in columns]
        except ValueError as error:
            raise UsageError(
                f"GeneratorDataset: samples of different shapes cannot form a batch ({error}); give items of one shape"
            ) from error

    def _row(self, index: int) -> tuple[np.ndarray, ...]:
        item = self._items[index]
        row = item if isinstance(item, tuple | list) else (item,)
        if len(row) != len(self._column_names):
            raise UsageError(
                f"GeneratorDataset: item {index} has {len(row)} values for {len(self._column_names)} columns "
                f"({', '.join(self._column_names)}); give one value per column"
            )
        return tuple(np.asarray(value) for value in row)


def _as_names(column_names: str | Sequence[str]) -> tuple[str, ...]:
    names = (column_names,) if isinstance(column_names, str) else tuple(column_names)
    if not names or len(set(names)) < len(names):
        raise UsageError(f"column_names={column_names!r}; give at least one name, each once")
    return names


def _named_columns(data: Any, column_names: str | Sequence[str] | None) -> dict[str, ColumnParts]:
    if isinstance(data, Mapping):
        if column_names is not None:
            raise UsageError(f"column_names={column_names!r} with a mapping; its keys are the names, leave it out")
        return {str(name): ColumnParts([_rows(array)]) for name, array in data.items()}
    arrays = data if isinstance(data, tuple) else (data,)
    names = _as_names([f"column_{i}" for i in range(len(arrays))] if column_names is None else column_names)
    if len(names) != len(arrays):
        raise UsageError(f"column_names={column_names!r} for {len(arrays)} arrays; give one name per array")
    return {name: ColumnParts([_rows(array)]) for name, array in zip(names, arrays, strict=True)}


def _rows(array: Any) -> np.ndarray:
    rows = np.asarray(array)
    if rows.ndim == 0:
        raise UsageError(f"NumpySlicesDataset: {array!r} is no array of samples; the first axis must be the samples")
    return rows
