"""What torch's flight recorder has of a worker's collectives, written when the job hangs.

A thread waits at a pipe: the main thread is in a collective then, and answers nobody. Dumps are torch's own, as JSON.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from msrun import contract
from msrun.agent.logs.own_file import create_own_file

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
    """Return torch's record of the collectives of this process; that of NCCL where the world uses it."""
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
