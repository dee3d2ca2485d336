"""Callbacks of Model.train."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from msrun.errors import CheckpointError, ParallelError
from msrun.runtime.agreement import attempt, decide
from msrun.runtime.checkpoint.directory import (
    checkpoint_name,
    choose_surplus,
    find_checkpoints,
    remove_checkpoint,
    sweep,
)
from msrun.runtime.checkpoint.save import background, check_async, find_places, own_place, write_checkpoint
from msrun.runtime.world import get_rank
from msrun.train.run_context import CALLBACKS, RunContext, name_callbacks
from ranktable.bounded_text import load_json
from ranktable.files import read_text


class Callback:
    """Something to do at the moments of a training run; override what you need.

    MindSpore's older names (`begin`, `epoch_begin`, `step_begin`, `step_end`, `epoch_end`, `end`) are called as well.
    A callback with `state_dict()` and `load_state_dict()` is kept in checkpoints of `ModelCheckpoint`.
    """

    saves_others = False
    """Told after the others, whose states it keeps."""

    def on_train_begin(self, context: RunContext) -> None:
        """Before the first step."""
        self.begin(context)

    def on_train_epoch_begin(self, context: RunContext) -> None:
        """Before an epoch."""
        self.epoch_begin(context)

    def on_train_step_begin(self, context: RunContext) -> None:
        """Before a step; in sink mode before the steps that run without a look at them."""
        self.step_begin(context)

    def on_train_step_end(self, context: RunContext) -> None:
        """After a step; `context.loss` is its loss. In sink mode after `sink_size` steps."""
        self.step_end(context)

    def on_train_epoch_end(self, context: RunContext) -> None:
        """After an epoch."""
        self.epoch_end(context)

    def on_train_end(self, context: RunContext) -> None:
        """After the last step."""
        self.end(context)

    def on_eval_begin(self, context: RunContext) -> None:
        """Before an evaluation."""

    def on_eval_end(self, context: RunContext) -> None:
        """After an evaluation; `context.metrics` has its results."""

    def begin(self, context: RunContext) -> None:
        """MindSpore's older name of `on_train_begin`."""

    def epoch_begin(self, context: RunContext) -> None:
        """MindSpore's older name of `on_train_epoch_begin`."""

    def step_begin(self, context: RunContext) -> None:
        """MindSpore's older name of `on_train_step_begin`."""

    def step_end(self, context: RunContext) -> None:
        """MindSpore's older name of `on_train_step_end`."""

    def epoch_end(self, context: RunContext) -> None:
        """MindSpore's older name of `on_train_epoch_end`."""

    def end(self, context: RunContext) -> None:
        """MindSpore's older name of `on_train_end`."""


