"""Who is told of every moment of a job, and what msrun's own code gets wrong meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from msrun import contract
from msrun.agent.own_file import append_text
from msrun.cluster.membership import Membership
from msrun.cluster.messages import describe_fault, name_fault, traceback_of
from msrun.errors import ClusterError, MsrunError


def append_fault(path: Path, what: str, trace: str) -> bool:
    """Append `what`, a line, and its traceback to `scheduler.log`; False when it cannot be written."""
    return append_text(path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n{trace.rstrip()}\n", os.O_CREAT)


class OwnFaults:
    """Any thread may call. As a context, it also hears of every thread of this process that ends with an exception."""

    def __init__(self, folder: str | Path, say: Callable[[str], None], *, found_in: str) -> None:
        """`found_in`: the folder where the user finds scheduler.log; empty: he is told the traceback itself."""
        self._path = Path(folder, contract.SCHEDULER_LOG)
        self._found_in = found_in
        self._say = say
        self._told: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()
        self._hook_before: Callable[[Any], object] | None = None

    def __enter__(self) -> None:
        self._hook_before, threading.excepthook = threading.excepthook, self._on_thread

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        assert self._hook_before is not None
        threading.excepthook = self._hook_before

    @contextlib.contextmanager
    def kept_from_job(self, what: str) -> Iterator[None]:
        """Let the job go on when this raises; one of a kind is told once. `what`: as in "display (Console)"."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the job does not need it
            self._warn(what, error)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Make an error that msrun does not raise on purpose a ClusterError that names msrun."""
        try:
            yield
        except MsrunError:
            raise
        except Exception as error:
            raise self.end_of_job(error) from error

    def end_of_job(self, error: Exception) -> ClusterError:
        """Write an error down that ends the job, and return what it ends with."""
        _, where = self._write("supervision", error)
        return ClusterError(describe_fault(error, f"{where}; report it"))

    def _on_thread(self, args: Any) -> None:
        if args.exc_value is not None:
            self._warn(f"thread {args.thread.name if args.thread else '(unknown)'}", args.exc_value)

    def _warn(self, what: str, error: BaseException) -> None:
        is_new, where = self._write(what, error)
        if is_new:
            with contextlib.suppress(Exception):  # what says it may be what has failed
                self._say(f"warning: msrun's own {what} failed: {name_fault(error)}; the job is not affected, {where}")

    def _write(self, what: str, error: BaseException) -> tuple[bool, str]:
        import traceback  # not where all is well

        place = traceback.extract_tb(error.__traceback__)[-1:]
        kind = (what, type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in place))
        with self._lock:
            is_new = kind not in self._told
            self._told.add(kind)
        if not is_new:
            return False, f"see {self._path.name}"
        text, thread = traceback_of(error), threading.current_thread().name
        is_written = append_fault(self._path, f"msrun's own {what} failed (thread {thread}):", text)
        if is_written and self._found_in:
            return True, f"traceback in {self._found_in}/{self._path.name}"
        return True, f"traceback:\n{text.rstrip()}"


class Observer:
    """Told of every moment of the job. What it raises is written down, and is no reason to end the job."""

    tick_s: float | None = None  # ask for `tick` this often while the job runs; None = never

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something happened; `cluster.protocol.MOMENTS` has the kinds and their fields."""

    def tick(self, membership: Membership) -> None:
        """Regular moment, if asked for."""


class Observers:
    """All observers of one job: each hears of everything, whatever becomes of the others."""

    def __init__(self, observers: Sequence[Observer], faults: OwnFaults) -> None:
        self._observers = list(observers)
        self._faults = faults

    def add(self, observers: Sequence[Observer]) -> None:
        self._observers += observers

    @property
    def tick_s(self) -> float | None:
        return min((o.tick_s for o in self._observers if o.tick_s is not None), default=None)

    def tell(self, kind: str, **fields: Any) -> None:
        for observer in self._observers:
            with self._faults.kept_from_job(f"display ({type(observer).__name__})"):
                observer.note(kind, fields)

    def tick(self, membership: Membership) -> None:
        for observer in self._observers:
            if observer.tick_s is not None:
                with self._faults.kept_from_job(f"display ({type(observer).__name__})"):
                    observer.tick(membership)
