"""Where a training run begins: at its first step, at a later epoch, or where a checkpoint left it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from msrun.errors import ParallelError
from msrun.runtime.checkpoint.directory import Position
from msrun.runtime.checkpoint.random_state import State, put_random_state, take_random_state
from msrun.runtime.data.dataset import Dataset, EpochIterator


@dataclass
class Start:
    """The beginning of one training run."""

    position: Position
    random_of_epoch: State | None = None
    """The random generators when the epoch of the position began."""
    random_now: State | None = None

    def begin_epoch(self, dataset: Iterable[Any], epoch: int) -> tuple[Iterator[Any], State]:
        """Start the loop over an epoch, behind the steps that were done before; return it and its generators' states.

        Our own datasets jump there. Others, such as a torch DataLoader, start with the random numbers that they had
        then, and the steps done are read and dropped.
        """
        is_new = self.position == Position() and self.random_now is None
        if is_new or epoch > self.position.epoch:
            random = take_random_state()
            return _steps(iter(dataset)), random
        done = self.position.step_in_epoch
        began = self.random_of_epoch if done else self.random_now
        if began is not None:
            put_random_state(began)
        random = take_random_state()
        if isinstance(dataset, Dataset | EpochIterator):
            dataset.set_epoch(epoch, done)
            batches = iter(dataset)
        else:
            batches = iter(dataset)
            for _ in itertools.islice(batches, done):
                pass
        if done and self.random_now is not None:
            put_random_state(self.random_now)
        return _steps(batches), random


def _steps(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the steps without asking for another iterator, which of an EpochIterator would begin the next epoch."""
    while True:
        try:
            step = next(batches)
        except StopIteration:
            return
        yield step


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
    return Start(resumed.position, resumed.random_of_epoch, resumed.random_now)
