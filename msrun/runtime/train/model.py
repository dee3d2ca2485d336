"""Model: a small trainer in MindSpore's words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import ParallelError
from msrun.runtime import progress
from msrun.runtime.nn.with_loss import WithLoss
from msrun.runtime.parallel.auto_parallel import AutoParallel
from msrun.runtime.parallel.context import has_parallel_mode
from msrun.runtime.train.callbacks import Callback, RunContext
from msrun.runtime.train.start import find_start


class Model:
    """Train a network.

    A module runs in the mode that `set_auto_parallel_context` has set, if any, as if it came with its AutoParallel.

    Args:
        network: a module, or an AutoParallel of one. Without `loss_fn` its result is the loss.
        loss_fn: joined with the network as `loss_fn(network(*inputs), label)`.
        optimizer: any torch optimizer over the network's parameters.

    Raises:
        ParallelError: `loss_fn` for an AutoParallel, which must hold its loss itself.
    """

    def __init__(
        self,
        network: nn.Module | AutoParallel,
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if loss_fn is not None and isinstance(network, AutoParallel):
            raise ParallelError(
                "Model(AutoParallel(net), loss_fn): wrap the loss first, AutoParallel(WithLoss(net, loss))"
            )
        self.network: Any = WithLoss(network, loss_fn) if loss_fn is not None else network
        if not isinstance(network, AutoParallel) and has_parallel_mode():
            self.network = AutoParallel(self.network)
        self.optimizer = optimizer

    def train(
        self,
        epoch: int,
        train_dataset: Iterable[Sequence[Tensor]],
        callbacks: Callback | Sequence[Callback] | None = None,
        initial_epoch: int = 0,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train for `epoch` epochs over a dataset that yields tuples of tensors, label last.

        Args:
            initial_epoch: epochs that count as done, from 0.
            resume_from: a checkpoint to go on from, such as `latest_checkpoint(directory)`: network, optimizer, random
                numbers and the place in the data continue as if training had never stopped. None begins anew.

        Raises:
            ParallelError: no optimizer, or a dataset that yields nothing.
            CheckpointError: the checkpoint is missing, incomplete or one of another network.
        """
        if self.optimizer is None:
            raise ParallelError("Model.train: no optimizer; give Model(network, optimizer=...)")
        listeners = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        context = RunContext(self.network, epoch, _length(train_dataset), optimizer=self.optimizer)
        start = find_start(self.network, self.optimizer, initial_epoch, resume_from)
        context.cur_step_num = start.position.step
        left = (epoch - start.position.epoch) * context.batch_num - start.position.step_in_epoch
        progress.begin_run(start.position.step, start.position.step + left if context.batch_num else 0)
        self.network.train()
        _tell(listeners, "on_train_begin", context)
        for number in range(start.position.epoch, epoch):
            context.cur_epoch_num = number + 1
            context.step_in_epoch = start.position.step_in_epoch if number == start.position.epoch else 0
            _tell(listeners, "on_train_epoch_begin", context)
            batches, context.random_of_epoch = start.begin_epoch(train_dataset, number)
            for batch in batches:
                self._step(batch, context)
                _tell(listeners, "on_train_step_end", context)
                if context.stop_requested:
                    break
            if context.step_in_epoch == 0:
                raise ParallelError("Model.train: the dataset yields no batch; give more samples or smaller batches")
            _tell(listeners, "on_train_epoch_end", context)
            if context.stop_requested:
                break
        _tell(listeners, "on_train_end", context)

    def _step(self, batch: Sequence[Tensor], context: RunContext) -> None:
        assert self.optimizer is not None
        if not isinstance(self.network, AutoParallel):  # which counts its steps itself
            progress.begin_step()
        loss = self.network(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        context.loss = float(loss.detach())
        progress.note_loss(context.loss)
        context.step_in_epoch += 1
        context.cur_step_num += 1

    @torch.no_grad()
    def predict(self, *inputs: Tensor) -> Any:
        """Return the network's result without gradients."""
        self.network.eval()
        return self.network(*inputs)


def _length(dataset: Iterable[Any]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return 0


def _tell(listeners: Sequence[Callback], moment: str, context: RunContext) -> None:
    for listener in listeners:
        getattr(listener, moment)(context)
