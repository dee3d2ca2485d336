"""Processes that read and transform: torch's DataLoader, kept from epoch to epoch.

The keys of a step's samples say all about it, so they are what the DataLoader's sampler hands out, one set a step: any
number of workers gives the same steps, in the same order, and an epoch can begin anywhere.
"""

from __future__ import annotations

import ast
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver, parent_process
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from msrun.data import config
from msrun.data.order import Items
from msrun.data.source import ColumnChoice, MapStep, SampleSource, read_through
from msrun.errors import DataError, MsrunError, ParallelError, UsageError

_PRELOADED = ["torch.utils.data", "msrun.data.workers", "msrun.data.vision"]


@contextmanager
def starting_workers(reader: Any) -> Iterator[str]:
    """Yield the start method for workers that need `reader`; start them in the block."""
    method = config.get_multiprocessing_start_method()
    if method == "fork" or (method == "auto" and may_fork()):
        yield "fork"
        return
    needs = Needs(reader)
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


class Needs(pickle.Pickler):
    """What a process must get to read with a reader: found by pickling it, but for the bytes of arrays."""

    def __init__(self, reader: Any) -> None:
        super().__init__(SimpleNamespace(write=len))
        self.obstacle = ""
        """What a process cannot get that does not know the script."""
        self.is_of_script = False
        """The script has it, and a process that imports the script would get it."""
        self.modules: dict[str, None] = {}
        """Where functions and classes come from."""
        try:
            self.dump(reader)
        except Exception as error:  # noqa: BLE001 - pickling runs methods of the user's objects
            if not self.is_of_script:
                self.obstacle, self.modules = " ".join(str(error).split()) or type(error).__name__, {}

    def reducer_override(self, value: Any) -> Any:
        """Stop at functions and classes of the script; leave out arrays, and what only a starting process is sent."""
        is_array = isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
        if is_array or type(value).__module__.startswith("multiprocessing."):
            return int, ()
        if isinstance(value, FunctionType | type):
            if value.__module__ == "__main__" and "<" not in value.__qualname__:
                self.is_of_script, self.obstacle = True, f"{value.__qualname__}, which only the script has,"
                raise pickle.PicklingError(self.obstacle)
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


Column = torch.Tensor | np.ndarray
"""An array stays one where torch has no such type."""


@dataclass(frozen=True)
class Failure:
    """An error of msrun's in a worker, on its way to the process that trains."""

    kind: type[MsrunError]
    message: str
    where: str

    def error(self) -> MsrunError:
        """Return it again."""
        if issubclass(self.kind, ParallelError):
            return self.kind(self.message, where=self.where)
        return self.kind(self.message)


class StepReader(torch.utils.data.Dataset[Any]):
    """Reads what belongs to sample keys (k, 2): pass number, sample index.

    A dataset for torch's DataLoader, whose sampler gives the keys.
    """

    def __init__(self, source: SampleSource, steps: Sequence[MapStep | ColumnChoice], *, is_batched: bool) -> None:
        self._source = source
        self._steps = tuple(steps)
        self._is_batched = is_batched

    def __getitem__(self, sample_keys: np.ndarray) -> tuple[Column, ...] | Failure:
        if torch.utils.data.get_worker_info() is None:
            return self.read(sample_keys)
        try:
            columns = self.read(sample_keys)
            _share(columns)
            return columns
        except ParallelError as error:
            return Failure(type(error), error.message, error.where)
        except MsrunError as error:
            return Failure(type(error), str(error), "")

    def read(self, sample_keys: np.ndarray) -> tuple[Column, ...]:
        """Return the columns of the step."""
        columns = read_through(self._source, self._steps, sample_keys)
        if not self._is_batched:
            columns = [column[0] for column in columns]
        return tuple(_to_tensor(column) for column in columns)


def _share(columns: tuple[Column, ...]) -> None:
    """Move tensors to shared memory, as torch would later, in a thread whose errors nobody hears of."""
    try:
        for column in columns:
            if isinstance(column, torch.Tensor):
                column.share_memory_()
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise DataError(
            f"a data worker finds no shared memory for a step ({text}); give the container more (--shm-size), or use "
            "fewer num_parallel_workers, smaller batches or config.set_prefetch_size(1)"
        ) from error


def _to_tensor(column: np.ndarray) -> Column:
    native = np.require(column, column.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(native)
    except TypeError:
        return native


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
        """Yield the columns of each step. One epoch at a time: not before the iterator before is used up or closed."""
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
