"""OnRequestExit: end a training in order when somebody asks for it, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from msrun.errors import ParallelError
from msrun.runtime.train.callbacks import Callback
from msrun.runtime.train.run_context import RunContext
from msrun.runtime.world import get_rank
from ranktable.bounded_text import load_json
from ranktable.files import read_text


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
        """Listen."""
        self._is_asked, self._asked, self._message = False, None, None
        if self._signal is not None:
            if threading.current_thread() is not threading.main_thread():
                raise ParallelError("OnRequestExit: signals reach the main thread alone; train there, or give sig=None")
            self._before = signal.signal(self._signal, self._ask)

    def on_train_step_end(self, context: RunContext) -> None:
        """Stop when a rank was asked before the last step ended."""
        if self._hear():
            context.request_stop()
            return
        self._asked = torch.tensor([int(self._is_asked or self._file_asks())])
        if dist.is_initialized():
            self._message = dist.all_reduce(self._asked, dist.ReduceOp.MAX, async_op=True)

    def on_train_end(self, context: RunContext) -> None:
        """Save if the training was asked to end, and listen no more."""
        is_asked = self._hear()
        if self._signal is not None:
            signal.signal(self._signal, self._before)
        if is_asked and self._saves:
            from msrun.runtime.train.model_checkpoint import ModelCheckpoint

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