class LossMonitor(Callback):
    """Print `epoch: 1 step: 100, loss is 4.51` every `per_print_times` steps; 0 = never.

    The loss is looked at only then. In sink mode it is printed once for `sink_size` steps.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if isinstance(per_print_times, bool) or not isinstance(per_print_times, int) or per_print_times < 0:
            raise ParallelError(f"LossMonitor(per_print_times={per_print_times!r}): a whole number, 0 or more")
        self._every = per_print_times
        self._last = 0

    def on_train_begin(self, context: RunContext) -> None:
        self._last = context.cur_step_num - context.cur_step_num % self._every if self._every else 0

    def on_train_step_end(self, context: RunContext) -> None:
        if not self._every or context.cur_step_num < self._last + self._every:
            return
        self._last = context.cur_step_num - context.cur_step_num % self._every
        sys.stdout.write(f"epoch: {context.cur_epoch_num} step: {context.step_in_epoch}, loss is {context.loss}\n")
        sys.stdout.flush()


class TimeMonitor(Callback):
    """Print how long every epoch took: `Train epoch time: 5122.3 ms, per step time: 32.8 ms`.

    Args:
        data_size: steps of an epoch; None is what the data says.
    """

    def __init__(self, data_size: int | None = None) -> None:
        if data_size is not None and (isinstance(data_size, bool) or not isinstance(data_size, int) or data_size < 1):
            raise ParallelError(f"TimeMonitor(data_size={data_size!r}): a whole number, 1 or more, or None")
        self._data_size = data_size
        self._began_s = 0.0
        self._first_step = 0

    def on_train_epoch_begin(self, context: RunContext) -> None:
        self._began_s, self._first_step = time.monotonic(), context.cur_step_num

    def on_train_epoch_end(self, context: RunContext) -> None:
        _ = context.loss
        milliseconds = (time.monotonic() - self._began_s) * 1000
        steps = self._data_size or max(1, context.cur_step_num - self._first_step)
        text = f"Train epoch time: {milliseconds:.3f} ms, per step time: {milliseconds / steps:.3f} ms"
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


class EarlyStopping(Callback):
    """End the training when a number has not improved for some epochs.

    Args:
        monitor: "loss", the last loss of an epoch, or a metric of `Model.fit`'s evaluation, such as "eval_loss".
        min_delta: what counts as an improvement, at least.
        patience: epochs without one that are borne.
        mode: "min", "max", or "auto": "max" for names with acc, top, f1, precision, recall or auc in them.
        baseline: what the number must be better than to begin with.

    Raises:
        ParallelError: a value out of range; at the end of an epoch, nothing has that name.
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: bool = False,
        mode: str = "auto",
        baseline: float | None = None,
    ) -> None:
        if mode not in ("auto", "min", "max"):
            raise ParallelError(f"EarlyStopping(mode={mode!r}): one of auto, min, max")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0 or min_delta < 0:
            raise ParallelError(
                f"EarlyStopping(patience={patience!r}, min_delta={min_delta!r}): patience is a whole number, both are "
                "0 or more"
            )
        grows = mode == "max" or (mode == "auto" and any(word in monitor.lower() for word in _GROWING))
        self._monitor, self._patience, self._verbose = monitor, patience, verbose
        self._sign = -1.0 if grows else 1.0
        self._min_delta = min_delta
        self._best = float("inf") if baseline is None else self._sign * baseline
        self._waited = 0

    def on_train_epoch_end(self, context: RunContext) -> None:
        value = self._sign * self._value(context)
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited > self._patience:
            context.request_stop()
            if self._verbose:
                sys.stdout.write(
                    f"epoch: {context.cur_epoch_num}, {self._monitor} has not improved for {self._waited} epochs: "
                    "training ends\n"
                )
                sys.stdout.flush()

    def state_dict(self) -> dict[str, float]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._best, self._waited = state["best"], int(state["waited"])

    def _value(self, context: RunContext) -> float:
        if self._monitor == "loss":
            return context.shared_loss
        if self._monitor in context.metrics:
            return context.metrics[self._monitor]
        known = ", ".join(["loss", *context.metrics])
        raise ParallelError(
            f"EarlyStopping(monitor={self._monitor!r}): nothing has that name here; known are {known}. eval_... needs "
            "Model.fit with a valid_dataset"
        )


_GROWING = ("acc", "top", "f1", "precision", "recall", "auc")


class LearningRateScheduler(Callback):
    """Set the learning rate of the optimizer while it trains.

    Args:
        schedule: a function (learning rate, step) -> learning rate, called for every parameter group after every step,
            as in MindSpore; or a scheduler of `torch.optim.lr_scheduler`.
        per: "step" or "epoch": when a torch scheduler steps.
        monitor: of a scheduler that steps by a number (ReduceLROnPlateau): "loss" or a metric of `Model.fit`.

    Raises:
        ParallelError: neither a function nor a scheduler, or another word for `per`.
    """

    def __init__(self, schedule: Any, per: str = "step", monitor: str = "loss") -> None:
        if not callable(schedule) and not hasattr(schedule, "step"):
            raise ParallelError(
                f"LearningRateScheduler({schedule!r}): give a function (learning rate, step) or a scheduler of "
                "torch.optim.lr_scheduler"
            )
        if per not in ("step", "epoch"):
            raise ParallelError(f"LearningRateScheduler(per={per!r}): step or epoch")
        self._schedule, self._per, self._monitor = schedule, per, monitor

    def on_train_step_end(self, context: RunContext) -> None:
        if hasattr(self._schedule, "step"):
            if self._per == "step":
                self._step(context)
            return
        for group in context.optimizer.param_groups:
            group["lr"] = self._schedule(group["lr"], context.cur_step_num)

    def on_train_epoch_end(self, context: RunContext) -> None:
        if hasattr(self._schedule, "step") and self._per == "epoch":
            self._step(context)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._schedule.state_dict()) if hasattr(self._schedule, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self._schedule, "load_state_dict"):
            self._schedule.load_state_dict(state)

    def _step(self, context: RunContext) -> None:
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        if isinstance(self._schedule, ReduceLROnPlateau):
            self._schedule.step(context.shared_loss if self._monitor == "loss" else context.metrics[self._monitor])
        else:
            self._schedule.step()


