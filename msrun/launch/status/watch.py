"""`msrun --status LOG_DIR --watch`: the status of a job again and again, until the job has ended.

On a terminal one table is redrawn in place. Elsewhere rows that have changed are added below, as `kubectl get --watch`
does; with --json every look is one line.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from msrun.cluster.membership import WorkerState
from msrun.launch.printable import one_line
from msrun.launch.status.job_status import STATE_COLOURS, JobStatus, WorkerRow, read_status
from msrun.launch.status.status_text import GAP, describe_span, head_lines, render_json
from msrun.planning.ranks import fold_ranks

if TYPE_CHECKING:
    from rich.console import JustifyMethod, RenderableType


Value = TypeVar("Value", int, float)
Cells = tuple[str, ...]
MAX_RANKS = 32
"""More workers than this are shown with one row for each host."""
HEADINGS = ("rank", "host", "state", "step", "steps/s", "loss", "CPU", "memory", "last line")
HOST_HEADINGS = ("ranks", *HEADINGS[1:])
WAIT_S = 5.0
"""A worker that has been waiting in a collective for this long is shown as one that waits."""
NONE = "-"


class LiveTable:
    """Makes the cells of one look after the other; it remembers the last one, for the share of a core in use."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}
        """Process id -> processor seconds, and the moment when they were read."""

    def read(self, status: JobStatus) -> tuple[Cells, list[Cells]]:
        """Return the headings, and the cells of every row."""
        cores = self._cores(status)
        if len(status.rows) <= MAX_RANKS:
            return HEADINGS, [_rank_cells(row, status, cores) for row in status.rows]
        hosts: dict[str, list[WorkerRow]] = {}
        for row in status.rows:
            hosts.setdefault(row.host, []).append(row)
        return HOST_HEADINGS, [_host_cells(host, rows, status, cores) for host, rows in hosts.items()]

    def _cores(self, status: JobStatus) -> dict[int, float]:
        """Return process id -> cores in use since the last look."""
        now = {row.pid: (row.usage.cpu_s, status.clock) for row in status.rows if row.usage}
        cores = {
            pid: max(0.0, (cpu_s - self._last[pid][0]) / (at - self._last[pid][1]))
            for pid, (cpu_s, at) in now.items()
            if pid in self._last and at > self._last[pid][1]
        }
        self._last = now
        return cores


def _rank_cells(row: WorkerRow, status: JobStatus, cores: Mapping[int, float]) -> Cells:
    step = NONE if row.step is None else str(row.step)
    return (
        str(row.global_rank),
        one_line(row.host),
        one_line(_state(row, status)),
        f"{step}/{row.progress.total}" if row.progress.total else step,
        _number(row.steps_per_s),
        _number(row.loss),
        f"{cores[row.pid]:.0%}" if row.pid in cores else NONE,
        describe_size(row.usage.memory_bytes) if row.usage else NONE,
        one_line(row.last_line),
    )


def _host_cells(host: str, rows: Sequence[WorkerRow], status: JobStatus, cores: Mapping[int, float]) -> Cells:
    states: dict[str, int] = {}
    for row in rows:
        state = "waiting" if _is_waiting(row, status) else row.state.partition(": ")[0]
        states[state] = states.get(state, 0) + 1
    used = [cores[row.pid] for row in rows if row.pid in cores]
    sizes = [row.usage.memory_bytes for row in rows if row.usage]
    newest = max(rows, key=lambda row: row.log_at or 0.0)
    return (
        fold_ranks(row.global_rank for row in rows),
        one_line(host),
        one_line(", ".join(f"{count} {state}" for state, count in states.items())),
        _range([row.step for row in rows if row.step is not None], str),
        _range([row.steps_per_s for row in rows if row.steps_per_s is not None], _number),
        _range([row.loss for row in rows if row.loss is not None], _number),
        f"{sum(used):.0%}" if used else NONE,
        describe_size(sum(sizes)) if sizes else NONE,
        one_line(f"[{newest.global_rank}] {newest.last_line}") if newest.last_line else "",
    )


def _state(row: WorkerRow, status: JobStatus) -> str:
    return f"waits {describe_span(row.waits_s(status.clock) or 0.0)}" if _is_waiting(row, status) else row.state


def _is_waiting(row: WorkerRow, status: JobStatus) -> bool:
    return row.state == WorkerState.RUNNING.value and (row.waits_s(status.clock) or 0.0) >= WAIT_S


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def _range(values: Iterable[Value], describe: Callable[[Value], str]) -> str:
    found = list(values)
    if not found:
        return NONE
    low, high = describe(min(found)), describe(max(found))
    return low if low == high else f"{low} to {high}"


def describe_size(count: int) -> str:
    """Return a number of bytes in words: 12 MiB, 1.5 GiB."""
    mib = count / (1 << 20)
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"


TERMINAL_S = 1.0
PLAIN_S = 10.0
"""How often the status is shown, unless told."""
LOOK_S = 1.0
"""How often to look, at least, whether the job has ended."""
_WIDTHS = {"state": 8, "steps/s": 7, "loss": 9, "CPU": 5, "memory": 8}
"""Of the columns whose cells become longer."""
_NUMBERS = ("step", "steps/s", "loss", "CPU", "memory")
_VOLATILE = (6, 7)
"""Columns that change all the time: a row in which nothing else has changed is not shown again."""


