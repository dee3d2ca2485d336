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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.logs.own_file import create_own_file
from msrun.errors import UsageError
from msrun.launch.directory.jobs import find_job, publish_file
from msrun.launch.directory.lock import parse_number, parse_object
from msrun.launch.directory.log_directory import parse_plan, read_bytes
from ranktable.files import open_whole

LAUNCHER = 0
"""Process of the launcher in the trace; that of rank r is r + 1."""
PROCESS, STEPS, WAITS = 0, 1, 2
"""Rows of a rank."""
_ROWS = {PROCESS: "process", STEPS: "steps", WAITS: "waits in collectives"}
_KINDS = {"step": STEPS, "wait": WAITS}
_MOMENTS = frozenset(
    {"preparing", "ready", "running", "signal", "hang", "stopping", "restarting", "over", "fault", "note"}
)
MICRO = 1_000_000


@dataclass
class Trace:
    """The events of a trace, and what was found."""

    events: list[dict[str, Any]] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)
    """Number of ranks with a process, steps, waits."""


def write_trace(log_dir: Path, output: Path | None) -> str:
    """Write the trace of the job of a log directory, running or ended; return what was written, in words.

    Args:
        output: None = `trace.json` in the directory.

    Raises:
        UsageError: the directory is no job's, or something cannot be read or written.
    """
    log_dir = find_job(log_dir)
    path = output or log_dir / contract.TRACE_JSON
    if not log_dir.is_dir():
        what = "is a file" if log_dir.exists() else "no such directory"
        raise UsageError(f"msrun trace {log_dir}: {what}; give the --log_dir of a job")
    folders = [log_dir, *sorted(folder for folder in log_dir.glob("node_*") if folder.is_dir())]
    try:
        plan = parse_plan(read_bytes(log_dir / contract.PLAN_JSON) or b"")
        logs = [read_bytes(folder / contract.EVENTS_JSONL) or b"" for folder in folders]
        parts = [read_bytes(part) or b"" for folder in folders for part in sorted(folder.glob("trace_*.jsonl"))]
    except OSError as error:
        raise UsageError(f"msrun trace {log_dir}: cannot read {error.filename} ({error.strerror})") from None
    if plan is None or not any(logs):
        raise UsageError(f"msrun trace {log_dir}: no job has used it; give the --log_dir of a job")
    trace = build_trace(plan.job_id, {worker.global_rank: worker.host for worker in plan.workers}, logs, parts)
    try:
        with open_whole(path, mode=contract.FILE_MODE) if output else os.fdopen(create_own_file(path), "wb") as file:
            file.writelines(line.encode() for line in _lines(trace.events))
        publish_file(path)
    except OSError as error:
        raise UsageError(f"msrun trace: {path}: cannot write ({error.strerror}); give -o FILE") from None
    found = ", ".join(f"{trace.found[name]} {name if trace.found[name] != 1 else name[:-1]}" for name in _FOUND)
    hint = "" if parts else "\nthe job was started without --trace: steps and waits were not recorded"
    return f"wrote {path}: {found}{hint}\nopen it in https://ui.perfetto.dev or chrome://tracing"


_FOUND = ("ranks", "steps", "waits")


def build_trace(job_id: str, hosts: dict[int, str], logs: Iterable[bytes], parts: Iterable[bytes]) -> Trace:
    """Return the events of a trace, time from the job's first event.

    Args:
        hosts: global rank -> host.
        logs: contents of the launcher's events.jsonl; of a job that was started on each host, of every host's.
        parts: contents of the workers' files.
    """
    trace = Trace()
    told = [[event for event in map(parse_object, data.split(b"\n")) if _moment(event) is not None] for data in logs]
    begin = min((_moment(event) or 0.0 for events in told for event in events), default=0.0)
    trace.events.append(_name(LAUNCHER, "process_name", f"msrun, job {job_id}"))
    trace.events += [_sorted(LAUNCHER), _name(LAUNCHER, "thread_name", "events")]
    for number, events in enumerate(told):
        _add_events(trace, events, begin, is_launcher=number == 0)
    for data in parts:
        _add_part(trace, data, begin, hosts)
    ranks = sorted({event["pid"] - 1 for event in trace.events if event["pid"] != LAUNCHER})
    trace.found["ranks"] = len(ranks)
    for rank in ranks:
        where = f" on {hosts[rank]}" if rank in hosts else ""
        trace.events += [_name(rank + 1, "process_name", f"rank {rank}{where}"), _sorted(rank + 1)]
        trace.events += [_name(rank + 1, "thread_name", name, row) for row, name in _ROWS.items()]
    return trace


