"""What a dataset reads: source, order, transforms, batches, and the part of every global batch of this process.

The sharding law: with N shards and `batch(B)`, the batches k of shards 0 .. N-1, put one after the other, are batch k
of the unsharded dataset with `batch(B * N)`, in every epoch; there are floor(n / (B * N)) of them. So a job of any
size trains on the same global batches as one process. It holds because each process computes the whole order.

Where MindSpore's meaning holds, a dataset without `num_shards` is whole on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from msrun.data import config
from msrun.data.order import (
    Batched,
    MindSporeSamples,
    Order,
    Repeated,
    Samples,
    Shuffled,
    Sliced,
    count_steps,
    draw_permutation,
    seed_of_rank,
)
from msrun.data.parameters import Shard, check_shard, find_compat, find_rank, find_world_shard, parse_count, parse_sizes
from msrun.data.source import (
    ColumnChoice,
    ConcatenatedSource,
    MappedSource,
    MapStep,
    SampleSource,
    ZippedSource,
    check_operations,
    replace_columns,
)
from msrun.errors import UsageError, near_miss


class DataPipeline:
    """The description that `Dataset` reads by; every method that changes it returns another one.

    Its parameters are those of `Dataset`.
    """

    def __init__(
        self,
        source: SampleSource,
        num_samples: int | None = None,
        num_parallel_workers: int | None = None,
        shuffle: bool | None = None,
        *,
        num_shards: int | None = None,
        shard_id: int | None = None,
        seed: int | None = None,
    ) -> None:
        limit = None if num_samples is None else parse_count("num_samples", num_samples, minimum=1)
        self._source = source
        self._asked_shard = check_shard(num_shards, shard_id)
        self._seed = parse_seed(seed)
        self._num_workers = check_workers(num_parallel_workers)
        self._is_mindspore = find_compat() == "mindspore"
        self._order: Order
        if self._is_mindspore:
            shard, first_seed = self._asked_shard or Shard(1, 0), self._seed + (self._asked_shard is not None)
            if self._asked_shard is None and seed is None and not config.has_seed():
                self._seed = first_seed = seed_of_rank(find_rank())
            self._order = MindSporeSamples(
                source.num_samples, first_seed, is_shuffled=shuffle is not False, shard=shard, limit=limit
            )
        else:
            num_kept = source.num_samples if limit is None else min(source.num_samples, limit)
            self._order = Samples(num_kept, self._seed, is_shuffled=shuffle is not False)
        self._depth = 1
        self._batch_size = 1
        self._steps: tuple[MapStep | ColumnChoice, ...] = ()
        self._column_names = tuple(source.column_names)

    def map(
        self,
        operations: Any,
        input_columns: str | Sequence[str] | None = None,
        output_columns: str | Sequence[str] | None = None,
        num_parallel_workers: int | None = None,
        *,
        python_multiprocessing: bool = True,
    ) -> Self:
        """Apply one operation, or a list in turn, to `input_columns` (None: the first column).

        An operation is a transform of `vision` or `transforms`, any object with `apply_batch(array) -> array`, or a
        function. A function gets one sample (one whole batch if `map` comes after `batch`), as numpy arrays, one
        argument per input column, and returns as many values. What it draws from `random`, `numpy.random` and `torch`
        belongs to the sample (the batch), whatever the number of ranks (only of workers). `output_columns` are new
        names of the results, of which there may be more or fewer than input columns. Workers are always processes.

        Raises:
            UsageError: an unknown column, or something that cannot be applied.
            DataError: when read: a function raises; names the sample and the user's line.
        """
        if not python_multiprocessing:
            raise UsageError("map: python_multiprocessing=False; workers are always processes, leave it out")
        positions = self._column_positions("map", input_columns)
        names = tuple(self._column_names[i] for i in positions)
        if output_columns is not None:
            names = (output_columns,) if isinstance(output_columns, str) else tuple(output_columns)
        num_before = sum(step.num_operations for step in self._steps)
        listed = check_operations(operations, len(positions))
        step = MapStep(listed, positions, len(names), self._order.is_batched, self._seed, num_before)
        changed = self._copy(num_parallel_workers)
        changed._steps = (*self._steps, step)
        changed._column_names = tuple(replace_columns(self._column_names, positions, names))
        if not names or len(set(changed._column_names)) < len(changed._column_names):
            raise UsageError(
                f"map: output_columns={output_columns!r}; name at least one column, and none twice or like another "
                f"column ({', '.join(self._column_names)})"
            )
        return changed

    def batch(
        self, batch_size: int, drop_remainder: bool | None = None, num_parallel_workers: int | None = None
    ) -> Self:
        """Join `batch_size` samples of this shard; `drop_remainder` leaves out the incomplete last global batch.

        None: True, or False where MindSpore's meaning holds.

        Raises:
            UsageError: already batched, a size below 1, or a kept rest that the shards cannot share evenly.
        """
        batch_size = parse_count("batch_size", batch_size, minimum=1)
        if self._order.is_batched:
            raise UsageError("batch: the dataset is batched already; call batch once")
        drops = not self._is_mindspore if drop_remainder is None else drop_remainder
        changed = self._with_order(Batched(self._order, batch_size, drops), num_parallel_workers)
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

    def project(self, columns: str | Sequence[str]) -> Self:
        """Keep only `columns`, in this order.

        Raises:
            UsageError: an unknown column, none, or one twice.
        """
        positions = self._column_positions("project", columns)
        changed = self._copy()
        changed._steps = (*self._steps, ColumnChoice(positions))
        changed._column_names = tuple(self._column_names[i] for i in positions)
        return changed

    def rename(self, input_columns: str | Sequence[str], output_columns: str | Sequence[str]) -> Self:
        """Give columns other names.

        Raises:
            UsageError: an unknown column, another number of names, or a name that two columns would have.
        """
        positions = self._column_positions("rename", input_columns)
        names = (output_columns,) if isinstance(output_columns, str) else tuple(output_columns)
        new_names = tuple(replace_columns(self._column_names, positions, names))
        if len(names) != len(positions) or len(set(new_names)) < len(new_names):
            raise UsageError(
                f"rename: output_columns={output_columns!r} for {len(positions)} of {', '.join(self._column_names)}; "
                "give one name for each, none twice"
            )
        changed = self._copy()
        changed._column_names = new_names
        return changed

    def split(self, sizes: Sequence[int] | Sequence[float], randomize: bool = True) -> list[Self]:
        """Return datasets of different samples of this one, such as for training and validation.

        Args:
            sizes: numbers of samples, or shares of all that add up to 1, one for each dataset.
            randomize: which samples go where follows from the seed; False: in the order of the files.

        Raises:
            UsageError: other sizes; or the dataset is shuffled again, repeated, cut or batched already.
        """
        rows = self._as_rows("split")
        count = rows.num_samples
        indices = draw_permutation(self._seed, count) if randomize else np.arange(count)
        parts = np.split(indices, np.cumsum(parse_sizes(sizes, count))[:-1])
        return [self._from_rows(MappedSource(rows, (), self._column_names, np.sort(part))) for part in parts]

    def zip(self, datasets: DataPipeline | Sequence[DataPipeline]) -> Self:
        """Return a dataset with the columns of this one and of others: row k of each together.

        It has an order of its own, with the seed, shards and shuffling of this one; so zip before `shuffle`, `take` and
        `batch`.

        Raises:
            UsageError: one is ordered already, or two have a column of the same name.
        """
        everyone: list[DataPipeline] = [self, *([datasets] if isinstance(datasets, DataPipeline) else datasets)]
        joined = ZippedSource([dataset._as_rows("zip") for dataset in everyone])
        names = joined.column_names
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise UsageError(f"zip: more than one dataset has a column {twice[0]!r}; rename it in one of them")
        return self._from_rows(joined)

    def concat(self, datasets: DataPipeline | Sequence[DataPipeline]) -> Self:
        """Return a dataset with the samples of this one and of others, which have the same columns; also `a + b`.

        It has an order of its own, with the seed, shards and shuffling of this one; so join before `shuffle`, `take`
        and `batch`.

        Raises:
            UsageError: one is ordered already, or has other columns.
        """
        everyone: list[DataPipeline] = [self, *([datasets] if isinstance(datasets, DataPipeline) else datasets)]
        rows = [dataset._as_rows("concat") for dataset in everyone]
        for other in rows[1:]:
            if other.column_names != rows[0].column_names:
                raise UsageError(
                    f"concat: columns {', '.join(other.column_names)} beside {', '.join(rows[0].column_names)}; rename "
                    "or project them to be the same"
                )
        return self._from_rows(ConcatenatedSource(rows))

    def __add__(self, other: DataPipeline) -> Self:
        return self.concat(other)

    def get_dataset_size(self) -> int:
        """Return the number of steps in an epoch, the same for every shard."""
        return count_steps(self._order, self._shard())

    def get_batch_size(self) -> int:
        """Return the samples per step of one shard; 1 before `batch`."""
        return self._batch_size

    def get_col_names(self) -> list[str]:
        """Return the column names in the order of the yielded tuples."""
        return list(self._column_names)

    def _as_rows(self, method: str) -> MappedSource:
        if not isinstance(self._order, Samples):
            raise UsageError(f"{method}: after shuffle, take, skip, repeat or batch; call {method} before them")
        return MappedSource(self._source, self._steps, self._column_names, np.arange(self._order.num_rows))

    def _from_rows(self, source: SampleSource) -> Self:
        """Return a pipeline over another source, ordered as this one."""
        assert isinstance(self._order, Samples)
        changed = self._copy()
        changed._source, changed._steps, changed._column_names = source, (), tuple(source.column_names)
        changed._order = self._order.over(source.num_samples)
        return changed

    def _shard(self) -> Shard:
        """Return which part of every global batch this process reads; MindSpore's shards are parts of the samples."""
        return Shard(1, 0) if self._is_mindspore else self._asked_shard or find_world_shard()

    def _copy(self, num_parallel_workers: int | None = None) -> Self:
        changed = copy.copy(self)
        if num_parallel_workers is not None:
            changed._num_workers = max(self._num_workers, check_workers(num_parallel_workers))
        return changed

    def _with_order(self, order: Order, num_parallel_workers: int | None = None) -> Self:
        changed = self._copy(num_parallel_workers)
        changed._order = order
        changed._depth = self._depth + 1
        return changed

    def _column_positions(self, method: str, input_columns: str | Sequence[str] | None) -> tuple[int, ...]:
        names = self._column_names
        if input_columns is None:
            return (0,)
        asked = [input_columns] if isinstance(input_columns, str) else list(input_columns)
        for name in asked:
            if name not in names:
                raise UsageError(
                    f"{method}: no column {name!r}{near_miss(str(name), names)}; there are {', '.join(names)}"
                )
        if not asked or len(set(asked)) < len(asked):
            raise UsageError(f"{method}: input_columns={input_columns!r}; name at least one column, each once")
        return tuple(names.index(name) for name in asked)


def check_workers(num_parallel_workers: int | None) -> int:
    """Return the number of workers that the caller asked for, or what `config` says."""
    if num_parallel_workers is None:
        return config.get_num_parallel_workers()
    return parse_count("num_parallel_workers", num_parallel_workers, minimum=0)


def parse_seed(seed: int | None) -> int:
    """Return the seed that the caller asked for, or what `config` says."""
    return config.get_seed() if seed is None else parse_count("seed", seed, minimum=0, maximum=config.MAX_SEED)