class View(Protocol):
    """Where the status is shown."""

    interval_s: float

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, status: JobStatus) -> None:
        """Show the job as it is now."""


def watch_status(log_dir: Path, interval_s: float | None, *, as_json: bool) -> int:
    """Show a job until it has ended, and return what `--status` exits with then.

    Args:
        interval_s: how often; None = 1 s on a terminal and for JSON, else 10 s.

    Raises:
        UsageError: the directory is missing, cannot be read, or is no job's.
    """
    status = read_status(log_dir)
    view = _choose_view(interval_s, as_json=as_json)
    with view:
        return _watch(status, view)


def _watch(status: JobStatus, view: View) -> int:
    shown, due = None, 0.0
    while True:
        if status.is_over or status.state is not shown or time.monotonic() >= due:
            due = time.monotonic() + view.interval_s
            shown = status.state
            view.show(status)
        if status.is_over:
            return status.status_code
        time.sleep(max(0.0, min(LOOK_S, due - time.monotonic())))
        status = read_status(status.log_dir)


def _choose_view(interval_s: float | None, *, as_json: bool) -> View:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if as_json:
        return JsonLines(interval_s or TERMINAL_S)
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return RichTable(interval_s or TERMINAL_S)
    return PlainRows(interval_s or PLAIN_S)


class _Lines:
    """A view that only adds lines."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def _write(self, lines: Sequence[str]) -> None:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


class JsonLines(_Lines):
    """One JSON object on a line for every look."""

    def show(self, status: JobStatus) -> None:
        """Write one line."""
        self._write([render_json(status)])


class PlainRows(_Lines):
    """A table to which rows are added: at first all, then those that have changed."""

    def __init__(self, interval_s: float) -> None:
        super().__init__(interval_s)
        self._table = LiveTable()
        self._widths: list[int] = []
        self._shown: dict[str, Sequence[str]] = {}
        self._job_line = ""

    def show(self, status: JobStatus) -> None:
        """Write what has changed; at first the job's own lines and the headings."""
        head = head_lines(status)
        lines = [] if self._widths else head[1:]
        if head[0] != self._job_line:
            lines.insert(0, head[0])
            self._job_line = head[0]
        headings, rows = self._table.read(status)
        if not self._widths and rows:
            self._widths = [_WIDTHS.get(cell, len(cell)) for cell in ("HH:MM:SS", *headings)]
            self._widths = self._grown([("", *row) for row in rows])
            lines.append(self._line(("time", *headings)))
        moment = time.strftime("%H:%M:%S", time.localtime(status.now))
        changed = [row for row in rows if self._shown.get(row[0]) != _lasting(row)]
        self._widths = self._grown([("", *row) for row in changed]) if changed else self._widths
        lines += [self._line((moment, *row)) for row in changed]
        self._shown.update({row[0]: _lasting(row) for row in changed})
        self._write(lines)

    def _grown(self, rows: Sequence[Cells]) -> list[int]:
        return [max(width, *(len(row[index]) for row in rows)) for index, width in enumerate(self._widths)]

    def _line(self, cells: Sequence[str]) -> str:
        return GAP.join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip()


def _lasting(row: Cells) -> list[str]:
    return [cell for index, cell in enumerate(row) if index not in _VOLATILE]


class RichTable:
    """One table on a terminal, redrawn in place; the last one stays. The cursor stays visible, whatever ends us."""

    def __init__(self, interval_s: float) -> None:
        from rich.console import Console
        from rich.live import Live

        self.interval_s = interval_s
        self._table = LiveTable()
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        self._live.start()
        self._console.show_cursor()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, status: JobStatus) -> None:
        """Draw the job."""
        self._live.update(self._draw(status), refresh=True)

    def _draw(self, status: JobStatus) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        first, *more = head_lines(status)
        styles = [STATE_COLOURS.get(status.state, "bold"), *[""] * len(more)]
        head = [
            Text(line, style=style, no_wrap=True, overflow="ellipsis")
            for line, style in zip((first, *more), styles, strict=True)
        ]
        headings, rows = self._table.read(status)
        if not rows:
            return Group(*head)
        table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="bold")
        for heading in headings:
            justify: JustifyMethod = "right" if heading in _NUMBERS else "left"
            width = _WIDTHS.get(heading)
            table.add_column(heading, no_wrap=heading != headings[-1], justify=justify, min_width=width)
        for *cells, last_line in rows:
            texts = [Text(cell, style=_style(cell) if index == 2 else "") for index, cell in enumerate(cells)]
            table.add_row(*texts, Text(last_line, no_wrap=True, overflow="ellipsis"))
        return Group(*head, table)


def _style(state: str) -> str:
    """Return the colour of a worker's state."""
    colours: Sequence[tuple[str, Callable[[str], bool]]] = (
        ("red", lambda text: "failed" in text or "lost" in text),
        ("yellow", lambda text: "wait" in text or "stopped" in text),
        ("green", lambda text: "running" in text or "done" in text),
    )
    return next((colour for colour, fits in colours if fits(state)), "")
