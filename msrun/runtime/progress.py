"""What this worker tells its agent of its progress: steps, the newest loss, the collective that it waits in.

It is written into the job's progress board (layout in `msrun.contract`) with plain stores: no system call, no lock, no
thread. `msrun --status` shows it, `--hang_time_out` judges by it, and failure reports say what every rank was doing.
Without msrun there is no board, and nothing happens here.
"""

from __future__ import annotations

import faulthandler
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from msrun import contract
from msrun.runtime.trace import TraceFile

_PHASE, _STEPS, _STEP_AT, _LOSS, _COLLECTIVES, _IS_WAITING, _WAITING_SINCE, _TOTAL, _RATE_STEPS, _RATE_AT = range(10)
_NAME_BEGIN = contract.PROGRESS_RECORD_BYTES - contract.PROGRESS_NAME_BYTES - 8
RATE_S = 5.0
"""Steps per second are taken over one to two of these."""


class ProgressRecord:
    """This worker's record on the board."""

    def __init__(self, path: str, global_rank: int) -> None:
        begin = global_rank * contract.PROGRESS_RECORD_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            whole = memoryview(mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)
        if len(whole) < begin + contract.PROGRESS_RECORD_BYTES:
            raise ValueError(f"{path} has no record of rank {global_rank}")
        self._counts = whole[begin : begin + _NAME_BEGIN].cast("Q")
        self._numbers = whole[begin : begin + _NAME_BEGIN].cast("d")
        self._name = whole[begin + _NAME_BEGIN :][: contract.PROGRESS_NAME_BYTES]
        self._is_counted_by_caller = False
        self._numbers[_LOSS] = math.nan
        self._mark: tuple[int, float] | None = None
        """Steps and moment from which the next steps per second are taken."""

    def enter_phase(self, phase: int) -> None:
        """Say where in its life the worker is; joining counts as waiting."""
        self._numbers[_WAITING_SINCE] = time.monotonic()
        self._counts[_IS_WAITING] = int(phase == contract.PHASE_JOINING)
        self._counts[_PHASE] = phase

    def begin_step(self, step: int | None = None) -> None:
        """Count a step, or take the caller's own number from now on."""
        if step is not None:
            self._is_counted_by_caller = True
            self._counts[_STEPS] = step
        elif not self._is_counted_by_caller:
            self._counts[_STEPS] += 1
        now = time.monotonic()
        self._note_rate(self._counts[_STEPS], now)
        self._numbers[_STEP_AT] = now

    def _note_rate(self, steps: int, now: float) -> None:
        if self._mark is None or steps < self._mark[0]:  # the first one, or a new count
            self._mark = steps, now
            self._counts[_RATE_STEPS], self._numbers[_RATE_AT] = steps, now
        elif now - self._mark[1] >= RATE_S:
            self._counts[_RATE_STEPS], self._numbers[_RATE_AT] = self._mark
            self._mark = steps, now

    def begin_run(self, steps_done: int, total: int) -> None:
        """Begin to count at `steps_done`, of `total` steps; 0 = nobody knows how many there are."""
        self._is_counted_by_caller = False
        self._mark = None
        self._counts[_STEPS] = self._counts[_RATE_STEPS] = steps_done
        self._numbers[_RATE_AT] = time.monotonic()
        self._counts[_TOTAL] = total

    def note_total(self, total: int) -> None:
        """Say how many steps there are."""
        self._counts[_TOTAL] = total

    def note_loss(self, loss: float) -> None:
        """Say the newest loss."""
        self._numbers[_LOSS] = loss

    def begin_collective(self) -> None:
        """Count a collective."""
        self._counts[_COLLECTIVES] += 1

    @property
    def steps(self) -> int:
        """Steps begun."""
        return self._counts[_STEPS]

    @property
    def is_waiting(self) -> bool:
        """Whether it has said that it waits."""
        return bool(self._counts[_IS_WAITING])

    def begin_wait(self, name: str) -> None:
        """Say that the worker waits in a collective."""
        text = name.encode()[: contract.PROGRESS_NAME_BYTES - 1]
        self._name[:] = text.ljust(contract.PROGRESS_NAME_BYTES, b"\0")
        self._numbers[_WAITING_SINCE] = time.monotonic()
        self._counts[_IS_WAITING] = 1

    def end_wait(self) -> None:
        """Say that it goes on."""
        self._counts[_IS_WAITING] = 0


