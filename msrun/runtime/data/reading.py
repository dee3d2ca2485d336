"""One step of an epoch: from the keys of its samples to columns. Runs in this process or in a data worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from msrun.errors import DataError, MsrunError, ParallelError
from msrun.runtime.data.operations import ColumnChoice, MapStep
from msrun.runtime.data.source import SampleSource

Column = torch.Tensor | np.ndarray
"""An array stays one where torch has no such type."""


@dataclass(frozen=True)
class Failure:
    """An error of msrun's in a worker, on its way to the process that trains."""

    kind: type[MsrunError]
    message: str
    where: str

    def error(self) -> MsrunError:
        """Return it again."""
        if issubclass(self.kind, ParallelError):
            return self.kind(self.message, where=self.where)
        return self.kind(self.message)


class StepReader(torch.utils.data.Dataset[Any]):
    """Reads what belongs to sample keys (k, 2): pass number, sample index.

    A dataset for torch's DataLoader, whose sampler gives the keys.
    """

    def __init__(self, source: SampleSource, steps: Sequence[MapStep | ColumnChoice], *, is_batched: bool) -> None:
        self._source = source
        self._steps = tuple(steps)
        self._is_batched = is_batched

    def __getitem__(self, sample_keys: np.ndarray) -> tuple[Column, ...] | Failure:
        if torch.utils.data.get_worker_info() is None:
            return self.read(sample_keys)
        try:
            columns = self.read(sample_keys)
            _share(columns)
            return columns
        except ParallelError as error:
            return Failure(type(error), error.message, error.where)
        except MsrunError as error:
            return Failure(type(error), str(error), "")

    def read(self, sample_keys: np.ndarray) -> tuple[Column, ...]:
        """Return the columns of the step."""
        columns = self._source.read(sample_keys)
        for step in self._steps:
            columns = step.apply(columns, sample_keys)
        if not self._is_batched:
            columns = [column[0] for column in columns]
        return tuple(_to_tensor(column) for column in columns)


def _share(columns: tuple[Column, ...]) -> None:
    """Move tensors to shared memory, as torch would later, in a thread whose errors nobody hears of."""
    try:
        for column in columns:
            if isinstance(column, torch.Tensor):
                column.share_memory_()
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise DataError(
            f"a data worker finds no shared memory for a step ({text}); give the container more (--shm-size), or use "
            "fewer num_parallel_workers, smaller batches or config.set_prefetch_size(1)"
        ) from error


def _to_tensor(column: np.ndarray) -> Column:
    native = np.require(column, column.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(native)
    except TypeError:
        return native
