"""What `Dataset.map` applies: transforms that work on whole numpy batches, and plain callables on single samples."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
            batch = f" on the batch of {_describe(draws.sample_indices)}"
            raise failed("map:", operation, batch, error) from error


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


def _describe(sample_indices: np.ndarray) -> str:
    shown = ", ".join(map(str, sample_indices[:4]))
    return f"samples {shown}{', ...' if len(sample_indices) > 4 else ''}"


def _as_columns(result: Any) -> list[np.ndarray]:
    return [np.asarray(value) for value in (result if isinstance(result, tuple) else (result,))]
