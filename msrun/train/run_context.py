"""RunContext: where a training run is, as its callbacks see it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from msrun.data.dataset import Dataset, EpochIterator
from msrun.errors import ParallelError, UsageError
from msrun.runtime import progress
from msrun.runtime.checkpoint.directory import Position
from msrun.runtime.nn.random_stream import State, put_random_state, take_random_state
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
    """Return the loss among what a network returns: the result itself, its `.loss`, or the first of several."""
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


def begin_epoch(batches: Any, epoch: int) -> None:
    """Tell what is about to be looped over which epoch (from 0) begins, as a DistributedSampler needs to be told.

    Without it every epoch has the order of the first one. Whatever has a `set_epoch(epoch)` is told: a DataLoader's
    samplers and its dataset.
    """
    if isinstance(batches, data.Dataset) and not isinstance(batches, data.IterableDataset):
        name = type(batches).__name__
        raise UsageError(
            f"{name} is a torch Dataset, which gives samples, not batches; give a DataLoader, or "
            f"GeneratorDataset({name}(...)).batch(n), of which each rank reads its part"
        )
    batch_sampler = getattr(batches, "batch_sampler", None)
    samplers = [getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    told = set()
    for holder in (batches, *samplers, getattr(batches, "dataset", None)):
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch) and id(holder) not in told:
            told.add(id(holder))
            set_epoch(epoch)


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
    """Return where to begin; with `resume_from` the network and the optimizer are loaded from it."""
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
