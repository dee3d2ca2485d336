"""Datasets made of the user's own arrays or objects, with the same pipeline and the same sharding law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrun.errors import DataError, MsrunError, UsageError
from msrun.runtime.data.dataset import Dataset
from msrun.runtime.data.draws import SampleDraws
from msrun.runtime.data.pipeline import parse_seed
from msrun.runtime.data.seeding import own_random_numbers
from msrun.runtime.data.source import ArraySource, ColumnParts
from msrun.runtime.uncaught import find_user_line


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
    """Samples of an object with `__len__` and `__getitem__`: values, tuples of values, or dictionaries of them.

    A map-style torch Dataset is one. Items are fetched by index, so that every rank can fetch its part alone; a bare
    generator cannot be split and is refused. The items of a column must all have one shape. What an item draws from
    `random`, `numpy.random` and `torch` belongs to it, whatever the number of ranks and workers.
    `column_names` choose from dictionaries. None: the keys of item 0, or `column_0`, `column_1`, ... for as many values
    as it has. The keyword parameters are those of `Dataset`.

    Raises:
        UsageError: no random access, or items that do not fit `column_names`.
        DataError: when read: fetching an item raises; names the item and the user's line.
    """

    def __init__(self, source: Any, column_names: str | Sequence[str] | None = None, **parameters: Any) -> None:
        if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            raise UsageError(
                f"GeneratorDataset: {type(source).__name__} has no __getitem__ and __len__; give an object with random "
                "access, such as a list of the samples, or read it with torch's DataLoader"
            )
        if column_names is None:
            column_names = _names_in(source[0]) if len(source) else _numbered(1)
        seed = parse_seed(parameters.pop("seed", None))
        super().__init__(ItemSource(source, _as_names(column_names), seed), seed=seed, **parameters)


class ItemSource:
    """Columns that are fetched one sample at a time by `items[index]`."""

    def __init__(self, items: Any, column_names: tuple[str, ...], seed: int) -> None:
        self._items = items
        self._column_names = column_names
        self._seed = seed

    @property
    def column_names(self) -> tuple[str, ...]:
        return self._column_names

    @property
    def num_samples(self) -> int:
        return len(self._items)

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Fetch the items and stack each of their columns."""
        draws = SampleDraws(self._seed, _OPERATION_NUMBER, sample_keys)
        rows = []
        with own_random_numbers(draws) as seed_from:
            for number, index in enumerate(sample_keys[:, 1].tolist()):
                seed_from(number)
                rows.append(self._row(index))
        columns = list(zip(*rows, strict=True))
        try:
            return [np.stack(column) for column in columns]
        except ValueError as error:
            raise UsageError(
                f"GeneratorDataset: samples of different shapes cannot form a batch ({error}); give items of one shape"
            ) from error

    def _row(self, index: int) -> tuple[np.ndarray, ...]:
        try:
            row = _as_row(self._items[index], self._column_names)
        except MsrunError:
            raise
        except Exception as error:  # the user's object may raise anything
            text = " ".join(str(error).split())
            raise DataError(
                f"GeneratorDataset: item {index} of {type(self._items).__name__} failed: {type(error).__name__}"
                f"{f': {text}' if text else ''}",
                where=find_user_line(error),
            ) from error
        if len(row) != len(self._column_names):
            raise UsageError(
                f"GeneratorDataset: item {index} has {len(row)} values for {len(self._column_names)} columns "
                f"({', '.join(self._column_names)}); give one value per column"
            )
        return tuple(np.asarray(value) for value in row)


_OPERATION_NUMBER = 0xFFFFFFFF
"""Keeps the draws of items apart from those of what `map` applies."""


def _names_in(item: Any) -> list[str]:
    if isinstance(item, Mapping):
        return list(item)
    return _numbered(len(item) if isinstance(item, tuple | list) else 1)


def _as_row(item: Any, column_names: Sequence[str]) -> tuple[Any, ...]:
    if isinstance(item, Mapping):
        return tuple(item[name] for name in column_names)
    return tuple(item) if isinstance(item, tuple | list) else (item,)


def _numbered(count: int) -> list[str]:
    return [f"column_{i}" for i in range(count)]


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
    names = _as_names(_numbered(len(arrays)) if column_names is None else column_names)
    if len(names) != len(arrays):
        raise UsageError(f"column_names={column_names!r} for {len(arrays)} arrays; give one name per array")
    return {name: ColumnParts([_rows(array)]) for name, array in zip(names, arrays, strict=True)}


def _rows(array: Any) -> np.ndarray:
    rows = np.asarray(array)
    if rows.ndim == 0:
        raise UsageError(f"NumpySlicesDataset: {array!r} is no array of samples; the first axis must be the samples")
    return rows
