"""Where a training run begins, and its steps: pass after pass over the data, from any step of a pass."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from msrun.errors import ParallelError
from msrun.runtime.checkpoint.directory import Position
from msrun.runtime.data.dataset import Dataset, EpochIterator
from msrun.runtime.data.torch_loaders import begin_epoch
from msrun.runtime.nn.random_state import State, put_random_state, take_random_state
from msrun.runtime.train.run_context import CALLBACKS


@dataclass
class Start:
    """The beginning of one training run."""

    position: Position
    random_of_epoch: State | None = None
    """The random generators when the pass of the position began."""
    random_now: State | None = None
    callback_states: dict[str, Any] = field(default_factory=dict)


class DataStream:
    """The steps of a dataset, one pass after the other, and the place in it.

    After a checkpoint it goes on behind the steps that were done. Our own datasets jump there. Others, such as a torch
    DataLoader, start with the random numbers that they had then, and the steps done are read and dropped.
    """

    def __init__(self, dataset: Iterable[Any], start: Start) -> None:
        self._dataset = dataset
        self._start = start
        self._steps_of_pass = count_steps(dataset)
        self._batches: Iterator[Any] = iter(())
        self._pass = start.position.epoch - 1
        self._step_in_pass = self._steps_of_pass
        self._step = start.position.step
        self.random_of_pass: State | None = None
        """The random generators as they were when the pass began."""

    def begin_pass(self) -> int:
        """Begin the next pass; return the steps of it that were done before."""
        self._pass += 1
        first = self._start.position
        is_first = self._pass == first.epoch
        self._step_in_pass = first.step_in_epoch if is_first else 0
        if not is_first or (first == Position() and self._start.random_now is None):
            self.random_of_pass = take_random_state()
            if not isinstance(self._dataset, Dataset | EpochIterator):
                begin_epoch(self._dataset, self._pass)
            self._batches = iter(self._dataset)
        else:
            self._batches = self._go_on(self._step_in_pass)
        return self._step_in_pass

    def next(self) -> Any:
        """Return the next step of the pass; None behind its last."""
        batch = next(self._batches, None)  # no `for`: of an EpochIterator, another iter() would begin the next pass
        if batch is not None:
            self._step_in_pass += 1
            self._step += 1
        return batch

    @property
    def position(self) -> Position:
        """What a run that goes on from here needs."""
        if self._step_in_pass == self._steps_of_pass:
            return Position(self._pass + 1, 0, self._step)
        return Position(self._pass, self._step_in_pass, self._step)

    def _go_on(self, done: int) -> Iterator[Any]:
        began = self._start.random_of_epoch if done else self._start.random_now
        if began is not None:
            put_random_state(began)
        self.random_of_pass = take_random_state()
        if isinstance(self._dataset, Dataset | EpochIterator):
            self._dataset.set_epoch(self._pass, done)
            batches = iter(self._dataset)
        else:
            begin_epoch(self._dataset, self._pass)
            batches = iter(self._dataset)
            for _ in itertools.islice(batches, done):
                pass
        if done and self._start.random_now is not None:
            put_random_state(self._start.random_now)
        return batches


def count_steps(dataset: Any) -> int:
    """Return the steps of a pass; 0 when the dataset does not say."""
    try:
        return len(dataset)
    except TypeError:
        return 0


def find_start(
    network: Any,
    optimizer: torch.optim.Optimizer,
    initial_epoch: int,
    resume_from: str | os.PathLike[str] | None,
) -> Start:
    """Return where to begin; with `resume_from` the network and the optimizer are loaded from it.

    Raises:
        ParallelError: both are given.
        CheckpointError: as `load_checkpoint` does.
    """
    if resume_from is None:
        return Start(Position(epoch=initial_epoch))
    if initial_epoch:
        raise ParallelError(
            f"Model.train(initial_epoch={initial_epoch}, resume_from={resume_from}): the checkpoint says where to go "
            "on; give one of them"
        )
    from msrun.runtime.checkpoint.load import resume  # torch's checkpoint modules, for those who load one

    resumed = resume(resume_from, network, optimizer)
    states = resumed.appended.pop(CALLBACKS, {})
    return Start(resumed.position, resumed.random_of_epoch, resumed.random_now, states)
