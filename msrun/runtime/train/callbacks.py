"""Callbacks of Model.train."""

from __future__ import annotations

import sys
import time
from typing import Any

from msrun.errors import ParallelError
from msrun.runtime.train.run_context import RunContext


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
        """Count from here."""
        self._last = context.cur_step_num - context.cur_step_num % self._every if self._every else 0

    def on_train_step_end(self, context: RunContext) -> None:
        """Print the loss when its turn has come."""
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
        """Take the time."""
        self._began_s, self._first_step = time.monotonic(), context.cur_step_num

    def on_train_epoch_end(self, context: RunContext) -> None:
        """Print the time since; on an accelerator it waits for the last loss first."""
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
        """Stop, or wait for one more epoch. All ranks compare the same number."""
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
        """Return the best value and the epochs since."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
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
        """Set the rate of the next step."""
        if hasattr(self._schedule, "step"):
            if self._per == "step":
                self._step(context)
            return
        for group in context.optimizer.param_groups:
            group["lr"] = self._schedule(group["lr"], context.cur_step_num)

    def on_train_epoch_end(self, context: RunContext) -> None:
        """Set the rate of the next epoch."""
        if hasattr(self._schedule, "step") and self._per == "epoch":
            self._step(context)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a torch scheduler."""
        return dict(self._schedule.state_dict()) if hasattr(self._schedule, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give it to a torch scheduler."""
        if hasattr(self._schedule, "load_state_dict"):
            self._schedule.load_state_dict(state)

    def _step(self, context: RunContext) -> None:
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        if isinstance(self._schedule, ReduceLROnPlateau):
            self._schedule.step(context.shared_loss if self._monitor == "loss" else context.metrics[self._monitor])
        else:
            self._schedule.step()
