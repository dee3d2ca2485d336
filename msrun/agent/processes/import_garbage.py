"""Importing without looking for garbage: what is imported stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in this block, and never look at what it made; afterwards collect as before.

    Importing torch makes half a million objects that stay and hardly any garbage; to find that out, again and again,
    takes a quarter of its processor time. A worker that looked at them would also copy the pages that they are in.
    Modules that set thresholds themselves, or turn the collector off, keep what they set.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*thresholds)
