"""The pipeline: source, order, transforms, batches, and the part of every global batch that this process reads.

The sharding law: with N shards and `batch(B)`, the batches k of shards 0 .. N-1, put one after the other, are batch k
of the unsharded dataset with `batch(B * N)`, in every epoch; there are floor(n / (B * N)) of them. So a job of any
size trains on the same global batches as one process. It holds because each process computes the whole order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from msrun.errors import UsageError, near_miss
from msrun.runtime.data.operations import MapStep, check_operations
from msrun.runtime.data.order import Batched, Items, Order, Repeated, Samples, Shuffled, Sliced, count_steps, draw_shard
from msrun.runtime.data.parameters import parse_count
from msrun.runtime.data.sharding import Shard, check_shard, find_world_shard
from msrun.runtime.data.source import SampleSource

_MAX_SEED = 2**63 - 1


class Dataset:
    """Columns of samples, read in a new deterministic order every epoch.

    Every method that changes the pipeline returns a new dataset and leaves this one as it was. Each `for` loop over
    the dataset is one epoch and counts; all ranks of a job must therefore start the same number of loops.
    A step yields a tuple of torch CPU tensors, one per column, each (B, ...) behind `batch` and one sample before.

    `num_shards` and `shard_id` choose the part to read. Left out, they follow the job: one shard per rank of the
    initialised world, everything when there is none. `num_shards=1` makes every rank read everything.
    `num_samples` keeps the first so many samples of the whole dataset, before it is shuffled and split.
    `shuffle` None is True. `seed` must be the same on all ranks.

    Raises:
        UsageError: a value is out of range.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        num_samples: int | None = None,
        shuffle: bool | None = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
        seed: int = 0,
    ) -> None:
        num_kept = source.num_samples
        if num_samples is not None:
            num_kept = min(num_kept, parse_count("num_samples", num_samples, minimum=1))
        self._source = source
        self._asked_shard = check_shard(num_shards, shard_id)
        self._seed = parse_count("seed", seed, minimum=0, maximum=_MAX_SEED)
        self._order: Order = Samples(num_kept, self._seed, is_shuffled=shuffle is not False)
        self._depth = 1
        self._batch_size = 1
        self._steps: tuple[MapStep, ...] = ()
        self._next_epoch = 0
        self._first_step = 0

    def map(self, operations: Any, input_columns: str | Sequence[str] | None = None) -> Self:
        """Apply one operation, or a list in turn, to `input_columns` (None: the first column).

        An operation is a transform of `vision` or `transforms`, any object with `apply_batch(array) -> array`, or a
        function. A function gets one sample (one whole batch if `map` comes after `batch`), as numpy arrays, one
        argument per input column, and returns as many values.

        Raises:
            UsageError: an unknown column, or something that cannot be applied.
        """
        positions = self._column_positions(input_columns)
        num_before = sum(len(step.operations) for step in self._steps)
        listed = check_operations(operations, len(positions))
        step = MapStep(listed, positions, self._order.is_batched, self._seed, num_before)
        changed = self._copy()
        changed._steps = (*self._steps, step)
        return changed

    def batch(self, batch_size: int, drop_remainder: bool = True) -> Self:
        """Join `batch_size` samples of this shard; `drop_remainder` leaves out the incomplete last global batch.

        Raises:
            UsageError: already batched, a size below 1, or a kept rest that the shards cannot share evenly.
        """
        batch_size = parse_count("batch_size", batch_size, minimum=1)
        if self._order.is_batched:
            raise UsageError("batch: the dataset is batched already; call batch once")
        changed = self._with_order(Batched(self._order, batch_size, drop_remainder))
        changed._batch_size = batch_size
        changed.get_dataset_size()  # an uneven rest is reported here, where the user can see the call
        return changed

    def shuffle(self, buffer_size: int) -> Self:
        """Shuffle once more through a buffer of `buffer_size` samples (batches if after `batch`).

        Raises:
            UsageError: `buffer_size` is below 2.
        """
        buffer_size = parse_count("buffer_size", buffer_size, minimum=2)
        return self._with_order(Shuffled(self._order, buffer_size, self._seed, self._depth))

    def repeat(self, count: int) -> Self:
        """Make one epoch `count` passes long; every pass has its own permutation and random transforms.

        Raises:
            UsageError: `count` is below 1.
        """
        count = parse_count("count", count, minimum=1)
        return self._with_order(Repeated(self._order, count))

    def take(self, count: int) -> Self:
        """Keep the first `count` samples of every epoch (global batches if after `batch`)."""
        count = parse_count("count", count, minimum=1)
        return self._with_order(Sliced(self._order, 0, count))

    def skip(self, count: int) -> Self:
        """Leave out the first `count` samples of every epoch (global batches if after `batch`)."""
        count = parse_count("count", count, minimum=0)
        return self._with_order(Sliced(self._order, count, None))

    def get_dataset_size(self) -> int:
        """Return the number of steps in an epoch, the same for every shard."""
        return count_steps(self._order, self._shard())

    def get_batch_size(self) -> int:
        """Return the samples per step of one shard; 1 before `batch`."""
        return self._batch_size

    def get_col_names(self) -> list[str]:
        """Return the column names in the order of the yielded tuples."""
        return list(self._source.column_names)

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Make the next loop epoch `epoch` (from 0), as after resuming from a checkpoint.

        `step` steps of that epoch count as done: the loop begins behind them without reading them.
        """
        epoch = parse_count("epoch", epoch, minimum=0)
        self._first_step = parse_count("step", step, minimum=0)
        self._next_epoch = epoch

    def create_tuple_iterator(self, num_epochs: int = -1, *, output_numpy: bool = False) -> EpochIterator:
        """Return an iterator that starts a new epoch at each `for`, and is empty after `num_epochs` (-1: never)."""
        return EpochIterator(self, num_epochs, output_numpy=output_numpy)

    def create_dict_iterator(self, num_epochs: int = -1, *, output_numpy: bool = False) -> Iterator[dict[str, Any]]:
        """Return the same as `create_tuple_iterator` over all epochs, each step as {column name: tensor}.

        Raises:
            UsageError: as `create_tuple_iterator`.
        """
        return EpochIterator(self, num_epochs, output_numpy=output_numpy, names=self._source.column_names)

    def __len__(self) -> int:
        return self.get_dataset_size()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return self._start_epoch()

    def _start_epoch(self, *, output_numpy: bool = False) -> Iterator[tuple[Any, ...]]:
        """Count and fix the epoch now, not when the first step is taken."""
        shard = self._shard()
        if count_steps(self._order, shard) == 0:
            raise UsageError(
                f"the dataset has no step: too few samples for a batch of {self._batch_size} on each of "
                f"{shard.num_shards} shards; use a smaller batch_size, fewer shards or drop_remainder=False"
            )
        items = draw_shard(self._order, self._next_epoch, shard)[self._first_step :]
        self._next_epoch += 1
        self._first_step = 0
        return self._read_steps(items, output_numpy=output_numpy)

    def _read_steps(self, items: Items, *, output_numpy: bool) -> Iterator[tuple[Any, ...]]:
        names = self._source.column_names
        for sample_keys in items:
            columns = self._source.read(sample_keys[:, 1])
            for step in self._steps:
                columns = step.apply(columns, sample_keys)
            if not self._order.is_batched:
                columns = [column[0] for column in columns]
            if output_numpy:
                yield tuple(columns)
            else:
                yield tuple(_to_tensor(name, column) for name, column in zip(names, columns, strict=True))

    def _shard(self) -> Shard:
        return self._asked_shard or find_world_shard()

    def _copy(self) -> Self:
        changed = copy.copy(self)
        changed._next_epoch = 0
        changed._first_step = 0
        return changed

    def _with_order(self, order: Order) -> Self:
        changed = self._copy()
        changed._order = order
        changed._depth = self._depth + 1
        return changed

    def _column_positions(self, input_columns: str | Sequence[str] | None) -> tuple[int, ...]:
        names = self._source.column_names
        if input_columns is None:
            return (0,)
        asked = [input_columns] if isinstance(input_columns, str) else list(input_columns)
        for name in asked:
            if name not in names:
                raise UsageError(f"map: no column {name!r}{near_miss(str(name), names)}; there are {', '.join(names)}")
        if not asked or len(set(asked)) < len(asked):
            raise UsageError(f"map: input_columns={input_columns!r}; name at least one column, each once")
        return tuple(names.index(name) for name in asked)


class EpochIterator(Iterator[Any]):
    """Steps of a dataset: `for` starts the next epoch, `next` continues the current one or starts the first.

    Raises:
        UsageError: `num_epochs` is neither -1 nor at least 1.
    """

    def __init__(
        self, dataset: Dataset, num_epochs: int, *, output_numpy: bool, names: tuple[str, ...] | None = None
    ) -> None:
        if num_epochs != -1:
            num_epochs = parse_count("num_epochs", num_epochs, minimum=1)
        self._dataset = dataset
        self._num_epochs = self._num_epochs_left = num_epochs
        self._output_numpy = output_numpy
        self._names = names
        self._epoch_steps: Iterator[tuple[Any, ...]] | None = None

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Make the next `for` epoch `epoch`, begun behind `step` steps; epochs before it count as taken."""
        self._dataset.set_epoch(epoch, step)
        self._num_epochs_left = max(0, self._num_epochs - epoch) if self._num_epochs != -1 else -1
        self._epoch_steps = None

    def __iter__(self) -> Self:
        if self._num_epochs_left == 0:
            self._epoch_steps = iter(())
        else:
            self._epoch_steps = self._dataset._start_epoch(output_numpy=self._output_numpy)
            self._num_epochs_left -= self._num_epochs_left > 0
        return self

    def __next__(self) -> Any:
        if self._epoch_steps is None:
            iter(self)
        assert self._epoch_steps is not None
        step = next(self._epoch_steps)
        return step if self._names is None else dict(zip(self._names, step, strict=True))


def _to_tensor(name: str, column: np.ndarray) -> torch.Tensor:
    native = np.require(column, column.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(native)
    except TypeError as error:
        raise UsageError(
            f"column {name!r} has dtype {column.dtype}, which torch cannot hold; map it to numbers"
        ) from error
