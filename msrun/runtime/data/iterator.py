"""Iterators that start a new epoch at each loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from msrun.runtime.data.parameters import parse_count

if TYPE_CHECKING:
    from msrun.runtime.data.dataset import Dataset


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
