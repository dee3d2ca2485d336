"""What `Dataset.map` applies: transforms that work on whole numpy batches, and plain callables on single samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msrun.errors import UsageError
from msrun.runtime.data.draws import SampleDraws


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
    is_on_batches: bool
    """A plain callable receives whole batches, because `map` came after `batch`."""
    seed: int
    first_number: int
    """Number of operations in the steps before this one; keeps the draws of two random transforms apart."""

    def apply(self, columns: list[np.ndarray], sample_keys: np.ndarray) -> list[np.ndarray]:
        """Return the columns with this step's ones replaced. `sample_keys` is (B, 2): pass number, sample index."""
        values = [columns[i] for i in self.column_positions]
        for number, operation in enumerate(self.operations, start=self.first_number):
            if hasattr(operation, "apply_random_batch"):
                draws = SampleDraws(self.seed, number, sample_keys)
                results = [operation.apply_random_batch(values[0], draws)]
            else:
                results = self._apply_deterministic(operation, values)
            _check_lengths(operation, results, len(sample_keys))
            values = results
        replaced = dict(zip(self.column_positions, values, strict=True))
        return [replaced.get(i, column) for i, column in enumerate(columns)]

    def _apply_deterministic(self, operation: Any, values: list[np.ndarray]) -> list[np.ndarray]:
        if hasattr(operation, "apply_batch"):
            return [operation.apply_batch(values[0])]
        if self.is_on_batches:
            return _as_columns(operation, operation(*values), len(values))
        return _call_per_sample(operation, values)


def check_operations(operations: Any, num_columns: int) -> tuple[Any, ...]:
    """Return `operations`, one or a list, as a tuple.

    Raises:
        UsageError: the list is empty, or something in it cannot be applied to `num_columns` columns.
    """
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


def _check_lengths(operation: Any, results: list[np.ndarray], num_samples: int) -> None:
    for result in results:
        if result.ndim == 0 or len(result) != num_samples:
            raise UsageError(
                f"map: {operation_name(operation)} made shape {result.shape} of a batch of {num_samples} samples; "
                "the first axis must stay the samples"
            )


def _call_per_sample(operation: Callable[..., Any], values: list[np.ndarray]) -> list[np.ndarray]:
    rows = [_as_columns(operation, operation(*row), len(values)) for row in zip(*values, strict=True)]
    try:
        return [np.stack(column) for column in zip(*rows, strict=True)]
    except ValueError as error:
        raise UsageError(
            f"map: {operation_name(operation)} made samples of different shapes, which cannot form a batch ({error})"
        ) from error


def _as_columns(operation: Callable[..., Any], result: Any, num_columns: int) -> list[np.ndarray]:
    if num_columns == 1:
        return [np.asarray(result)]
    if not isinstance(result, tuple) or len(result) != num_columns:
        raise UsageError(
            f"map: {operation_name(operation)} takes {num_columns} columns and must return a tuple of {num_columns} "
            f"values, not {type(result).__name__}"
        )
    return [np.asarray(value) for value in result]
