"""torch's `Work` on operations of a group, and how operations move on.

Starting an operation writes this rank's part as far as there are free slots, and announces it. Whoever waits moves all
operations of this process on, in every group, so that no rank waits for another's part of an operation that the other
has started; when nothing moves it sleeps on the word that the rank it waits for will count in.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import CollectiveError
from msrun.runtime.progress import waiting_in

_ProcessGroup: Any = dist.ProcessGroup
"""torch declares forms of its methods that only its own classes have."""

_UNSET = timedelta(0)
"""torch's options have a negative time-out where none is given."""


class TorchGroup(_ProcessGroup):
    """A group of ranks whose tensors are on the CPU."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout_s = timeout.total_seconds()
        self._coalesced: list[Any] | None = None

    group_name = group_desc = ""
    """What torch calls and says of the group."""
    supports_splitting = False
    """torch makes sub-groups as new ones."""
    _device_types = (torch.device("cpu"),)

    def name(self) -> str:
        return "shm"

    getBackendName = name  # noqa: N815 - torch's name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self.group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self.group_name = name

    _set_group_name = setGroupName

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text

    def _get_backend(self, device: torch.device) -> TorchGroup:  # noqa: ARG002 - torch's form
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _work(
        self, line: Any, made: Sequence[Any], values: Sequence[Value], opts: Any, then: Callable[[], None] | None = None
    ) -> ShmWork:
        """Return what torch waits for, as long as its options say; when it is done, `then` is called, and copies are
        written back."""
        given = getattr(opts, "timeout", None)
        most_s = given.total_seconds() if given is not None and given > _UNSET else self._timeout_s
        copied = [value for value in values if value.is_copy]
        finish = partial(_finish, then, copied) if copied or then is not None else None
        work = ShmWork(line, made, [value.tensor for value in values], most_s, finish)
        self._note(work)
        return work

    def _note(self, work: Any) -> None:
        if self._coalesced is not None:
            self._coalesced.append(work)

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002 - torch's form
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:  # noqa: ARG002 - torch's form
        works, self._coalesced = self._coalesced or [], None
        return Works(works)


_OLD_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
"""What torch before 2.13 calls, and what it is called now."""


for _old, _new in _OLD_NAMES.items():
    setattr(TorchGroup, _old, lambda group, *words, _name=_new: getattr(group, _name)(*words))


def _finish(then: Callable[[], None] | None, copied: Sequence[Value]) -> None:
    if then is not None:
        then()
    for value in copied:
        value.write_back()


class Works(dist.Work):
    """Several works, waited for together; then copies are written back."""

    def __init__(self, works: Sequence[Any], copied: Sequence[Value] = ()) -> None:
        super().__init__()
        self._works, self._copied = works, copied

    def _write_back(self) -> bool:
        copied, self._copied = self._copied, ()
        _finish(None, copied)
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        words = () if timeout is None else (timeout,)
        return all(work.wait(*words) for work in self._works) and self._write_back()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works) and self._write_back()


class Value:
    """A tensor of the caller's, flat: the tensor's own memory where it lies in a row, else a copy.

    Args:
        reads, writes: whether the operation needs what is there, and whether it leaves something there.
    """

    def __init__(self, tensor: Tensor, *, reads: bool = True, writes: bool = True) -> None:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            what = str(tensor.layout).removeprefix("torch.") if tensor.is_cpu else tensor.device
            raise ValueError(f"the backend shm carries dense tensors of the CPU, not {what}: use gloo or nccl for them")
        self.tensor = tensor
        if torch.is_inference_mode_enabled() or tensor.is_inference():
            with torch.inference_mode(mode=False):  # the operation may end outside it
                self._set(_alias(tensor), reads, writes)
        else:
            self._set(tensor.detach(), reads, writes)

    def _set(self, plain: Tensor, reads: bool, writes: bool) -> None:
        self.is_copy = False
        if not plain.is_contiguous():
            self.is_copy = writes
            plain = plain.contiguous() if reads else torch.empty(plain.shape, dtype=plain.dtype)
        self.flat = plain if plain.dim() == 1 else plain.view(-1)

    @property
    def bytes(self) -> Tensor:
        """Its memory."""
        row = self.flat.as_strided(self.flat.shape, (1,))  # one number lies in a row whatever its stride
        return row.view(torch.uint8) if row.dtype != torch.uint8 else row

    def write_back(self) -> None:
        """Copy what has come to where the caller's tensor lies."""
        with torch.inference_mode(self.tensor.is_inference()):
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory that is none of inference mode, if that is off."""
    if not tensor.is_inference():
        return tensor.detach()
    place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(*place)


def listed(tensors: Any) -> list[Tensor]:
    """Return tensors that torch gives as one or as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


_LOOK_EVERY_S = 0.2
"""How often a rank that sleeps looks whether the others are alive."""
_MOVE_EVERY_S = 0.001
"""The same where it has other operations to move on meanwhile."""
_SOON_S = 0.005
"""A wait that is over by then is not worth a note."""
_STILL_S = 0.02
"""How long operations may stand still while nobody waits for one."""
_REST_AFTER = 50
"""Looks without any operation after which the thread rests."""
lock = threading.RLock()
_moving: dict[Line, None] = {}
"""The lines that hold operations which are not done."""


Operation = Any
"""What a `Work` waits for: `is_done` says whether this rank's part is over, `describe()` what to call it."""


