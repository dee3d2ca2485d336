"""Plain torch programs: a worker that meets the others by torch's own means says so on the progress board.

So the agent knows who has joined the world and who has ended without: the others would wait for that one for ever. A
meeting of fewer ranks than the job has is the program's own affair.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from msrun import contract

RENDEZVOUS = "torch.distributed.rendezvous"
HANDLERS = "_rendezvous_handlers"
"""torch's private name: URL scheme -> what `init_process_group` and `init_rpc` meet by."""

Handler = Callable[..., Iterator[Any]]


def watch_joining() -> None:
    """Have this process say when it joins the world of its job; now, or when torch is imported."""
    if RENDEZVOUS in sys.modules:
        _watch(sys.modules[RENDEZVOUS])
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Sees the import of torch's rendezvous, once."""

    def find_spec(
        self,
        fullname: str,
        _path: Sequence[str] | None,
        _target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != RENDEZVOUS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                _watch(module)

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch(module: ModuleType) -> None:
    handlers: dict[str, Handler] = getattr(module, HANDLERS, {})
    for scheme, handler in list(handlers.items()):
        handlers[scheme] = _telling(handler)


def _telling(handler: Handler) -> Handler:
    def meet(url: str, *args: Any, **settings: Any) -> Iterator[Any]:
        given = parse_qs(urlsplit(url).query).get("world_size", [""])[0]
        size = os.environ.get(contract.WORLD_SIZE, "")
        if size and (given or size) == size:
            _tell()
        return handler(url, *args, **settings)

    return meet


def _tell() -> None:
    """Write the phase into this worker's record, unless the runtime keeps it."""
    with contextlib.suppress(OSError, KeyError, ValueError):  # the program has changed its variables
        begin = int(os.environ[contract.RANK]) * contract.PROGRESS_RECORD_BYTES
        board = os.open(os.environ[contract.MSRUN_PROGRESS], os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.pread(board, 8, begin) == struct.pack("=Q", contract.PHASE_UNKNOWN):
                os.pwrite(board, struct.pack("=Q", contract.PHASE_PLAIN_TORCH), begin)
        finally:
            os.close(board)
