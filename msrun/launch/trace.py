"""One trace of a job in Chrome's format, which Perfetto reads: processes, steps and waits of all ranks.

Sources: `events.jsonl`, on the launcher's clock, and `trace_<rank>.jsonl` of every worker that ran with --trace. Such a
file holds, one JSON value a line:

    {"global_rank", "host", "pid", "attempt", "time", "clock"}   once for each start of the worker
    ["step", number, begin, end]                                 a training step
    ["wait", name, begin, end]                                   a wait for other ranks in a collective

Moments are seconds of the worker's CLOCK_MONOTONIC; `time` and `clock` are one moment of wall clock and of that clock.
Source of the format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.own_file import create_own_file
from msrun.errors import UsageError, refused_as
from msrun.launch.directory.log_directory import (
    parse_number,
    parse_plan,
    publish_file,
    read_bytes,
    read_events,
    require_job,
)
from msrun.planning.record import Record
from ranktable.files import open_whole

LAUNCHER = 0  # process of the launcher in the trace; that of rank r is r + 1
PROCESS, STEPS, WAITS = 0, 1, 2  # rows of a rank
_ROWS = ("process", "steps", "waits in collectives")
_MOMENTS = frozenset(
    {"preparing", "ready", "running", "signal", "hang", "stopping", "restarting", "over", "fault", "note"}
)
MICRO = 1_000_000


class Trace(Record, frozen=False):
    """The events of a trace, and what was found."""

    events: list[dict[str, Any]] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)  # number of ranks with a process, steps, waits


def write_trace(log_dir: Path, output: Path | None) -> str:
    """Write the trace of a directory's job to `output`, by default `trace.json` there; return what (UsageError)."""
    log_dir = require_job(log_dir, "msrun trace")
    path = output or log_dir / contract.TRACE_JSON
    folders = [log_dir, *sorted(folder for folder in log_dir.glob("node_*") if folder.is_dir())]
    with refused_as(f"msrun trace {log_dir}: cannot read", at=log_dir):
        plan = parse_plan(read_bytes(log_dir / contract.PLAN_JSON) or b"")
        logs = [read_bytes(folder / contract.EVENTS_JSONL) or b"" for folder in folders]
        parts = [read_bytes(part) or b"" for folder in folders for part in sorted(folder.glob("trace_*.jsonl"))]
    if plan is None or not any(logs):
        raise UsageError(f"msrun trace {log_dir}: no job has used it; give the --log_dir of a job")
    trace = build_trace(plan.job_id, {worker.global_rank: worker.host for worker in plan.workers}, logs, parts)
    with refused_as(f"msrun trace: {path}: cannot write", "give -o FILE"):
        with open_whole(path, mode=contract.FILE_MODE) if output else os.fdopen(create_own_file(path), "wb") as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
            for index, event in enumerate(trace.events):
                file.write(f"{',' if index else ''}\n{json.dumps(event)}".encode())
            file.write(b"\n]}\n")
        publish_file(path)
    counts = {name: trace.found[name] for name in ("ranks", "steps", "waits")}
    found = ", ".join(f"{count} {name if count != 1 else name[:-1]}" for name, count in counts.items())
    hint = "" if parts else "\nthe job was started without --trace: steps and waits were not recorded"
    return f"wrote {path}: {found}{hint}\nopen it in https://ui.perfetto.dev or chrome://tracing"


def build_trace(job_id: str, hosts: dict[int, str], logs: Iterable[bytes], parts: Iterable[bytes]) -> Trace:
    """Return a trace's events, from the launchers' events.jsonl and the workers' files; `hosts`: of each rank."""
    trace = Trace()
    told = [[(kind, at, event) for kind, at, event in read_events(data) if at is not None] for data in logs]
    begin = min((at for events in told for _, at, _ in events), default=0.0)
    trace.events += _names(LAUNCHER, f"msrun, job {job_id}", ["events"])
    for number, events in enumerate(told):
        _add_events(trace, events, begin, is_launcher=number == 0)
    for data in parts:
        _add_part(trace, data, begin, hosts)
    ranks = sorted({event["pid"] - 1 for event in trace.events if event["pid"] != LAUNCHER})
    trace.found["ranks"] = len(ranks)
    for rank in ranks:
        trace.events += _names(rank + 1, f"rank {rank}{f' on {hosts[rank]}' if rank in hosts else ''}", _ROWS)
    return trace


def _add_events(
    trace: Trace, events: list[tuple[str, float, dict[str, Any]]], begin: float, *, is_launcher: bool
) -> None:
    started: dict[int, tuple[float, Any]] = {}
    attempt, last = 0, begin

    def add(rank: int, name: str, end: float) -> None:
        since, pid = started.pop(rank)
        args = {"attempt": attempt, "pid": pid}
        trace.events.append(_span(rank, PROCESS, name, since - begin, end - begin, args))

    for kind, at, event in events:
        rank, last = event.get("global_rank"), max(last, at)
        if kind == "started" and type(rank) is int:
            started[rank] = at, event.get("pid")
        elif kind == "exited" and rank in started:
            add(rank, f"{event.get('state', 'ended')}: {event.get('how', '')}", at)
        elif kind in _MOMENTS and is_launcher:
            args = {key: value for key, value in event.items() if key not in ("time", "job_s", "event")}
            place = {"ts": round((at - begin) * MICRO), "pid": LAUNCHER, "tid": 0}
            trace.events.append({"name": kind, "cat": "job", "ph": "i", "s": "g", **place, "args": args})
        attempt += kind == "restarting"
    for rank in list(started):
        add(rank, "running", last)


def _add_part(trace: Trace, data: bytes, begin: float, hosts: dict[int, str]) -> None:
    rank: int | None = None
    shift, args = 0.0, {}
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            wall, clock, rank = parse_number(record.get("time")), parse_number(record.get("clock")), None
            if type(record.get("global_rank")) is int and wall is not None and clock is not None:
                rank, shift, args = record["global_rank"], wall - clock - begin, {"attempt": record.get("attempt")}
                hosts.setdefault(rank, str(record.get("host", "?")))
        elif rank is not None and isinstance(record, list) and len(record) == 4 and isinstance(record[1], str):
            kind, name, since, until = record
            if kind in ("step", "wait") and None not in (parse_number(since), parse_number(until)):
                trace.found[f"{kind}s"] += 1
                row, name = (STEPS, f"step {name}") if kind == "step" else (WAITS, name)
                trace.events.append(_span(rank, row, name, since + shift, until + shift, args))


def _span(rank: int, row: int, name: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    begin_us, end_us = round(begin * MICRO), round(end * MICRO)
    place = {"pid": rank + 1, "tid": row, "ts": begin_us, "dur": max(0, end_us - begin_us)}
    return {"name": name, "cat": _ROWS[row], "ph": "X", **place, "args": args}


def _names(process: int, name: str, rows: Sequence[str]) -> list[dict[str, Any]]:
    said: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": name})]
    said.append(("process_sort_index", 0, {"sort_index": process}))
    said += [("thread_name", row, {"name": text}) for row, text in enumerate(rows)]
    return [{"name": kind, "ph": "M", "pid": process, "tid": row, "args": args} for kind, row, args in said]
