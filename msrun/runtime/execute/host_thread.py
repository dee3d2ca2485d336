"""The thread in which operators of the host run, one after the other, beside those of the device.

torch's operators do not hold the interpreter lock, so this thread and the caller's, for the device, compute at the same
time. What is not the thread's own work, such as messages to other ranks, stays with the caller: their order
must be the same on all ranks.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch._guards import active_fake_mode

from msrun.runtime.execute.transfers import TensorFuture


class HostTask:
    """Work of the host that may not be done yet."""

    def __init__(self, future: Future[Any], thread: HostThread) -> None:
        self._future = future
        self._thread = thread

    def wait(self) -> Any:
        """Return what the work gives, waiting for it; raises what it raised.

        In the thread itself nothing is waited for: work that began earlier is done, and its own results are there.
        """
        return None if self._thread.is_current else self._future.result()


class HostThread:
    """Runs work in order, in the caller's modes: gradients, inference, context variables. Begins at first use."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()

    @property
    def is_current(self) -> bool:
        """True in the thread."""
        return getattr(self._own, "is_here", False)

    def start(self, work: Callable[[], Any]) -> HostTask:
        """Have work done after all that was given before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "msrun-host")
        context = contextvars.copy_context()
        is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> Any:
            self._own.is_here = True
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                return context.run(work)

        future = self._pool.submit(run)
        if active_fake_mode() is not None and not self.is_current:  # one thread at a time may use such a mode
            futures.wait([future])
        return HostTask(future, self)


class GradientFromHost(TensorFuture):
    """A gradient that the host computes and copies to the device; there may be none."""

    def __init__(self, task: HostTask) -> None:
        self._task = task

    is_message = False

    def wait(self) -> Any:
        """Return the gradient, a tensor, or None."""
        found = self._task.wait()
        return found if found is None else found.wait()
