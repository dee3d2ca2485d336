"""The step of a dry run as a trace in Chrome's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msrun.runtime.parallel.pipeline.schedule import Cell
from msrun.runtime.simulate.job import SimulatedJob
from msrun.runtime.simulate.recording import Span

MICRO = 1e6


def build_trace(job: SimulatedJob) -> dict[str, Any]:
    """Return the step in Chrome's format, as `msrun trace` writes it: operators and messages of each class of ranks.

    Of a pipeline there are the actions of its schedule, too.
    """
    events: list[dict[str, Any]] = []
    rows = job.step.timeline if job.step is not None else ()
    for number, found in enumerate(job.classes):
        process = found.rank + 1
        last = f" to {found.ranks[-1]}" if len(found.ranks) > 1 else ""
        events.append(_name(process, "process_name", f"ranks {found.ranks[0]}{last}"))
        for row, name in enumerate(("operators", "messages", "schedule")[: 3 if rows else 2]):
            events.append(_name(process, "thread_name", name, row))
        assert found.record is not None
        events += [_span(process, span) for span in found.record.recording.spans]
        events += [_cell(process, cell) for cell in (rows[number] if rows else ())]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(process: int, kind: str, name: str, row: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


def _span(process: int, span: Span) -> dict[str, Any]:
    begin = round(span.begin_s * MICRO, 3)
    place = {"pid": process, "tid": int(span.is_message), "ts": begin, "dur": round(span.end_s * MICRO - begin, 3)}
    args: Mapping[str, Any] = {"bytes": span.nbytes, "ranks": len(span.ranks)} if span.is_message else {}
    return {"name": span.name, "cat": span.phase, "ph": "X", **place, "args": args}


def _cell(process: int, cell: Cell) -> dict[str, Any]:
    begin = round(cell.begin * MICRO, 3)
    place = {"pid": process, "tid": 2, "ts": begin, "dur": round(cell.end * MICRO - begin, 3)}
    return {"name": str(cell.action), "cat": "schedule", "ph": "X", **place, "args": {}}
