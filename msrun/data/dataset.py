"""Datasets: epochs over a pipeline, and where in them the loop is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import numpy as np
import torch

from msrun.data.order import Items, SampleDraws, count_steps, draw_shard
from msrun.data.parameters import find_world_device, parse_count
from msrun.data.pipeline import DataPipeline, parse_seed
from msrun.data.source import ArraySource, ColumnParts, SampleSource, failed, own_random_numbers
from msrun.data.workers import Column, StepLoader, StepReader
from msrun.errors import DataError, MsrunError, UsageError


class Dataset(DataPipeline):
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

    def __init__(self, source: SampleSource, *parameters: Any, **named: Any) -> None:
        super().__init__(source, *parameters, **named)
        self._forget_position()

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

    def _copy(self, num_parallel_workers: int | None = None) -> Self:
        changed = super()._copy(num_parallel_workers)
        changed._forget_position()
        return changed


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
        super().__init__(ArraySource(_named_columns(data, column_names)), **parameters)


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
        items = source if has_access else _Passes(source, parameters.get("num_samples"))
        if not has_access:
            if parameters.get("shuffle"):
                raise UsageError(
                    f"GeneratorDataset: shuffle=True, and {type(source).__name__} gives samples in its own order only; "
                    "give an object with __getitem__ and __len__, or call shuffle(buffer_size)"
                )
            parameters = {**parameters, "shuffle": False, "num_parallel_workers": 0}
        if column_names is None:
            column_names = _names_in(items[0]) if len(items) else _numbered(1)
        super().__init__(ItemSource(items, _as_names(column_names), seed), seed=seed, **parameters)
        self._is_sequential = not has_access

    def _copy(self, num_parallel_workers: int | None = None) -> Self:
        return super()._copy(0 if self._is_sequential else num_parallel_workers)


class _Passes:
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
                if isinstance(self._items, _Passes):
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