_record: ProgressRecord | None = None
_trace: TraceFile | None = None
_is_looked_for = False


def open_record(global_rank: int) -> None:
    """Find this worker's record, if msrun started it, and answer msrun's wish for stacks."""
    global _record, _trace, _is_looked_for
    _is_looked_for = True
    path = os.environ.get(contract.MSRUN_PROGRESS)
    if path:
        with suppress(OSError, ValueError):  # started by hand in what a job has left in the environment
            _record = ProgressRecord(path, global_rank)
    folder = os.environ.get(contract.MSRUN_TRACE_DIR)
    if folder and _trace is None:
        with suppress(OSError, ValueError):
            _trace = TraceFile(folder, global_rank)
    stack_signal = os.environ.get(contract.MSRUN_STACK_SIGNAL, "")
    if stack_signal.isdigit():
        with suppress(OSError, ValueError, RuntimeError):  # stderr may be no file
            faulthandler.register(int(stack_signal), file=sys.__stderr__ or 2, all_threads=True)


def enter_phase(phase: int) -> None:
    """Say where in its life this worker is."""
    if _record is not None:
        _record.enter_phase(phase)


def report_progress(step: int | None = None, loss: float | None = None, total: int | None = None) -> None:
    """Tell msrun that a training step begins; for loops that use neither `AutoParallel` nor `Model`.

    Needs no `init()`, and neither imports torch nor joins anything.

    Args:
        step: its number; None counts on by one.
        loss: the newest loss, for `msrun --status`.
        total: number of the last step, for the time that is left.
    """
    record = _find_record()
    if record is not None:
        record.begin_step(step)
        _trace_step(record)
        if loss is not None:
            record.note_loss(float(loss))
        if total is not None:
            record.note_total(total)


def _find_record() -> ProgressRecord | None:
    """Return this worker's record, also when it has not called `init()`."""
    if not _is_looked_for and os.environ.get(contract.RANK, "").isdigit():
        open_record(int(os.environ[contract.RANK]))
    return _record


def begin_run(steps_done: int, total: int) -> None:
    """Begin to count steps at `steps_done`, of `total`; 0 = nobody knows how many there are."""
    record = _find_record()
    if record is not None:
        record.begin_run(steps_done, total)


def begin_step() -> None:
    """Count a training step."""
    record = _find_record()
    if record is not None:
        record.begin_step()
        _trace_step(record)


def _trace_step(record: ProgressRecord) -> None:
    if _trace is not None:
        _trace.begin_step(record.steps)


def note_loss(loss: float) -> None:
    """Say the newest loss."""
    if _record is not None:
        _record.note_loss(loss)


def begin_collective() -> None:
    """Count a collective."""
    if _record is not None:
        _record.begin_collective()


def is_recorded() -> bool:
    """Return whether anybody looks at what this worker waits for."""
    return _record is not None


@contextmanager
def waiting_in(describe: Callable[[], str], *, is_traced: bool = True) -> Iterator[None]:
    """Say that this worker waits in a collective for as long as the context lasts; in one that lasts, nothing new.

    Args:
        is_traced: False in another thread than the one that trains, whose waits the trace holds.
    """
    if _record is None or _record.is_waiting:
        yield
        return
    name, begin = describe(), time.monotonic()
    _record.begin_wait(name)
    try:
        yield
    finally:
        _record.end_wait()
        if _trace is not None and is_traced:
            _trace.add_wait(name, begin)
