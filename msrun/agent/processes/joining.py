"""What a worker of plain torch tells of itself: that it joins the world of its job, and, when the job hangs, what
torch's flight recorder has of its collectives. A thread waits for that wish at a pipe: the main thread is in a
collective then, and answers nobody."""

from __future__ import annotations

import _thread
import contextlib
import importlib.util
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from msrun import contract
from msrun.agent.own_file import create_own_file


def write_own_record(offset: int, data: bytes, instead_of: bytes = b"") -> None:
    """Write into this worker's record on the progress board. `instead_of`: if that is there; empty = whatever is."""
    with contextlib.suppress(OSError, KeyError, ValueError):  # the program has changed its variables
        begin = int(os.environ[contract.RANK]) * contract.PROGRESS_RECORD_BYTES + offset
        board = os.open(os.environ[contract.MSRUN_PROGRESS], os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.pread(board, len(instead_of), begin) == instead_of:
                os.pwrite(board, data, begin)
        finally:
            os.close(board)


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
            write_own_record(
                0, struct.pack("=Q", contract.PHASE_PLAIN_TORCH), struct.pack("=Q", contract.PHASE_UNKNOWN)
            )
            watch_flight_recorder()
        return handler(url, *args, **settings)

    return meet


_begun: set[int] = set()  # processes that have the thread: a fork has none


def watch_flight_recorder() -> None:
    """Begin to wait, once, in a worker of a job that asks for dumps."""
    prefix, rank = os.environ.get(contract.MSRUN_FLIGHT_RECORDER), os.environ.get(contract.RANK, "")
    if not prefix or not rank.isdigit() or os.getpid() in _begun:
        return
    _begun.add(os.getpid())
    pipe = contract.flight_recorder_pipe(prefix, int(rank))
    dump = Path(os.environ[contract.MSRUN_LOG_DIR], contract.flight_recorder_name(int(rank)))
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):  # of an earlier attempt
            os.mkfifo(pipe, contract.FILE_MODE)
        _thread.start_new_thread(_serve, (os.open(pipe, os.O_RDWR | os.O_CLOEXEC), dump))


def _serve(pipe: int, path: Path) -> None:
    with contextlib.suppress(Exception):  # this thread belongs to nobody: the script goes on without dumps
        while os.read(pipe, 1):
            data = _dump()
            with os.fdopen(create_own_file(path), "wb") as file:
                file.write(data)


def _dump() -> bytes:
    """Return torch's record of the collectives of this process, as JSON; that of NCCL where the world uses it."""
    c10d, torch_distributed = sys.modules["torch._C._distributed_c10d"], sys.modules["torch.distributed"]
    uses_nccl = torch_distributed.is_initialized() and "nccl" in torch_distributed.get_backend()
    data: bytes = c10d._dump_nccl_trace_json() if uses_nccl else c10d._dump_fr_trace_json()
    return data


def request_dumps(prefix: str, pids: Mapping[int, int]) -> None:
    """Ask workers for their dumps; those that have joined no world of torch do not answer. `pids`: by global rank."""
    for rank in pids:
        with contextlib.suppress(OSError):
            pipe = os.open(contract.flight_recorder_pipe(prefix, rank), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(pipe, b"1")
            os.close(pipe)