class OnRequestExit(Callback):
    """Save a checkpoint and end the training when a signal comes, or when a file says so.

    Any rank may be asked. The ranks tell each other with a message that travels during the next step, so all of them
    end after the same one, one step later. A SIGTERM to msrun reaches every worker, which then has `--grace` seconds.
    Kubernetes and Slurm send that signal before they end a job.

    Args:
        save_ckpt: write a checkpoint, `FILE_NAME-EPOCH_STEP.ckpt`, which `latest_checkpoint(directory)` finds.
        file_name: begins its name.
        directory: made when it is missing.
        config_file: rank 0 looks at it after every step; `{"GracefulExit": 1}` in it ends the training.
        sig: the signal; None for none.

    Raises:
        ParallelError: no way to ask; when training begins outside of the main thread, which alone hears signals.
    """

    saves_others = True

    def __init__(
        self,
        save_ckpt: bool = True,
        file_name: str = "Net",
        directory: str | os.PathLike[str] = ".",
        config_file: str | os.PathLike[str] | None = None,
        sig: int | None = signal.SIGTERM,
    ) -> None:
        if config_file is None and sig is None:
            raise ParallelError("OnRequestExit(sig=None) without config_file: nobody could ask; give one of them")
        self._file_name, self._directory, self._saves = file_name, directory, save_ckpt
        self._config_file = None if config_file is None else Path(config_file)
        self._signal = sig
        self._before: Any = None
        self._is_asked = False
        self._asked: torch.Tensor | None = None
        self._message: dist.Work | None = None

    def on_train_begin(self, context: RunContext) -> None:  # noqa: ARG002 - the interface of Callback
        self._is_asked, self._asked, self._message = False, None, None
        if self._signal is not None:
            if threading.current_thread() is not threading.main_thread():
                raise ParallelError("OnRequestExit: signals reach the main thread alone; train there, or give sig=None")
            self._before = signal.signal(self._signal, self._ask)

    def on_train_step_end(self, context: RunContext) -> None:
        if self._hear():
            context.request_stop()
            return
        self._asked = torch.tensor([int(self._is_asked or self._file_asks())])
        if dist.is_initialized():
            self._message = dist.all_reduce(self._asked, dist.ReduceOp.MAX, async_op=True)

    def on_train_end(self, context: RunContext) -> None:
        is_asked = self._hear()
        if self._signal is not None:
            signal.signal(self._signal, self._before)
        if is_asked and self._saves:
            ModelCheckpoint(self._file_name, self._directory).save(context)

    def _hear(self) -> bool:
        """Return whether a rank had been asked when the last message was sent."""
        if self._message is not None:
            self._message.wait()
            self._message = None
        return self._asked is not None and bool(self._asked)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked = True

    def _file_asks(self) -> bool:
        if self._config_file is None or get_rank() != 0:
            return False
        try:
            told = load_json(read_text(self._config_file))
        except (OSError, ValueError):  # not there yet, or half written
            return False
        return isinstance(told, dict) and bool(told.get("GracefulExit"))


_log = logging.getLogger("msrun.runtime")


