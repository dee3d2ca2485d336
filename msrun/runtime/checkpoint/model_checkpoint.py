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
from msrun.runtime.checkpoint.agreement import decide, gather
from msrun.runtime.checkpoint.directory import (
    Position,
    checkpoint_name,
    choose_surplus,
    find_checkpoints,
    remove_checkpoint,
    sweep,
)
from msrun.runtime.checkpoint.save import write_checkpoint
from msrun.runtime.train.callbacks import Callback, RunContext
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
    """Makes no difference: every checkpoint is written once by all ranks and loads whole or in any layout."""
    async_save: bool = False
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
        if self.async_save:
            raise CheckpointError("CheckpointConfig(async_save=True): writing beside the training is not supported yet")

    @property
    def keep_max(self) -> int:
        """How many are kept; 0 when minutes decide."""
        return self.keep_checkpoint_max or (0 if self.keep_checkpoint_per_n_minutes else 1)


class ModelCheckpoint(Callback):
    """Write checkpoints `PREFIX-EPOCH_STEP.ckpt` while Model.train runs, and one at its end.

    All ranks write one checkpoint together, in rank 0's directory. `Model.train(..., resume_from=...)` goes on from
    one. What an interrupted job left behind half-written is removed when training begins. A step whose loss is not
    finite is not saved.

    Args:
        prefix: begins every name.
        directory: made when it is missing; None is the working directory.
        config: when to write and what to keep; None is `CheckpointConfig()`, every step.

    Raises:
        CheckpointError: a prefix that cannot begin a file name; at writing, see `save_checkpoint`.
    """

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
        """Path of the checkpoint written last; empty before the first."""
        return str(self._latest or "")

    def on_train_begin(self, context: RunContext) -> None:
        """Agree on the directory and clear it of half-written checkpoints."""
        asked = sorted(set(gather(str(self._directory))))
        if len(asked) > 1 and get_rank() == 0:
            _log.warning(f"ModelCheckpoint: the ranks name {len(asked)} directories; all write into {self._directory}")
        directory = decide(lambda: self._directory.absolute())
        decide(lambda: sweep(directory, self._prefix))
        self._directory = directory
        self._saved_step, self._saved_at_s = context.cur_step_num, time.monotonic()

    def on_train_step_end(self, context: RunContext) -> None:
        """Write when the time has come."""
        if self._is_due(context):
            self._save(context)

    def on_train_end(self, context: RunContext) -> None:
        """Write the last step."""
        if context.cur_step_num > self._saved_step:
            self._save(context)

    def _is_due(self, context: RunContext) -> bool:
        if self._config.save_checkpoint_steps:
            return context.cur_step_num % self._config.save_checkpoint_steps == 0
        return decide(lambda: time.monotonic() - self._saved_at_s >= self._config.save_checkpoint_seconds)

    def _save(self, context: RunContext) -> None:
        if not decide(lambda: math.isfinite(context.loss)):
            return
        epoch, step = context.cur_epoch_num, context.step_in_epoch
        is_epoch_done = step == context.batch_num
        self._latest = write_checkpoint(
            context.network,
            self._directory / checkpoint_name(self._prefix, epoch, step),
            context.optimizer,
            Position(epoch, 0, context.cur_step_num)
            if is_epoch_done
            else Position(epoch - 1, step, context.cur_step_num),
            self._config.append_info or {},
            context.random_of_epoch,
        )
        self._saved_step, self._saved_at_s = context.cur_step_num, time.monotonic()
        if get_rank() == 0:
            self._remove_surplus()

    def _remove_surplus(self) -> None:
        """Rank 0, after the newest one is complete."""
        found = find_checkpoints(self._directory, self._prefix)
        for path in choose_surplus(found, self._config.keep_max, self._config.keep_checkpoint_per_n_minutes):
            remove_checkpoint(path)
