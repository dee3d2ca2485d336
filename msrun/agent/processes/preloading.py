"""What the fork server imports before it forks, and what of that its workers are spared."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import weakref
from collections.abc import Iterator


def preload(names: list[str]) -> None:
    """Import each `module` or `module:name`; what fails is left to the worker, whose traceback is the right one."""
    for text in names:
        module_name, _, attribute = text.partition(":")
        try:
            module = importlib.import_module(module_name)
            if attribute and not hasattr(module, attribute):
                importlib.import_module(f"{module_name}.{attribute}")
        except Exception as error:  # noqa: BLE001 - any module may fail in any way at import
            print(f"preload {text}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201


def forget_finalizers() -> None:
    """Keep workers from running at their end what imports registered here (`weakref.finalize`).

    Torch alone registers thousands of them, only to take operators back from a process that ends anyway; in
    every worker they would touch, and so copy, 28 MB. What a worker registers itself still runs.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def fork_safety() -> tuple[str, str]:
    """Return ("fork", "") when this process may fork workers, else ("exec", why not)."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if threads > 1:
        return "exec", f"{threads - 1} threads were started by imports; a fork would copy none of them"
    for name in ("torch.cuda", "torch_npu.npu"):
        module = sys.modules.get(name)
        if module is not None and module.is_initialized():
            return "exec", f"{name} was initialised by imports; an accelerator cannot be used after a fork"
    return "fork", ""


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