@dataclass(frozen=True)
class CheckpointConfig:
    """When ModelCheckpoint writes, and what it keeps.

    Raises:
        CheckpointError: a value that is not a whole number of 0 or more, or `async_save`.
    """

    save_checkpoint_steps: int = 1
    """Write after every so many steps, counted over all epochs; 0 = ask save_checkpoint_seconds."""
    save_checkpoint_seconds: int = 0
    """Write when so many seconds have passed since the last time; counts only when save_checkpoint_steps is 0."""
    keep_checkpoint_max: int = 5
    """Keep so many, the newest; 0 = ask keep_checkpoint_per_n_minutes."""
    keep_checkpoint_per_n_minutes: int = 0
    """Of those written within so many minutes keep one, and the newest always; with 0 here too, one is kept."""
    integrated_save: bool = True
    """True: one file with whole tensors, which torch.load reads too. False: a directory with every rank's parts."""
    async_save: bool | str = False
    """True, "thread" or "process": write beside the training; see `save_checkpoint`."""
    append_info: Mapping[str, Any] | None = None
    """More to be saved with each one; `load_checkpoint` returns it."""

    def __post_init__(self) -> None:
        for name in (
            "save_checkpoint_steps",
            "save_checkpoint_seconds",
            "keep_checkpoint_max",
            "keep_checkpoint_per_n_minutes",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise CheckpointError(f"CheckpointConfig({name}={value!r}): must be a whole number, 0 or more")
        if self.save_checkpoint_steps == 0 and self.save_checkpoint_seconds == 0:
            raise CheckpointError(
                "CheckpointConfig: save_checkpoint_steps and save_checkpoint_seconds are both 0, so nothing would be "
                "written; give one of them"
            )
        check_async(self.async_save)

    @property
    def keep_max(self) -> int:
        """How many are kept; 0 when minutes decide."""
        return self.keep_checkpoint_max or (0 if self.keep_checkpoint_per_n_minutes else 1)


class ModelCheckpoint(Callback):
    """Write checkpoints `PREFIX-EPOCH_STEP.ckpt` while Model.train runs, and one at its end.

    All ranks write one checkpoint together; with directories of their own each has its own, see `save_checkpoint`.
    `Model.train(..., resume_from=...)` goes on from one. What an interrupted job left behind half-written is removed
    when training begins. A step whose loss is not finite is not saved.

    Args:
        prefix: begins every name.
        directory: made when it is missing; None is the working directory.
        config: when to write and what to keep; None is `CheckpointConfig()`, every step.

    Raises:
        CheckpointError: a prefix that cannot begin a file name; at writing, see `save_checkpoint`.
    """

    saves_others = True

    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | os.PathLike[str] | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        if not isinstance(prefix, str) or not prefix or "/" in prefix or prefix.startswith("."):
            raise CheckpointError(f"ModelCheckpoint(prefix={prefix!r}): must begin a file name, without a slash")
        self._prefix = prefix
        self._directory = Path(directory if directory is not None else ".")
        self._config = config or CheckpointConfig()
        self._saved_step = 0
        self._saved_at_s = time.monotonic()
        self._latest: Path | None = None

    @property
    def latest_ckpt_file_name(self) -> str:
        """Path of the checkpoint written last, or begun last with `async_save`; empty before the first."""
        return str(self._latest or "")

    def on_train_begin(self, context: RunContext) -> None:
        self._directory = self._directory.absolute()
        places = find_places(self._directory / self._prefix)
        is_leader = get_rank() == places[own_place(places, get_rank())].leader
        attempt(lambda: sweep(self._directory, self._prefix) if is_leader else None)
        self._saved_step, self._saved_at_s = context.cur_step_num, time.monotonic()

    def on_train_step_end(self, context: RunContext) -> None:
        if context.step_in_epoch != context.batch_num and self._is_due(context):
            self.save(context)

    def on_train_epoch_end(self, context: RunContext) -> None:
        if context.step_in_epoch == context.batch_num and self._is_due(context):
            self.save(context)

    def on_train_end(self, context: RunContext) -> None:
        if context.cur_step_num > self._saved_step:
            self.save(context)
        background.wait()

    def _is_due(self, context: RunContext) -> bool:
        if self._config.save_checkpoint_steps:
            steps = self._config.save_checkpoint_steps
            return context.cur_step_num // steps > self._saved_step // steps
        return decide(lambda: time.monotonic() - self._saved_at_s >= self._config.save_checkpoint_seconds)

    def save(self, context: RunContext) -> None:
        """Write a checkpoint of this step, unless its loss is not finite. All ranks call it together."""
        if not decide(lambda: math.isfinite(context.loss)):
            return
        states = {name: callback.state_dict() for name, callback in name_callbacks(context.callbacks)}
        self._latest = write_checkpoint(
            context.network,
            self._directory / checkpoint_name(self._prefix, context.cur_epoch_num, context.step_in_epoch),
            context.optimizer,
            context.position,
            {**(self._config.append_info or {}), **({CALLBACKS: states} if states else {})},
            context.random_of_epoch,
            is_integrated=self._config.integrated_save,
            is_async=check_async(self._config.async_save),
            then=self._remove_surplus,
        )
        self._saved_step, self._saved_at_s = context.cur_step_num, time.monotonic()

    def _remove_surplus(self) -> None:
        """After the newest one is complete."""
        found = find_checkpoints(self._directory, self._prefix)
        for path in choose_surplus(found, self._config.keep_max, self._config.keep_checkpoint_per_n_minutes):
            remove_checkpoint(path)
