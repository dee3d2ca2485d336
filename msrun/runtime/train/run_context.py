"""RunContext: where a training run is, as its callbacks see it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from msrun.errors import ParallelError
from msrun.runtime import progress
from msrun.runtime.checkpoint.directory import Position
from msrun.runtime.parallel.communication import all_reduce
from msrun.runtime.world import device, get_group_size, get_rank

CALLBACKS = "msrun_callbacks"
"""Key of the callbacks' states among what a checkpoint holds beside network and optimizer."""


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
    net_outputs: Any = math.nan
    """What the network has returned in the last step: the loss, or a tuple that begins with it."""
    stop_requested: bool = False
    optimizer: Any = None
    position: Position = field(default_factory=Position)
    """The place in the data, which a checkpoint goes on from."""
    random_of_epoch: Any = None
    """The random generators as they were when the pass over the data began."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation by `Model.fit` or `Model.eval`: name -> value."""
    callbacks: Sequence[Any] = ()
    """All callbacks of the run."""
    _looked_at: tuple[Any, float] | None = None
    _first_bad: Tensor | None = None
    """On the device: the first step whose loss was not finite, 0 for none."""

    @property
    def loss(self) -> float:
        """The loss of the last step. On an accelerator the first look at it waits until it is computed."""
        if self._looked_at is None or self._looked_at[0] is not self.net_outputs:
            value = find_loss(self.net_outputs)
            number = float(value.detach()) if isinstance(value, Tensor) else float(value)
            progress.note_loss(number)
            self._looked_at = self.net_outputs, number
        return self._looked_at[1]

    @property
    def shared_loss(self) -> float:
        """The loss of the last step, the same on every rank: where each has its own, their mean. All ask together."""
        settings = getattr(self.network, "settings", None)
        if settings is None or not settings.has_own_results:
            return self.loss
        return float(all_reduce(torch.tensor(self.loss, dtype=torch.float64, device=device()))) / get_group_size()

    def note_step(self, outputs: Any) -> None:
        """Take the results of one more step, without waiting for them on an accelerator.

        Raises:
            ParallelError: the loss is not finite; on an accelerator `check_finite` says so later.
        """
        self.net_outputs = outputs
        self.step_in_epoch += 1
        self.cur_step_num += 1
        loss = find_loss(outputs).detach()
        if loss.device.type == "cpu":
            if not math.isfinite(self.loss):
                raise _diverged(f"epoch: {self.cur_epoch_num} step: {self.step_in_epoch}, loss is {self.loss}")
            return
        if self._first_bad is None:
            self._first_bad = torch.zeros((), dtype=torch.int64, device=loss.device)
        is_new = (self._first_bad == 0) & ~torch.isfinite(loss)
        self._first_bad = torch.where(is_new, self.cur_step_num, self._first_bad)

    def check_finite(self) -> None:
        """Look whether all losses were finite, which waits for an accelerator.

        Raises:
            ParallelError: one was not.
        """
        if self._first_bad is not None and (step := int(self._first_bad)):
            raise _diverged(f"the loss of step {step} is not finite")

    def request_stop(self) -> None:
        """End the training after this step. Every rank must ask for it in the same step."""
        self.stop_requested = True

    # MindSpore's names of the same, for callbacks written in its words.

    def original_args(self) -> RunContext:
        """Return the run context itself, which has MindSpore's cb_params as attributes."""
        return self

    def get_stop_requested(self) -> bool:
        """Return whether a callback wants the training to end."""
        return self.stop_requested

    @property
    def train_network(self) -> Any:
        """The network."""
        return self.network

    @property
    def list_callback(self) -> Sequence[Any]:
        """All callbacks of the run."""
        return self.callbacks


def find_loss(outputs: Any) -> Any:
    """Return the loss among what a network returns: the result itself, its `.loss`, or the first of several.

    Raises:
        ParallelError: there is none.
    """
    if isinstance(outputs, Tensor | float | int):
        return outputs
    if isinstance(getattr(outputs, "loss", None), Tensor):
        return outputs.loss
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
        return outputs["loss"]
    if isinstance(outputs, list | tuple) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise ParallelError(
        f"Model.train: the network returned {type(outputs).__name__}, not a loss: give Model a loss_fn, or a network "
        "that returns its loss, alone or first"
    )


def name_callbacks(listeners: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return every callback that has a state with the name under which a checkpoint keeps it."""
    names: list[str] = []
    for listener in listeners:
        names.append(type(listener).__name__)
        count = names.count(names[-1])
        if count > 1:
            names[-1] += f"_{count}"
    return [(name, one) for name, one in zip(names, listeners, strict=True) if hasattr(one, "state_dict")]


def _diverged(what: str) -> ParallelError:
    return ParallelError(
        f"rank {get_rank()}: {what}: training has diverged; lower the learning rate, clip gradients, or look for bad "
        "samples"
    )
