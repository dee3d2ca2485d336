"""Numbers of a training run, step by step: as CSV, as JSON lines, for TensorBoard.

A restarted or resumed run adds to what is there: every row tells its attempt, nothing is overwritten.
"""

from __future__ import annotations

import atexit
import csv
import io
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch.distributed as dist

from msrun import contract
from msrun.errors import ParallelError
from msrun.runtime import world
from msrun.train.callbacks import Callback
from msrun.train.run_context import RunContext

_ALWAYS = ("time", "attempt", "step")
"""Columns that every row begins with."""


class MetricsLogger(Callback, ABC):
    """Base of the loggers: a callback of `Model.train`, and an object with `log_metrics` for a loop of your own.

    As a callback it logs loss, epoch, learning_rate and steps_per_s. To log to another place, override `write` and,
    if something stays open, `close`.

    Args:
        every: log every so many steps of `Model.train`.
        all_ranks: every rank logs, into a file or directory of its own; else rank 0 alone.

    Raises:
        ParallelError: `every` is no whole number of 1 or more.
    """

    def __init__(self, every: int = 1, *, all_ranks: bool = False) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ParallelError(f"{type(self).__name__}(every={every!r}): a whole number of steps, 1 or more")
        self._every = every
        self._all_ranks = all_ranks
        self._last: tuple[int, float] | None = None
        """Step and moment of the last row of `Model.train`."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log numbers, if this rank logs.

        Args:
            metrics: name -> number, or tensor of one element.

        Raises:
            ParallelError: no number; or the file cannot be written.
        """
        if self._all_ranks or _rank() == 0:
            self.write({name: self._number(name, value) for name, value in metrics.items()}, step)

    @abstractmethod
    def write(self, metrics: dict[str, float], step: int) -> None:
        """Write one row. Called on ranks that log."""

    def close(self) -> None:
        """Write what is left; a later row opens again. Harmless when nothing is open."""

    def on_train_begin(self, context: RunContext) -> None:
        self._last = context.cur_step_num, time.monotonic()

    def on_train_step_end(self, context: RunContext) -> None:
        step, now = context.cur_step_num, time.monotonic()
        if step % self._every:
            return
        metrics: dict[str, Any] = {"loss": context.loss, "epoch": context.cur_epoch_num}
        if context.optimizer is not None:
            metrics["learning_rate"] = context.optimizer.param_groups[0]["lr"]
        before, at = self._last or (step, now)
        metrics["steps_per_s"] = (step - before) / (now - at) if now > at else math.nan
        self._last = step, now
        self.log_metrics(metrics, step)

    def on_train_end(self, context: RunContext) -> None:  # noqa: ARG002 - the interface of Callback
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _number(self, name: str, value: Any) -> float:
        try:
            number = value.item() if hasattr(value, "item") else value
            return number if isinstance(number, bool | int) else float(number)
        except (TypeError, ValueError, RuntimeError):
            raise ParallelError(
                f"{type(self).__name__}: {name} is {_in_words(value)}; give a number or a tensor of one element"
            ) from None


