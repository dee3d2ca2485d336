"""Writing beside the training: a copy of what is to be written, one thread, a group of its own for its messages.

The copy is complete before the training goes on, as `torch.distributed.checkpoint.async_save` stages it: nothing tells
us of every write that may follow (those through `.data` leave no mark on a tensor).
"""

from __future__ import annotations

import atexit
import logging
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import CheckpointError, ParallelError
from msrun.runtime.agreement import describe
from msrun.runtime.checkpoint.tensor_key import TensorKey
from msrun.runtime.checkpoint.writing import Writing, explain
from msrun.runtime.parallel.parameters.network_state import Chunk
from msrun.runtime.world import at_release

_TIMEOUT_S = 86400.0
"""A rank that died ends its connections, so only a slow disk is ever waited for."""
_log = logging.getLogger("msrun.runtime")


class BackgroundWriter:
    """Writes one checkpoint at a time. Its messages go over a gloo group that nothing else uses."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._copies: dict[TensorKey, Tensor] = {}

    def start(self, writing: Writing) -> None:
        """Copy it, and write the copy while the training goes on. All ranks call it together, after `wait`."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        copied = writing.with_parts({key: self._copy(key, part) for key, part in writing.parts.items()})
        # Not a daemon: the end of the process waits for it.
        self._thread = threading.Thread(target=self._write, args=(copied,), name="msrun-checkpoint")
        self._thread.start()

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
            copy = self._copies[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return Chunk(copy.copy_(value), part.box)

    def _write(self, writing: Writing) -> None:
        try:
            writing.run(self._group)
        except CheckpointError as error:
            self._failure = str(error)
        except (ParallelError, OSError, RuntimeError) as error:  # the group's: another rank has gone
            reason = (describe(error).splitlines() or [repr(error)])[0]
            self._failure = explain(writing.own.path, reason)


background = BackgroundWriter()
"""The one of this process."""
at_release(background.forget)
atexit.register(background.report)
