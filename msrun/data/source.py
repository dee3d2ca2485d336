"""Where samples come from, random access to rows in numpy without an order, and what `Dataset.map` applies."""

from __future__ import annotations

import mmap
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol

import numpy as np
import torch

from msrun.data.order import SampleDraws
from msrun.errors import DataError, MsrunError, UsageError
from msrun.runtime.uncaught import find_user_line

_STREAM = 0xFFFF
_LARGEST_NUMPY_SEED = 0xFFFFFFFF


@contextmanager
def own_random_numbers(draws: SampleDraws) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds all three generators for one of the samples; afterwards they are as they were.

    So a function draws the same for a sample whatever process it runs in, and training draws as if it had not run.
    """
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seeds = draws.bits(_STREAM).tolist()

    def seed_from(number: int) -> None:
        random.seed(seeds[number])
        np.random.seed(seeds[number] & _LARGEST_NUMPY_SEED)
        torch.default_generator.manual_seed(seeds[number])

    try:
        yield seed_from
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


class Transform(ABC):
    """A deterministic transform of one column. Calling it on a single sample works too."""

    @abstractmethod
    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        """Return the transformed batch; the first axis is the samples and keeps its length."""

    def __call__(self, sample: np.ndarray) -> np.ndarray:
        return self.apply_batch(np.asarray(sample)[None])[0]


class RandomTransform(ABC):
    """A random transform of one column: what it does to a sample depends on (seed, pass, sample) alone."""

    @abstractmethod
    def apply_random_batch(self, batch: np.ndarray, draws: SampleDraws) -> np.ndarray:
        """Return the transformed batch; all randomness comes from `draws`."""


@dataclass(frozen=True)
class MapStep:
    """One `map` call: `operations`, one after the other, on the columns at `column_positions`."""

    operations: tuple[Any, ...]
    column_positions: tuple[int, ...]
    num_outputs: int
    """Columns that come in the place of the first one; the others are left out."""
    is_on_batches: bool
    """A plain callable receives whole batches, because `map` came after `batch`."""
    seed: int
    first_number: int
    """Number of operations in the steps before this one; keeps the draws of two random transforms apart."""

    @property
    def num_operations(self) -> int:
        return len(self.operations)

    def apply(self, columns: list[np.ndarray], sample_keys: np.ndarray) -> list[np.ndarray]:
        """Return the columns with this step's ones replaced. `sample_keys` is (B, 2): pass number, sample index."""
        values = [columns[i] for i in self.column_positions]
        last = len(self.operations) - 1
        for i, operation in enumerate(self.operations):
            num_results = self.num_outputs if i == last else None
            values = self._apply_one(operation, SampleDraws(self.seed, self.first_number + i, sample_keys), values)
            _check_results(operation, values, num_results, len(sample_keys))
        return replace_columns(columns, self.column_positions, values)

    def _apply_one(self, operation: Any, draws: SampleDraws, values: list[np.ndarray]) -> list[np.ndarray]:
        is_transform = hasattr(operation, "apply_random_batch") or hasattr(operation, "apply_batch")
        if not is_transform and not self.is_on_batches:
            return _call_per_sample(operation, draws, values)
        try:
            if hasattr(operation, "apply_random_batch"):
                return [operation.apply_random_batch(values[0], draws)]
            if is_transform:
                return [operation.apply_batch(values[0])]
            with own_random_numbers(draws) as seed_from:
                seed_from(0)
                return _as_columns(operation(*values))
        except MsrunError:
            raise
        except Exception as error:  # the user's function may raise anything
            indices = draws.sample_indices
            shown = f"{', '.join(map(str, indices[:4]))}{', ...' if len(indices) > 4 else ''}"
            raise failed("map:", operation, f" on the batch of samples {shown}", error) from error


@dataclass(frozen=True)
class ColumnChoice:
    """One `project` call: the columns at `positions` and no other."""

    positions: tuple[int, ...]
    num_operations: int = 0

    def apply(self, columns: list[np.ndarray], _sample_keys: np.ndarray) -> list[np.ndarray]:
        """Return these columns."""
        return [columns[i] for i in self.positions]


