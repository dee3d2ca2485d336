"""ModelCheckpoint: the callback of Model.train that writes checkpoints, in MindSpore's words."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrun.errors import CheckpointError
from msrun.runtime.agreement import attempt, decide
from msrun.runtime.checkpoint.background import background
from msrun.runtime.checkpoint.directory import checkpoint_name, find_checkpoints
from msrun.runtime.checkpoint.places import find_places, own_place
from msrun.runtime.checkpoint.retention import choose_surplus, remove_checkpoint, sweep
from msrun.runtime.checkpoint.save import check_async, write_checkpoint
from msrun.runtime.train.callbacks import Callback
from msrun.runtime.train.run_context import CALLBACKS, RunContext, name_callbacks
from msrun.runtime.world import get_rank

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
        """Find out who writes where, and clear the directories of half-written checkpoints."""
        self._directory = self._directory.absolute()
        places = find_places(self._directory / self._prefix)
        is_leader = get_rank() == places[own_place(places, get_rank())].leader
        attempt(lambda: sweep(self._directory, self._prefix) if is_leader else None)
        self._saved_step, self._saved_at_s = context.cur_step_num, time.monotonic()

    def on_train_step_end(self, context: RunContext) -> None:
        """Write when the time has come; of an epoch's last step when its end was told, which changes callbacks."""
        if context.step_in_epoch != context.batch_num and self._is_due(context):
            self.save(context)

    def on_train_epoch_end(self, context: RunContext) -> None:
        """Write when the time had come with the last step."""
        if context.step_in_epoch == context.batch_num and self._is_due(context):
            self.save(context)

    def on_train_end(self, context: RunContext) -> None:
        """Write the last step, and wait for what is written beside the training."""
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
