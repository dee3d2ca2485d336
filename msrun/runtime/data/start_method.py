"""How data workers are started: forked, or from a process of their own where forking is not safe.

A process that has threads (those of gloo, of a captured network, of an accelerator) may hold a lock in the moment of a
fork, for ever in the child. Its workers come from multiprocessing's fork server, a new process that has imported once
what they need. The script is not imported there, so that it needs no `if __name__ == "__main__":`, unless a function
that only the script has is to run in a worker, as with torch's own DataLoader.
"""

from __future__ import annotations

import ast
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from msrun.errors import UsageError
from msrun.runtime.data import config

_PRELOADED = ["torch.utils.data", "msrun.runtime.data.workers", "msrun.runtime.data.vision"]


@contextmanager
def starting_workers(reader: Any) -> Iterator[str]:
    """Yield the start method for workers that need `reader`; start them in the block.

    Raises:
        UsageError: part of `reader` can be sent to no worker; names it.
    """
    method = config.get_multiprocessing_start_method()
    if method == "fork" or (method == "auto" and may_fork()):
        yield "fork"
        return
    needs = find_needs(reader)
    if needs.obstacle and not (needs.is_of_script and script_can_be_imported()):
        why = "this process has threads or an accelerator" if method == "auto" else f"the start method is {method}"
        raise UsageError(
            f"num_parallel_workers: {needs.obstacle} cannot be sent to a worker process, and {why}, so that workers "
            "are not forked; define it in a module that the script imports"
            + (', or put the script\'s own calls below `if __name__ == "__main__":`' if needs.is_of_script else "")
        )
    if method != "spawn":
        method = "forkserver"
        _start_fork_server([*_PRELOADED, *needs.modules])
    if needs.obstacle:
        yield method
        return
    with _without_script():
        yield method


@dataclass
class Needs:
    """What a process that reads must get."""

    obstacle: str = ""
    """What a process cannot get that does not know the script."""
    is_of_script: bool = False
    """The script has it, and a process that imports the script would get it."""
    modules: list[str] = field(default_factory=list)
    """Where functions and classes come from."""


def find_needs(reader: Any) -> Needs:
    """Return what a process must have to read with `reader`."""
    pickler = _Probe(_Sink())
    try:
        pickler.dump(reader)
    except _OfScript as error:
        return Needs(str(error), is_of_script=True, modules=list(pickler.modules))
    except Exception as error:  # noqa: BLE001 - pickling runs methods of the user's objects
        return Needs(" ".join(str(error).split()) or type(error).__name__)
    return Needs(modules=list(pickler.modules))


def may_fork() -> bool:
    """Return whether this process has neither other threads nor an accelerator in use."""
    has_threads = len(list(Path("/proc/self/task").iterdir())) > 1
    return not has_threads and not (torch.accelerator.is_available() and _is_initialized())


def script_can_be_imported() -> bool:
    """Return whether importing the script does not run it: whether it looks at `__name__`."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        return False
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)


def _is_initialized() -> bool:
    device = torch.accelerator.current_accelerator()
    module = getattr(torch, device.type, None) if device is not None else None
    return module is None or not hasattr(module, "is_initialized") or module.is_initialized()


class _OfScript(Exception):
    """Something of the script's own."""


class _Sink:
    def write(self, content: Any) -> int:
        return len(content)


class _Probe(pickle.Pickler):
    """Finds what cannot be pickled, without the bytes of arrays."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.modules: dict[str, None] = {}

    def reducer_override(self, value: Any) -> Any:
        """Stop at functions and classes of the script; leave out arrays, and what only a starting process is sent."""
        is_array = isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
        if is_array or type(value).__module__.startswith("multiprocessing."):
            return int, ()
        if isinstance(value, FunctionType | type):
            if value.__module__ == "__main__" and "<" not in value.__qualname__:
                raise _OfScript(f"{value.__qualname__}, which only the script has,")
            self.modules[value.__module__] = None
        return NotImplemented


def _start_fork_server(modules: list[str]) -> None:
    """Start this process's fork server, unless it runs, with what workers need imported once for all of them."""
    forkserver.set_forkserver_preload(modules)
    # Python 3.11 and 3.12 do not tell it where modules are; and it must not look into the working directory first.
    needed = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in needed}
    os.environ.update(needed)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@contextmanager
def _without_script() -> Iterator[None]:
    """Let processes start that do not import the script."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