def replace_columns(columns: Sequence[Any], positions: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return `columns` with `values` in the places of `positions`, or, of another number, all where the first was."""
    if len(values) == len(positions):
        replaced = dict(zip(positions, values, strict=True))
        return [replaced.get(i, column) for i, column in enumerate(columns)]
    kept = [[column] if i not in positions else [] for i, column in enumerate(columns)]
    kept[min(positions)] = list(values)
    return [column for group in kept for column in group]


def check_operations(operations: Any, num_columns: int) -> tuple[Any, ...]:
    """Return `operations`, one or a list, as a tuple."""
    listed = tuple(operations) if isinstance(operations, Sequence) else (operations,)
    if not listed:
        raise UsageError("map: the list of operations is empty; pass at least one")
    for operation in listed:
        is_transform = hasattr(operation, "apply_batch") or hasattr(operation, "apply_random_batch")
        if is_transform and isinstance(operation, type):
            raise UsageError(f"map: {operation.__name__} is a class; pass an object, {operation.__name__}(...)")
        if is_transform and num_columns > 1:
            raise UsageError(
                f"map: {operation_name(operation)} works on one column, not {num_columns}; use one map per column"
            )
        if not is_transform and not callable(operation):
            raise UsageError(f"map: {operation!r} is not callable; pass a transform or a function of one sample")
    return listed


def operation_name(operation: Any) -> str:
    """Return a name for messages: the function's own or that of the class."""
    return getattr(operation, "__name__", type(operation).__name__)


def _check_results(operation: Any, results: list[np.ndarray], expected: int | None, num_samples: int) -> None:
    if expected is not None and len(results) != expected:
        raise UsageError(
            f"map: {operation_name(operation)} returned {len(results)} value{'s' if len(results) > 1 else ''}, not "
            f"{expected}; return one value for each output column, several as a tuple"
        )
    for result in results:
        if result.ndim == 0 or len(result) != num_samples:
            raise UsageError(
                f"map: {operation_name(operation)} made shape {result.shape} of a batch of {num_samples} samples; "
                "the first axis must stay the samples"
            )


def _call_per_sample(operation: Callable[..., Any], draws: SampleDraws, values: list[np.ndarray]) -> list[np.ndarray]:
    rows = []
    with own_random_numbers(draws) as seed_from:
        for number, row in enumerate(zip(*values, strict=True)):
            seed_from(number)
            try:
                rows.append(_as_columns(operation(*row)))
            except MsrunError:
                raise
            except Exception as error:  # the user's function may raise anything
                raise failed("map:", operation, f" on sample {draws.sample_indices[number]}", error) from error
    try:
        return [np.stack(column) for column in zip(*rows, strict=True)]
    except ValueError as error:
        raise UsageError(
            f"map: {operation_name(operation)} made samples of different shapes, which cannot form a batch ({error})"
        ) from error


def failed(what: str, source: Any, where: str, error: Exception) -> DataError:
    """Return the error to raise for what a user's function or object has raised."""
    text = " ".join(str(error).split())
    return DataError(
        f"{what} {operation_name(source)} failed{where}: {type(error).__name__}{f': {text}' if text else ''}",
        where=find_user_line(error),
    )


def _as_columns(result: Any) -> list[np.ndarray]:
    return [np.asarray(value) for value in (result if isinstance(result, tuple) else (result,))]


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


class Passes:
    """The samples of what can only be run through, one pass at a time, as if they could be had by index."""

    def __init__(self, source: Any, limit: int | None) -> None:
        self._source = source
        self._limit = limit
        self._number = 0
        self._rows = self._run_through()
        self._count = len(self._rows)

    def _run_through(self) -> list[Any]:
        try:
            return list(islice(self._source() if callable(self._source) else self._source, self._limit))
        except MsrunError:
            raise
        except Exception as error:  # the user's function may raise anything
            raise failed("GeneratorDataset: the samples of", self._source, "", error) from error

    def begin(self, number: int) -> None:
        """Have the samples of a pass at hand: those of another are given up."""
        if number != self._number:
            self._rows, self._number = self._run_through(), number
        if len(self._rows) != self._count:
            raise DataError(
                f"GeneratorDataset: {len(self._rows)} samples in epoch {number + 1}, {self._count} in the first; give "
                "the function that returns an iterator, not the iterator, and as many samples each time"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


class ItemSource:
    """Columns that are fetched one sample at a time by `items[index]`."""

    def __init__(self, items: Any, column_names: tuple[str, ...], seed: int) -> None:
        self._items, self._seed = items, seed
        self.column_names, self.num_samples = column_names, len(items)

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Fetch the items and stack each of their columns."""
        draws = SampleDraws(self._seed, _OPERATION_NUMBER, sample_keys)
        rows = []
        with own_random_numbers(draws) as seed_from:
            for number, (epoch, index) in enumerate(sample_keys.tolist()):
                seed_from(number)
                if isinstance(self._items, Passes):
                    self._items.begin(epoch)
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
            row = _as_row(self._items[index], self.column_names)
        except MsrunError:
            raise
        except Exception as error:  # the user's object may raise anything
            raise failed(f"GeneratorDataset: item {index} of", self._items, "", error) from error
        if len(row) != len(self.column_names):
            raise UsageError(
                f"GeneratorDataset: item {index} has {len(row)} values for {len(self.column_names)} columns "
                f"({', '.join(self.column_names)}); give one value per column"
            )
        return tuple(np.asarray(value) for value in row)


_OPERATION_NUMBER = 0xFFFFFFFF
"""Keeps the draws of items apart from those of what `map` applies."""


def _as_row(item: Any, column_names: Sequence[str]) -> tuple[Any, ...]:
    if isinstance(item, Mapping):
        return tuple(item[name] for name in column_names)
    return tuple(item) if isinstance(item, tuple | list) else (item,)
