"""Callbacks of Model.train."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from msrun.errors import ParallelError


@dataclass
class RunContext:
    """Where a training run is; handed to every callback."""

    network: Any
    """What is trained: a module or an AutoParallel."""
    epoch_num: int
    batch_num: int
    """Steps of one epoch; 0 when the data does not say."""
    cur_epoch_num: int = 0
    """From 1."""
    cur_step_num: int = 0
    """Over all epochs, from 1."""
    step_in_epoch: int = 0
    """From 1."""
    loss: float = math.nan
    stop_requested: bool = False
    optimizer: Any = None
    random_of_epoch: Any = None
    """The random generators as they were when the epoch began."""

    def request_stop(self) -> None:
        """End the training after this step."""
        self.stop_requested = True


class Callback:
    """Something to do at the moments of a training run; override what you need."""

    def on_train_begin(self, context: RunContext) -> None:
        """Before the first step."""

    def on_train_epoch_begin(self, context: RunContext) -> None:
        """Before an epoch."""

    def on_train_step_end(self, context: RunContext) -> None:
        """After a step; `context.loss` is its loss."""

    def on_train_epoch_end(self, context: RunContext) -> None:
        """After an epoch."""

    def on_train_end(self, context: RunContext) -> None:
        """After the last step."""


class LossMonitor(Callback):
    """Print `epoch: 1 step: 100, loss is 4.51` every `per_print_times` steps; 0 = never.

    Raises:
        ParallelError: a loss that is not finite ends the training.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if not isinstance(per_print_times, int) or per_print_times < 0:
            raise ParallelError(f"LossMonitor(per_print_times={per_print_times!r}): a whole number, 0 or more")
        self._every = per_print_times

    def on_train_step_end(self, context: RunContext) -> None:
        """Print the loss when its turn has come."""
        place = f"epoch: {context.cur_epoch_num} step: {context.step_in_epoch}"
        if not math.isfinite(context.loss):
            raise ParallelError(f"{place}, loss is {context.loss}: training has diverged; lower the learning rate")
        if self._every and context.cur_step_num % self._every == 0:
            sys.stdout.write(f"{place}, loss is {context.loss}\n")
            sys.stdout.flush()
