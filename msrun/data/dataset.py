"""Datasets: source, order, transforms, batches, the part of every global batch of this process, and epochs over them.

The sharding law: with N shards and `batch(B)`, the batches k of shards 0 .. N-1, put one after the other, are batch k
of the unsharded dataset with `batch(B * N)`, in every epoch; there are floor(n / (B * N)) of them. So a job of any
size trains on the same global batches as one process. It holds because each process computes the whole order.

Where MindSpore's meaning holds, a dataset without `num_shards` is whole on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from msrun.data import config
from msrun.data import source as sources
from msrun.data.config import (
    Shard,
    check_shard,
    find_compat,
    find_rank,
    find_world_device,
    find_world_shard,
    parse_count,
    parse_sizes,
)
from msrun.data.order import (
    Batched,
    Items,
    MindSporeSamples,
    Order,
    Repeated,
    Samples,
    Shuffled,
    Sliced,
    count_steps,
    draw_permutation,
    draw_shard,
    seed_of_rank,
)
from msrun.data.workers import Column, StepLoader, StepReader
from msrun.errors import UsageError, near_miss


def check_workers(num_parallel_workers: int | None) -> int:
    """Return the number of workers that the caller asked for, or what `config` says."""
    if num_parallel_workers is None:
        return config.get_num_parallel_workers()
    return parse_count("num_parallel_workers", num_parallel_workers, minimum=0)


def parse_seed(seed: int | None) -> int:
    """Return the seed that the caller asked for, or what `config` says."""
    return config.get_seed() if seed is None else parse_count("seed", seed, minimum=0, maximum=config.MAX_SEED)


class Dataset:
    """Columns of samples, read in a new deterministic order every epoch.

    Every method that changes the pipeline returns a new dataset and leaves this one as it was. Each `for` loop over
    the dataset is one epoch and counts; all ranks of a job must therefore start the same number of loops.
    A step yields a tuple of torch CPU tensors, one per column, each (B, ...) behind `batch` and one sample before.

    `num_shards` and `shard_id` choose the part to read. Left out, they follow the job: one shard per rank of the
    initialised world, everything when there is none. `num_shards=1` makes every rank read everything.
    `num_samples` keeps the first so many samples of the whole dataset, before it is shuffled and split.
    Where MindSpore's meaning holds, everything is read without `num_shards`, and in another order on each rank unless a
    seed is set; `num_samples` then counts those of a shard, after the shuffle.
    `shuffle` None is True. `seed` must be the same on all ranks; None is `config.get_seed()`.

    `num_parallel_workers` processes read and transform steps ahead of the loop; 0: the loop does it itself, None:
    `config.get_num_parallel_workers()`. They live as long as the dataset, change neither steps nor random numbers, and
    leave tensors in pinned memory when the job's device is an accelerator. Of several numbers given in a pipeline
    (here, in `map`, in `batch`) the largest counts: all its work is done by the same workers.

    Raises:
        UsageError: a value is out of range.
    """

    def __init__(
        self,
        source: sources.SampleSource,
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
        self._steps: tuple[sources.MapStep | sources.ColumnChoice, ...] = ()
        self._column_names = tuple(source.column_names)
        self._forget_position()

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
        listed = sources.check_operations(operations, len(positions))
        step = sources.MapStep(listed, positions, len(names), self._order.is_batched, self._seed, num_before)
        changed = self._copy(num_parallel_workers)
        changed._steps = (*self._steps, step)
        changed._column_names = tuple(sources.replace_columns(self._column_names, positions, names))
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
        changed._steps = (*self._steps, sources.ColumnChoice(positions))
        changed._column_names = tuple(self._column_names[i] for i in positions)
        return changed

    def rename(self, input_columns: str | Sequence[str], output_columns: str | Sequence[str]) -> Self:
        """Give columns other names.

        Raises:
            UsageError: an unknown column, another number of names, or a name that two columns would have.
        """
        positions = self._column_positions("rename", input_columns)
        names = (output_columns,) if isinstance(output_columns, str) else tuple(output_columns)
        new_names = tuple(sources.replace_columns(self._column_names, positions, names))
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
        return [self._from_rows(sources.MappedSource(rows, (), self._column_names, np.sort(part))) for part in parts]

    def zip(self, datasets: Dataset | Sequence[Dataset]) -> Self:
        """Return a dataset with the columns of this one and of others: row k of each together.

        It has an order of its own, with the seed, shards and shuffling of this one; so zip before `shuffle`, `take` and
        `batch`.

        Raises:
            UsageError: one is ordered already, or two have a column of the same name.
        """
        everyone: list[Dataset] = [self, *([datasets] if isinstance(datasets, Dataset) else datasets)]
        joined = sources.ZippedSource([dataset._as_rows("zip") for dataset in everyone])
        names = joined.column_names
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise UsageError(f"zip: more than one dataset has a column {twice[0]!r}; rename it in one of them")
        return self._from_rows(joined)

    def concat(self, datasets: Dataset | Sequence[Dataset]) -> Self:
        """Return a dataset with the samples of this one and of others, which have the same columns; also `a + b`.

        It has an order of its own, with the seed, shards and shuffling of this one; so join before `shuffle`, `take`
        and `batch`.

        Raises:
            UsageError: one is ordered already, or has other columns.
        """
        everyone: list[Dataset] = [self, *([datasets] if isinstance(datasets, Dataset) else datasets)]
        rows = [dataset._as_rows("concat") for dataset in everyone]
        for other in rows[1:]:
            if other.column_names != rows[0].column_names:
                raise UsageError(
                    f"concat: columns {', '.join(other.column_names)} beside {', '.join(rows[0].column_names)}; rename "
                    "or project them to be the same"
                )
        return self._from_rows(sources.ConcatenatedSource(rows))

    def __add__(self, other: Dataset) -> Self:
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

    def _as_rows(self, method: str) -> sources.MappedSource:
        if not isinstance(self._order, Samples):
            raise UsageError(f"{method}: after shuffle, take, skip, repeat or batch; call {method} before them")
        return sources.MappedSource(self._source, self._steps, self._column_names, np.arange(self._order.num_rows))

    def _from_rows(self, source: sources.SampleSource) -> Self:
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
        changed._forget_position()
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

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Make the next loop epoch `epoch` (from 0), as after resuming from a checkpoint.

        `step` steps of that epoch count as done: the loop begins behind them without reading them.
        """
        epoch = parse_count("epoch", epoch, minimum=0)
        self._first_step = parse_count("step", step, minimum=0)
        self._next_epoch = epoch
        self._position = epoch, step

    def state_dict(self) -> dict[str, int]:
        """Return where the loop over this dataset is, to go on there with `load_state_dict`, also within an epoch.

        `epoch` (from 0) and `step`: how many steps of it the loop has taken; behind its last one, the next epoch and 0.
        `seed`, `global_batch_size`, `steps_per_epoch`: what must be the same to go on. The same on every rank.
        """
        shard = self._shard()
        epoch, step = self._position
        steps_per_epoch = count_steps(self._order, shard)
        if step and step >= steps_per_epoch:
            epoch, step = epoch + 1, 0
        return {
            "epoch": epoch,
            "step": step,
            "seed": self._seed,
            "global_batch_size": self._batch_size * (self._asked_shard or shard).num_shards,
            "steps_per_epoch": steps_per_epoch,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Make the next loop go on where `state_dict` was taken: with the samples that would have come, and no other.

        On another number of ranks, too: give each rank so many samples that the global batch has the same size.

        Raises:
            UsageError: the state is one of a dataset with another seed, or, within an epoch, with another global batch
                or number of steps.
        """
        own = self.state_dict()
        if missing := [name for name in own if name not in state_dict]:
            raise UsageError(f"load_state_dict: no {', '.join(missing)}; give what state_dict() has returned")
        if state_dict["seed"] != self._seed:
            raise UsageError(
                f"load_state_dict: seed={state_dict['seed']}, this dataset has seed={self._seed}; make it with the same"
            )
        for name in ("global_batch_size", "steps_per_epoch"):
            if state_dict["step"] and state_dict[name] != own[name]:
                raise UsageError(
                    f"load_state_dict: step {state_dict['step']} of an epoch with {name}={state_dict[name]}, here it "
                    f"is {own[name]}; make it of the same samples, with batch(GLOBAL_BATCH // get_group_size())"
                )
        self.set_epoch(state_dict["epoch"], state_dict["step"])

    def create_tuple_iterator(self, num_epochs: int = -1, *, output_numpy: bool = False) -> EpochIterator:
        """Return an iterator that starts a new epoch at each `for`, and is empty after `num_epochs` (-1: never)."""
        return EpochIterator(self, num_epochs, output_numpy=output_numpy)

    def create_dict_iterator(self, num_epochs: int = -1, *, output_numpy: bool = False) -> Iterator[dict[str, Any]]:
        """Return the same as `create_tuple_iterator` over all epochs, each step as {column name: tensor}.

        Raises:
            UsageError: as `create_tuple_iterator`.
        """
        return EpochIterator(self, num_epochs, output_numpy=output_numpy, names=self._column_names)

    def output_shapes(self) -> list[list[int]]:
        """Return the shape of each column of a step; reads the first one."""
        return [list(column.shape) for column in self._read_first()]

    def output_types(self) -> list[np.dtype]:
        """Return the numpy dtype of each column; reads the first step."""
        return [_as_array("", column).dtype for column in self._read_first()]

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
        self._position = self._next_epoch, self._first_step
        self._next_epoch += 1
        self._first_step = 0
        return self._read_steps(items, self._position, output_numpy=output_numpy)

    def _read_steps(self, items: Items, position: tuple[int, int], *, output_numpy: bool) -> Iterator[tuple[Any, ...]]:
        loader = next((loader for loader in self._loaders if not loader.is_busy), None)
        if loader is None:
            reader = StepReader(self._source, self._steps, is_batched=self._order.is_batched)
            device = find_world_device()
            loader = StepLoader(reader, self._num_workers, should_pin=device is not None and device.type != "cpu")
            self._loaders.append(loader)
        epoch, done = position
        for number, columns in enumerate(loader.read(items), start=done + 1):
            self._position = epoch, number
            yield tuple(map(_as_array if output_numpy else _check_tensor, self._column_names, columns))

    def _read_first(self) -> tuple[Column, ...]:
        items = draw_shard(self._order, 0, self._shard())
        if not len(items):
            raise UsageError("the dataset has no step; use a smaller batch_size")
        return StepReader(self._source, self._steps, is_batched=self._order.is_batched).read(items[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaders": []}

    def _forget_position(self) -> None:
        self._next_epoch = 0
        self._first_step = 0
        self._position = 0, 0
        """Epoch of the loop that was started last, and how many steps it has taken."""
        self._loaders: list[StepLoader] = []
        """What reads; more than one when loops over this dataset are nested."""


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

    def state_dict(self) -> dict[str, int]:
        """Return where the dataset is, as `Dataset.state_dict`."""
        return self._dataset.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Make the next `for` go on where `state_dict` was taken; epochs before count as taken."""
        self._dataset.load_state_dict(state_dict)
        self.set_epoch(state_dict["epoch"], state_dict["step"])

    def __len__(self) -> int:
        return len(self._dataset)

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


def _as_array(_name: str, column: Column) -> Any:
    return column.numpy() if isinstance(column, torch.Tensor) else column


def _check_tensor(name: str, column: Column) -> torch.Tensor:
    if not isinstance(column, torch.Tensor):
        raise UsageError(f"column {name!r} has dtype {column.dtype}, which torch cannot hold; map it to numbers")
    return column


class NumpySlicesDataset(Dataset):
    """Rows of arrays in memory.

    `data` is {column name: array}, or one array, or a tuple of arrays named by `column_names` (default `column_0`,
    `column_1`, ...). Arrays are not copied until read. The keyword parameters are those of `Dataset`.

    Raises:
        UsageError: the arrays differ in length or the names do not fit.
    """

    def __init__(self, data: Any, column_names: str | Sequence[str] | None = None, **parameters: Any) -> None:
        super().__init__(sources.ArraySource(_named_columns(data, column_names)), **parameters)


class GeneratorDataset(Dataset):
    """Samples of an object with `__len__` and `__getitem__`: values, tuples of values, or dictionaries of them.

    A map-style torch Dataset is one. Items are fetched by index, so that every rank fetches its part alone. The items
    of a column must all have one shape. What an item draws from `random`, `numpy.random` and `torch` belongs to it,
    whatever the number of ranks and workers.
    A function that returns an iterator (a generator function), or another iterable, is run through once for each epoch,
    on every rank, whose memory holds the epoch; the first time when the dataset is made. Its order stays.
    `column_names` choose from dictionaries. None: the keys of item 0, or `column_0`, `column_1`, ... for as many values
    as it has. The keyword parameters are those of `Dataset`.

    Raises:
        UsageError: no samples can be had from it, items do not fit `column_names`, or `shuffle` without random access.
        DataError: when read: fetching an item raises; names the item and the user's line.
    """

    def __init__(self, source: Any, column_names: str | Sequence[str] | None = None, **parameters: Any) -> None:
        seed = parse_seed(parameters.pop("seed", None))
        has_access = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if not has_access and not callable(source) and not hasattr(source, "__iter__"):
            raise UsageError(
                f"GeneratorDataset: {type(source).__name__} has no __getitem__ and __len__, nor __iter__; give an "
                "object with random access, such as a list of the samples, or a function that returns an iterator"
            )
        items = source if has_access else sources.Passes(source, parameters.get("num_samples"))
        if not has_access:
            if parameters.get("shuffle"):
                raise UsageError(
                    f"GeneratorDataset: shuffle=True, and {type(source).__name__} gives samples in its own order only; "
                    "give an object with __getitem__ and __len__, or call shuffle(buffer_size)"
                )
            parameters = {**parameters, "shuffle": False, "num_parallel_workers": 0}
        if column_names is None:
            column_names = _names_in(items[0]) if len(items) else _numbered(1)
        super().__init__(sources.ItemSource(items, _as_names(column_names), seed), seed=seed, **parameters)
        self._is_sequential = not has_access

    def _copy(self, num_parallel_workers: int | None = None) -> Self:
        return super()._copy(0 if self._is_sequential else num_parallel_workers)


def _names_in(item: Any) -> list[str]:
    if isinstance(item, Mapping):
        return list(item)
    return _numbered(len(item) if isinstance(item, tuple | list) else 1)


def _numbered(count: int) -> list[str]:
    return [f"column_{i}" for i in range(count)]


def _as_names(column_names: str | Sequence[str]) -> tuple[str, ...]:
    names = (column_names,) if isinstance(column_names, str) else tuple(column_names)
    if not names or len(set(names)) < len(names):
        raise UsageError(f"column_names={column_names!r}; give at least one name, each once")
    return names


def _named_columns(data: Any, column_names: str | Sequence[str] | None) -> dict[str, sources.ColumnParts]:
    if isinstance(data, Mapping):
        if column_names is not None:
            raise UsageError(f"column_names={column_names!r} with a mapping; its keys are the names, leave it out")
        return {str(name): sources.ColumnParts([_rows(array)]) for name, array in data.items()}
    arrays = data if isinstance(data, tuple) else (data,)
    names = _as_names(_numbered(len(arrays)) if column_names is None else column_names)
    if len(names) != len(arrays):
        raise UsageError(f"column_names={column_names!r} for {len(arrays)} arrays; give one name per array")
    return {name: sources.ColumnParts([_rows(array)]) for name, array in zip(names, arrays, strict=True)}


def _rows(array: Any) -> np.ndarray:
    rows = np.asarray(array)
    if rows.ndim == 0:
        raise UsageError(f"NumpySlicesDataset: {array!r} is no array of samples; the first axis must be the samples")
    return rows