class _LineLogger(MetricsLogger):
    """One line of a file for every row, written at once, so that a crash loses none."""

    def __init__(self, path: str | os.PathLike[str], every: int = 1, *, all_ranks: bool = False) -> None:
        super().__init__(every, all_ranks=all_ranks)
        self._path = Path(path)
        self._file: IO[bytes] | None = None

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Write one line."""
        attempt = os.environ.get(contract.TORCHELASTIC_RESTART_COUNT, "")
        own = {"time": round(time.time(), 3), "attempt": int(attempt) if attempt.isdigit() else 0, "step": step}
        if reserved := own.keys() & metrics.keys():
            raise ParallelError(
                f"{type(self).__name__}: {', '.join(sorted(reserved))}: every row has these; give another name"
            )
        try:
            if self._file is None:
                self._file = _open_to_append(self.path)
            self._file.write(self.line({**own, **metrics}))
        except OSError as error:
            raise ParallelError(
                f"{type(self).__name__}({str(self.path)!r}): cannot write ({error.strerror}); "
                "give a file that may be written"
            ) from None

    @property
    def path(self) -> Path:
        """The file of this rank."""
        path = self._path
        return path.with_name(f"{path.stem}.rank_{_rank()}{path.suffix}") if self._all_ranks else path

    @abstractmethod
    def line(self, row: dict[str, float]) -> bytes:
        """Return a row as it stands in the file, and before it what the file has to begin with."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class CSVLogger(_LineLogger):
    """Log to a CSV file: a heading, then `time,attempt,step` and the metrics of every row.

    The metrics of the first row are the columns. A later row may lack some, and may have no others.

    Args:
        path: directories are made. With `all_ranks`, `losses.csv` becomes `losses.rank_3.csv`.
        every: log every so many steps of `Model.train`.
        all_ranks: every rank logs into a file of its own; else rank 0 alone.
    """

    _columns: tuple[str, ...] = ()

    def line(self, row: dict[str, float]) -> bytes:
        heading = ""
        if not self._columns:
            with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                self._columns = tuple(next(csv.reader(file), ()))
            if not self._columns:
                self._columns = tuple(row)
                heading = _csv_line(self._columns)
        unknown = [name for name in row if name not in self._columns]
        missing = [name for name in _ALWAYS if name not in self._columns]
        if unknown or missing:
            raise ParallelError(
                f"CSVLogger({str(self.path)!r}): {', '.join(unknown or missing)}: the columns of the file are "
                f"{', '.join(self._columns)}; give another file, or log to a JSONLogger"
            )
        return (heading + _csv_line([row.get(name, "") for name in self._columns])).encode()

    def close(self) -> None:
        super().close()
        self._columns = ()


class JSONLogger(_LineLogger):
    """Log to a file of JSON lines: one object with `time`, `attempt`, `step` and the metrics for every row.

    Rows may have different metrics. A number that is not finite is null.

    Args:
        path: directories are made. With `all_ranks`, `losses.jsonl` becomes `losses.rank_3.jsonl`.
        every: log every so many steps of `Model.train`.
        all_ranks: every rank logs into a file of its own; else rank 0 alone.
    """

    def line(self, row: dict[str, float]) -> bytes:
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        return (json.dumps(finite, allow_nan=False) + "\n").encode()


class TensorBoardLogger(MetricsLogger):
    """Log scalars for TensorBoard, by tensorboardX, or by torch's writer where `tensorboard` is installed.

    A restarted run adds an event file to the directory; TensorBoard then shows its steps in the place of those that
    the last attempt had done after the checkpoint.

    Args:
        log_dir: directory of the event files, made when missing. With `all_ranks`, `rank_3` in it.
        every: log every so many steps of `Model.train`.
        all_ranks: every rank logs into a directory of its own; else rank 0 alone.

    Raises:
        ParallelError: neither package is installed; the directory cannot be written.
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "runs", every: int = 1, *, all_ranks: bool = False) -> None:
        super().__init__(every, all_ranks=all_ranks)
        self._log_dir = Path(log_dir)
        self._new_writer = _find_writer()
        self._writer: Any = None

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Write one scalar for every metric."""
        if self._writer is None:
            self._open(step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _open(self, step: int) -> None:
        folder = self._log_dir / f"rank_{_rank()}" if self._all_ranks else self._log_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            has_more = any("tfevents" in path.name for path in folder.iterdir())
            self._writer = self._new_writer(
                str(folder),
                purge_step=step if has_more else None,
                flush_secs=FLUSH_S,
                filename_suffix=f".{os.getpid()}.{time.time_ns()}",  # else files of one second have one name
            )
        except OSError as error:
            raise ParallelError(
                f"TensorBoardLogger({str(folder)!r}): cannot write ({error.strerror}); "
                "give a directory that may be written"
            ) from None
        atexit.register(self.close)

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
            atexit.unregister(self.close)


FLUSH_S = 5
"""How long TensorBoard's rows may stay in memory: a worker that is killed loses no more."""


def _find_writer() -> Callable[..., Any]:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ParallelError(
                "TensorBoardLogger: neither tensorboardX nor tensorboard is installed; "
                "run: pip install 'msrun[tensorboard]'"
            ) from None
    return SummaryWriter


def _open_to_append(path: Path) -> IO[bytes]:
    """Open a file for whole lines; a line that a crash has cut is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b", buffering=0)
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def _csv_line(cells: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _rank() -> int:
    """Return this process's rank, also in a loop that has not called `init()`."""
    if world.is_initialized():
        return world.get_rank()
    if dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get(contract.RANK, "")
    return int(rank) if rank.isdigit() else 0


def _in_words(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"a tensor of {'x'.join(map(str, shape)) or 'no'} elements"