class Line(ABC):
    """Operations of one group that move on in some order."""

    def __init__(self) -> None:
        self.error: CollectiveError | None = None
        """Why nothing moves any more."""
        self.blocked_on = 0, 0
        """After `advance`, if operations are left: the word that counts when more can be done, and its value then."""

    @abstractmethod
    def add(self, operation: Any) -> None:
        """Put an operation at the end."""

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done now; return whether operations are left."""

    @abstractmethod
    def sleep(self, word: int, seen: int, most_s: float) -> None:
        """Sleep until the word has another value."""

    @abstractmethod
    def late_ranks(self) -> list[str]:
        """Return whom the first operation waits for."""

    @abstractmethod
    def check(self, operation: Any) -> None:
        """Raise if the operation can never end."""


def move(line: Line) -> None:
    """Move a line on, and note whether there is more to do."""
    if line.advance():
        _moving[line] = None
    else:
        _moving.pop(line, None)


def start(line: Line, operations: Sequence[Any]) -> None:
    """Add operations to a line and begin with them."""
    with lock:
        for operation in operations:
            line.add(operation)
        move(line)
        if line in _moving:
            _background.have_awake()


def forget(line: Line) -> None:
    """Move a line on no more."""
    with lock:
        _moving.pop(line, None)


def wait_for(line: Line, operation: Operation, most_s: float) -> bool:
    """Move everything on until an operation is done; return False when the time is over."""
    with lock:
        _background.spared += 1
    try:
        end = time.monotonic() + most_s
        if _wait_until(line, operation, min(end, time.monotonic() + _SOON_S)):
            return True
        with waiting_in(operation.describe):
            return _wait_until(line, operation, end)
    finally:
        with lock:
            _background.spared -= 1


def _wait_until(line: Line, operation: Operation, end: float) -> bool:
    now = time.monotonic()
    look_at = now + _LOOK_EVERY_S
    is_new = len(_moving) == 1
    """Nothing has happened yet since the operation began, or since the last look."""
    while True:
        with lock:
            if not is_new:
                for other in [line, *_moving]:
                    move(other)
            if operation.is_done:
                return True
            if line.error is not None:
                raise line.error
            word, seen = line.blocked_on
            most_s = _LOOK_EVERY_S if len(_moving) == 1 else _MOVE_EVERY_S
        is_new = False
        line.sleep(word, seen, min(max(end - now, 0), most_s))
        now = time.monotonic()
        if now >= look_at:
            line.check(operation)
            look_at = now + _LOOK_EVERY_S
        if now >= end:
            with lock:
                move(line)
            return operation.is_done


class _Background:
    """The thread that moves operations on while this process does something else; started when one is left."""

    def __init__(self) -> None:
        self.spared = 0
        """Threads that wait for an operation, and move all on themselves."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_resting = self._is_over = False

    def have_awake(self) -> None:
        """Begin to look, or go on."""
        if self._thread is None and not self._is_over:
            self._thread = threading.Thread(target=self._run, name="msrun-shm", daemon=True)
            self._thread.start()
            atexit.register(self._end)  # a thread in torch's code must not see the end of the interpreter
        elif self._is_resting:
            self._is_resting = False
            self._wake.set()

    def forget(self) -> None:
        """Begin anew in a forked child, which has no such thread."""
        self._thread, self.spared, self._is_resting = None, 0, False
        _moving.clear()
        lock.release()

    def _end(self) -> None:
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_LOOK_EVERY_S)

    def _run(self) -> None:
        idle, pause = 0, _STILL_S
        while not self._is_over:
            self._wake.wait(None if self._is_resting else pause)
            self._wake.clear()
            with lock:
                idle = 0 if _moving else idle + 1
                self._is_resting = idle > _REST_AFTER
            if not self.spared:
                pause = _MOVE_EVERY_S if self._move() else _STILL_S

    def _move(self) -> bool:
        """Move everything on; return whether something moved."""
        with lock:
            before = [line.blocked_on for line in _moving]
            for line in list(_moving):
                with suppress(Exception):  # whoever waits is told
                    move(line)
            return before != [line.blocked_on for line in _moving]


_background = _Background()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=_background.forget)


class ShmWork(dist.Work):
    """What torch waits for: some operations of one line."""

    def __init__(
        self,
        line: Any,
        operations: Sequence[Any],
        results: list[Tensor],
        most_s: float,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            finish: called once when all are done.
        """
        super().__init__()
        self._line, self._operations, self._results = line, operations, results
        self._most_s, self._finish = most_s, finish
        self._error: RuntimeError | None = None
        """Why it can never be done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        given = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        most_s = self._most_s if given is None else given
        for operation in self._operations:
            if operation.is_done:
                continue
            try:
                is_done = wait_for(self._line, operation, most_s)
            except RuntimeError as error:
                self._error = error
                raise
            if not is_done:
                raise CollectiveError(self._describe_time_out(operation, most_s))
        self._close()
        return True

    def _describe_time_out(self, operation: Operation, most_s: float) -> str:
        late = ", ".join(self._line.late_ranks())
        return f"{operation.describe()}: Timed out after {most_s:g} s, waits for {late or 'the other end'}"

    def _close(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        with lock:
            move(self._line)
        done = all(operation.is_done for operation in self._operations)
        if done:
            self._close()
        return done or self._error is not None

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def _source_rank(self) -> int:
        return int(self._operations[0].source)
