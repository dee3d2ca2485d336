"""Sources made of other sources: a dataset with its maps, some of its rows, several side by side or in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msrun.runtime.data.operations import ColumnChoice, MapStep
from msrun.runtime.data.source import SampleSource


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
        self.column_names = tuple(column_names)
        self._indices = indices

    @property
    def num_samples(self) -> int:
        return len(self._indices)

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Read and map the rows."""
        keys = np.stack([sample_keys[:, 0], self._indices[sample_keys[:, 1]]], axis=1)
        columns = self._source.read(keys)
        for step in self._steps:
            columns = step.apply(columns, keys)
        return columns


class ZippedSource:
    """The columns of all sources; as many rows as the shortest has."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = tuple(sources)

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(name for source in self._sources for name in source.column_names)

    @property
    def num_samples(self) -> int:
        return min(source.num_samples for source in self._sources)

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Read the same rows of each."""
        return [column for source in self._sources for column in source.read(sample_keys)]


class ConcatenatedSource:
    """The rows of all sources, which have the same columns, one source after the other."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = tuple(sources)
        self._ends = np.cumsum([source.num_samples for source in self._sources])

    @property
    def column_names(self) -> tuple[str, ...]:
        return self._sources[0].column_names

    @property
    def num_samples(self) -> int:
        return int(self._ends[-1])

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