def _add_events(trace: Trace, events: list[dict[str, Any]], begin: float, *, is_launcher: bool) -> None:
    """Add the life of every worker, and the moments of the job."""
    started: dict[int, dict[str, Any]] = {}
    attempt = 0
    for event in events:
        kind, moment, rank = event.get("event"), _moment(event) or 0.0, event.get("global_rank")
        if kind == "started" and type(rank) is int:
            started[rank] = event
        elif kind == "exited" and rank in started:
            first = started.pop(rank)
            name = f"{event.get('state', 'ended')}: {event.get('how', '')}"
            args = {"attempt": attempt, "pid": first.get("pid")}
            trace.events.append(_span(rank, PROCESS, name, (_moment(first) or 0.0) - begin, moment - begin, args))
        elif kind in _MOMENTS and is_launcher:
            args = {key: value for key, value in event.items() if key not in ("time", "job_s", "event")}
            at = {"ts": round((moment - begin) * MICRO), "pid": LAUNCHER, "tid": 0}
            trace.events.append({"name": str(kind), "cat": "job", "ph": "i", "s": "g", **at, "args": args})
        attempt += kind == "restarting"
    end = max((_moment(event) or 0.0 for event in events), default=begin)
    for rank, first in started.items():
        args = {"attempt": attempt, "pid": first.get("pid")}
        trace.events.append(_span(rank, PROCESS, "running", (_moment(first) or 0.0) - begin, end - begin, args))


def _add_part(trace: Trace, data: bytes, begin: float, hosts: dict[int, str]) -> None:
    """Add the steps and waits of one worker; what cannot be understood, such as a half-written line, is skipped."""
    rank: int | None = None
    shift, args = 0.0, {}
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            wall, clock = parse_number(record.get("time")), parse_number(record.get("clock"))
            found = record.get("global_rank")
            rank = found if type(found) is int and wall is not None and clock is not None else None
            if rank is None or wall is None or clock is None:
                continue
            shift = wall - clock - begin
            args = {"attempt": record.get("attempt")}
            hosts.setdefault(rank, str(record.get("host", "?")))
        elif rank is not None and _is_span(record):
            kind, name, since, until = record
            trace.found[f"{kind}s"] += 1
            name = f"step {name}" if kind == "step" else name
            trace.events.append(_span(rank, _KINDS[kind], name, since + shift, until + shift, args))


def _is_span(record: object) -> bool:
    return (
        isinstance(record, list)
        and len(record) == 4
        and record[0] in _KINDS
        and isinstance(record[1], str)
        and all(parse_number(moment) is not None for moment in record[2:])
    )


def _span(rank: int, row: int, name: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    begin_us, end_us = round(begin * MICRO), round(end * MICRO)
    place = {"pid": rank + 1, "tid": row, "ts": begin_us, "dur": max(0, end_us - begin_us)}
    return {"name": name, "cat": _ROWS[row], "ph": "X", **place, "args": args}


def _name(process: int, kind: str, name: str, row: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


def _sorted(process: int) -> dict[str, Any]:
    return {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}


def _moment(event: dict[str, Any]) -> float | None:
    return parse_number(event.get("time")) if isinstance(event.get("event"), str) else None


def _lines(events: list[dict[str, Any]]) -> Iterator[str]:
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    last = len(events) - 1
    for index, event in enumerate(events):
        yield json.dumps(event) + ("\n" if index == last else ",\n")
    yield "]}\n"
