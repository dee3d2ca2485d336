"""What a device waits for, told to msrun: names for `--status` and for the report of a job that hangs.

On an accelerator a collective's `wait()` holds up the device's stream, not this process, which runs ahead until it
reads a value and then hangs there. So an event is recorded behind each wait, and a thread looks which of them the
device has not passed yet. Nothing is synchronised, and no tensor is kept.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from msrun.runtime import progress

LOOK_EVERY_S = 0.2
LONG_S = 1.0
"""How long the device waits before its wait has a name: what computes for long looks the same until then."""

_waits: SimpleQueue[tuple[str, Any]] = SimpleQueue()
_watcher: threading.Thread | None = None


def note_wait(name: str, device: torch.device) -> None:
    """Say that what the device computes next waits for a collective. Costs an event, and nothing outside msrun."""
    if progress.is_recorded():
        event = torch.Event(device)
        event.record()
        watch(name, event)


def watch(name: str, event: Any) -> None:
    """Tell msrun when the device does not pass an event for long.

    Args:
        event: has `query()`, which returns whether the device has passed it.
    """
    global _watcher
    _waits.put((name, event))
    if _watcher is None or not _watcher.is_alive():  # the first one, or in a forked child
        _watcher = threading.Thread(target=_look, name="msrun-device-waits", daemon=True)
        _watcher.start()


def _look() -> None:
    while True:
        name, event = _waits.get()
        begin = time.monotonic()
        while not event.query() and time.monotonic() - begin < LONG_S:
            time.sleep(LOOK_EVERY_S)
        if not event.query():
            with progress.waiting_in(partial("{}, on the device".format, name), is_traced=False):
                while not event.query():
                    time.sleep(LOOK_EVERY_S)
