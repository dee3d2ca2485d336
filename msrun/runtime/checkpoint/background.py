"""Writing beside the training: a copy of what is to be written, one thread, a group of its own for its messages."""

from __future__ import annotations

import atexit
import logging
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from msrun.errors import CheckpointError, ParallelError
from msrun.runtime.agreement import describe
from msrun.runtime.checkpoint.tensor_key import TensorKey, flat_name
from msrun.runtime.checkpoint.writing import Writing, explain
from msrun.runtime.optim.of_parts import before_steps_in_backward
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.server.stepping import before_remote_steps
from msrun.runtime.world import at_release

_TIMEOUT_S = 86400.0
"""A rank that died ends its connections, so only a slow disk is ever waited for."""
_log = logging.getLogger("msrun.runtime")


class BackgroundWriter:
    """Writes one checkpoint at a time. Its messages go over a gloo group that nothing else uses.

    What only optimizers change is copied by the thread, while the training computes; an optimizer's step waits for the
    copies. All else, such as running means, is copied before the training goes on.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._copies: dict[TensorKey, Tensor] = {}
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._is_hooked = False

    def start(self, writing: Writing) -> None:
        """Write it while the training goes on. All ranks call it together, after `wait`."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        if not self._is_hooked:
            register_optimizer_step_pre_hook(lambda *_: self.settle())
            before_steps_in_backward.append(self.settle)
            before_remote_steps(lambda _optimizer: self.settle())  # which bring new values before other hooks run
            self._is_hooked = True
        now = {key: self._copy(key, part) for key, part in writing.parts.items() if key not in writing.steady}
        versions = {key: writing.parts[key].tensor._version for key in writing.steady}
        self._is_copied.clear()
        # Not a daemon: the end of the process waits for it.
        self._thread = threading.Thread(target=self._write, args=(writing, now, versions), name="msrun-checkpoint")
        self._thread.start()

    def settle(self) -> None:
        """Wait until what is being saved may change."""
        self._is_copied.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if one is.

        Raises:
            CheckpointError: it could not be written; the same on every rank, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(failure)

    def forget(self) -> None:
        """Wait, and drop what belongs to the world that this process leaves.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        try:
            self.wait()
        except CheckpointError as error:
            if threading.current_thread() is threading.main_thread():
                raise
            _log.error(str(error))  # the process is ending: nobody could catch it
        finally:
            self._group = None
            self._copies = {}

    def report(self) -> None:
        """Say at the end of a process that did not ask what has become of the last checkpoint."""
        try:
            self.wait()
        except CheckpointError as error:
            _log.error(str(error))

    def _copy(self, key: TensorKey, part: Chunk) -> Chunk:
        """Return a copy in the host's memory; memory of the save before is used again."""
        value = part.tensor.detach()
        copy = self._copies.get(key)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self._copies[key] = torch.empty(value.shape, dtype=value.dtype)
        return Chunk(copy.copy_(value), part.box)

    def _write(self, writing: Writing, now: dict[TensorKey, Chunk], versions: dict[TensorKey, int]) -> None:
        fault = None
        try:
            later = {key: self._copy(key, writing.parts[key]) for key in versions}
            changed = next(
                (key for key, version in versions.items() if writing.parts[key].tensor._version != version), None
            )
            if changed is not None:
                fault = (
                    f"{flat_name(changed)} was changed while it was copied, and not by an optimizer's step: change it "
                    "at another time, or save without async_save"
                )
        finally:
            self._is_copied.set()
        try:
            writing.with_parts({key: later.get(key) or now[key] for key in writing.parts}).run(self._group, fault)
        except CheckpointError as error:
            self._failure = str(error)
        except (ParallelError, OSError, RuntimeError) as error:  # the group's: another rank has gone
            reason = (describe(error).splitlines() or [repr(error)])[0]
            self._failure = explain(writing.own.path, reason)


background = BackgroundWriter()
"""The one of this process."""
at_release(background.forget)
atexit.register(background.report)
