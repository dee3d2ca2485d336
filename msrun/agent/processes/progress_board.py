"""The progress board: what every worker says of itself, in a file that each of them maps or writes.

A worker with the runtime writes its own record with plain stores (layout: `msrun.contract`); a reader may see one
between two stores. Readers map nothing: a page of a file that a worker has cut off would be SIGBUS. A worker of plain
torch tells that it joins the world of its job, and, when the job hangs, what torch's flight recorder has of its
collectives. A thread waits for that wish at a pipe: the main thread is in a collective then, and answers nobody."""

from __future__ import annotations

import _thread
import contextlib
import importlib.util
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from msrun import contract
from msrun.agent.own_file import create_own_file, read_from
from msrun.planning.record import Record

PROGRESS_BOARD = "progress"  # file in the job's run_dir


class Progress(Record):
    """One worker's record. Moments are seconds of CLOCK_MONOTONIC."""

    phase: int = contract.PHASE_UNKNOWN
    steps: int = 0  # training steps begun
    step_at: float = 0.0
    loss: float = math.nan
    collectives: int = 0  # collectives begun
    is_waiting: bool = False
    waiting_since: float = 0.0
    total: int = 0  # steps that the program means to do in all; 0 when it has not said
    rate_steps: int = 0  # steps begun at `rate_at`
    rate_at: float = 0.0
    name: str = ""  # the newest collective in words; of a worker that lingers, what it waits for
    ended_at: float = 0.0  # when its program ended, of a worker that lingers: negative when it has failed; else 0

    @property
    def is_reported(self) -> bool:
        """Whether the worker says what it does: it uses the runtime."""
        return self.phase not in (contract.PHASE_UNKNOWN, contract.PHASE_PLAIN_TORCH)

    @property
    def has_come(self) -> bool:
        return self.phase != contract.PHASE_UNKNOWN

    @property
    def is_past_first_step(self) -> bool:
        """Whether it has begun a second step: in the first one networks are captured."""
        return self.steps > (self.rate_steps if self.rate_at else 1)

    def steps_per_s(self, now: float) -> float | None:
        """Return the speed over the last seconds; None before the second step. It falls while a step is overdue."""
        span_s = self.step_at - self.rate_at
        if not self.rate_at or span_s <= 0 or self.steps <= self.rate_steps:
            return None
        return (self.steps - self.rate_steps) / max(span_s, now - self.step_at)

    def describe(self, now: float) -> str:
        """Return what the worker is doing, e.g. "step 41, waits in all_reduce of 8 ranks for 3.2 s"."""
        if self.ended_at:
            return f"its program has ended, its process waits for {self.name} for {now - abs(self.ended_at):.0f} s"
        if not self.is_reported and not self.steps:
            return ""
        step = f"step {self.steps}" if self.steps else "before its first step"
        if self.phase == contract.PHASE_JOINING:
            return f"waits for the others in init() for {now - self.waiting_since:.1f} s"
        if self.phase == contract.PHASE_LEFT:
            return f"{step}, has left the world"
        if self.is_waiting:
            return f"{step}, waits in {self.name or 'a collective'} for {now - self.waiting_since:.1f} s"
        return step


class ProgressBoard:
    """The records of all workers of one host's job. Closed by its owner."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._path = path
        self._size_bytes = world_size * contract.PROGRESS_RECORD_BYTES
        self._descriptor = -1

    def create(self) -> None:
        """Make the file, empty. Raises OSError: it exists already, or cannot be made."""
        descriptor = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, contract.FILE_MODE
        )
        try:
            os.posix_fallocate(descriptor, 0, self._size_bytes)  # on a full disk an error now, not a worker's SIGBUS
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def read(self, global_rank: int) -> Progress:
        size_bytes = contract.PROGRESS_RECORD_BYTES
        with contextlib.suppress(OSError):  # not made yet, or the disk is gone
            return parse_record(os.pread(self._descriptor, size_bytes, global_rank * size_bytes), 0)
        return Progress()

    def records(self, global_ranks: Iterable[int]) -> dict[int, Progress]:
        return {rank: self.read(rank) for rank in global_ranks}

    def reset(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # the disk is full, and a worker had made the file shorter
                os.posix_fallocate(self._descriptor, 0, self._size_bytes)
                os.pwrite(self._descriptor, bytes(self._size_bytes), 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_record(path: Path, global_rank: int) -> Progress:
    """Return one worker's record as it stands now; an empty one when there is no board."""
    size_bytes = contract.PROGRESS_RECORD_BYTES
    return parse_record(read_from(path, global_rank * size_bytes, size_bytes), 0)


def parse_record(board: bytes, global_rank: int) -> Progress:
    """Return one record out of a board's bytes, its text as one printable line; an empty one where there is none."""
    begin = global_rank * contract.PROGRESS_RECORD_BYTES
    if len(board) < begin + contract.PROGRESS_RECORD_BYTES:
        return Progress()
    *numbers, name, ended_at = struct.unpack_from(contract.PROGRESS_RECORD, board, begin)
    text = name.split(b"\0", 1)[0].decode("utf-8", "replace")
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    record = Progress(*[*numbers, text, ended_at])
    loss = record.loss if record.steps > 0 else math.nan  # also told by a loop without the runtime's world
    return replace(record, loss=loss, is_waiting=bool(record.is_waiting))


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
HANDLERS = "_rendezvous_handlers"  # torch's private name: URL scheme -> what a world meets by

Handler = Callable[..., Iterator[Any]]


def watch_joining() -> None:
    """Have this process say when it joins the world of its job; now, or when torch is imported."""
    if RENDEZVOUS in sys.modules:
        _watch(sys.modules[RENDEZVOUS])
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport:
    """Sees the import of torch's rendezvous, once."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
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
