"""Processes that read and transform: torch's DataLoader, kept from epoch to epoch.

The keys of a step's samples say all about it, so they are what the DataLoader's sampler hands out, one set a step: any
number of workers gives the same steps, in the same order, and an epoch can begin anywhere.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import connection, parent_process
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from msrun.errors import DataError
from msrun.runtime.data import config
from msrun.runtime.data.order import Items
from msrun.runtime.data.reading import Column, Failure, StepReader
from msrun.runtime.data.start_method import starting_workers


class _EpochKeys:
    """The sampler: the keys of each step of the epoch that is read."""

    def __init__(self) -> None:
        self.items: Items = []

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class StepLoader:
    """A DataLoader over the steps of one epoch at a time.

    Args:
        num_workers: processes; 0 reads in this one.
        should_pin: steps come in pinned memory, from which copies to an accelerator do not wait.
    """

    def __init__(self, reader: StepReader, num_workers: int, *, should_pin: bool) -> None:
        self._reader = reader
        self._num_workers = num_workers
        self._should_pin = should_pin
        self._keys = _EpochKeys()
        self._loader: DataLoader[Any] | None = None
        self.is_busy = False

    def read(self, items: Items) -> Iterator[tuple[Column, ...]]:
        """Yield the columns of each step. One epoch at a time: not before the iterator before is used up or closed.

        Raises:
            DataError: a worker died.
            MsrunError: what reading a step raises, in a worker, too.
        """
        self.is_busy = True
        try:
            self._keys.items = items
            steps = self._start()
            while True:
                try:
                    step = next(steps)
                except StopIteration:
                    return
                except RuntimeError as error:
                    if "DataLoader worker" not in str(error):
                        raise
                    self._loader = None
                    raise DataError(_describe_death(str(error))) from None
                if isinstance(step, Failure):
                    raise step.error()
                yield tuple(step)
        finally:
            self.is_busy = False

    def _start(self) -> Iterator[Any]:
        if self._loader is not None or not self._num_workers:
            self._loader = self._loader or self._build()
            return iter(self._loader)
        with starting_workers(self._reader) as start_method:
            self._loader = self._build(
                num_workers=self._num_workers,
                prefetch_factor=config.get_prefetch_size(),
                persistent_workers=True,
                multiprocessing_context=start_method,
                worker_init_fn=_end_with_parent,
            )
            return iter(self._loader)

    def _build(self, **worker_settings: Any) -> DataLoader[Any]:
        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._keys,
            collate_fn=_as_it_is,
            pin_memory=self._should_pin,
            generator=torch.Generator(),  # else every epoch draws from the one that training draws from
            **worker_settings,
        )


def _as_it_is(step: Any) -> Any:
    return step


def _end_with_parent(_worker_id: int) -> None:
    """End this worker at once when the process that trains ends, in whatever way; torch looks every 5 s, and at the
    fork server instead where there is one.
    """
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def _describe_death(text: str) -> str:
    first = " ".join(text.split()).split(" Please ")[0].rstrip(".")
    if "shared memory" in text or "Bus error" in text:
        return f"{first}: give the container more of it (--shm-size), or use fewer num_parallel_workers"
    return f"{first}: it was killed, or ran out of memory; use fewer num_parallel_workers, and see its own words above"
