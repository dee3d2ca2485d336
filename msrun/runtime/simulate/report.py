"""The report of a dry run, as JSON and as a trace. docs/how-to/dry_run.md has the fields."""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, NoReturn

import torch

from msrun import contract
from msrun.errors import StrategyError, WorldError
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.joining.launchers import REAL_VALUES
from msrun.runtime.parallel.pipeline.schedule import COLOURS as ACTION_COLOURS
from msrun.runtime.parallel.pipeline.schedule import Cell
from msrun.runtime.parallel.settings import ParallelSettings, own_profile
from msrun.runtime.simulate.changes import Changes, try_changes
from msrun.runtime.simulate.job import (
    Asked,
    HostTraffic,
    RankClass,
    SimulatedJob,
    StepTime,
    changes_network,
    count_host_traffic,
    simulate_job,
)
from msrun.runtime.simulate.recording import (
    ACTIVATIONS,
    BACKWARD,
    GRADIENTS,
    MESSAGES,
    RECOMPUTED,
    Span,
    format_bytes,
    format_seconds,
)
from msrun.runtime.simulate.step import StepRecord
from ranktable.files import replace_file

FORMAT = 1
PARAMETERS, STATE = "parameters", "optimizer_state"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, RECOMPUTED, BACKWARD, MESSAGES)
"""What memory is for, in the order in which it is shown."""
LEVELS = {0: "plan", 1: "plan and memory", 2: "plan, memory and time", 3: "plan, memory, time, and steps of one rank"}
MICRO = 1e6


@dataclass(frozen=True)
class Measured:
    """What running the steps of one rank took here, with nothing sent; of level 3."""

    steps: int
    rank: int
    """That was run."""
    step_s: float
    """Mean."""
    process_bytes: int
    """Most memory of the whole process."""


@dataclass(frozen=True)
class Report:
    """Everything that a dry run says."""

    job: SimulatedJob
    level: int
    local_worker_num: int
    """Ranks on each host."""
    script: tuple[str, ...]
    notes: tuple[str, ...]
    changes: Changes | None = None
    """What other settings would do; of `msrun estimate`."""
    measured: Measured | None = None

    @property
    def hosts(self) -> int:
        """Hosts of the job."""
        return self.job.world_size // self.local_worker_num

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        step, device = self.job.step, self.job.device
        return {
            "format": FORMAT,
            "level": self.level,
            "script": list(self.script),
            "worker_num": self.job.world_size,
            "hosts": self.hosts,
            "local_worker_num": self.local_worker_num,
            "device": device.to_json(),
            "classes": [_class_json(found) for found in self.job.classes],
            "step": None if step is None else _step_json(step),
            "measured": None if self.measured is None else asdict(self.measured),
            "fits": self.job.fits if self.level else None,
            "changes": None if self.changes is None else self.changes.to_json(),
            "notes": list(self.notes),
            "plan": self.job.plan.to_json(),
        }


def memory_of(record: StepRecord) -> dict[str, int]:
    """Return the bytes of a rank at the fullest moment of a step by what they are for, in the order of `KINDS`."""
    parameters = record.parameter_bytes - record.host_parameter_bytes
    found = {PARAMETERS: parameters, STATE: record.optimizer_bytes - record.host_state_bytes, **record.at_peak}
    return {kind: found.get(kind, 0) for kind in KINDS}


def _class_json(found: RankClass) -> dict[str, Any]:
    value: dict[str, Any] = {
        "first_rank": found.ranks[0],
        "last_rank": found.ranks[-1],
        "rank": found.rank,
        "stages": list(found.stages),
        "traffic": None if found.plan.traffic is None else asdict(found.plan.traffic),
    }
    if found.record is None:
        return value
    record = found.record
    value["memory"] = {
        "peak_bytes": record.peak_bytes,
        "at_peak": memory_of(record),
        "parameter_bytes": record.parameter_bytes,
        "gradient_bytes": record.gradient_bytes,
        "optimizer_state_bytes": record.optimizer_bytes,
        "host_bytes": record.host_bytes,
        "optimizer": record.optimizer,
    }
    return value


def _step_json(step: StepTime) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "compute_s": step.compute_s,
        "messages_s": step.messages_s,
        "waits_s": step.waits_s,
        "overlap": step.overlap,
        "bubble": step.bubble,
    }


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


_HEADS = ("parameters", "gradients", "optimizer", "activations", "recompute", "backward", "messages")
MAX_ROWS = 16


def render_table(report: Report) -> str:
    """Return the report as text: at level 0 the plan, then memory and time."""
    job = report.job
    hosts = f"{report.hosts} host{'s' if report.hosts > 1 else ''} of {report.local_worker_num}"
    lines = [f"dry run of {job.world_size} ranks, {hosts}, {job.device.name}: {LEVELS[report.level]}"]
    if not report.level:
        return "\n".join([*lines, job.plan.explain()])
    lines += [job.plan.summary(), "", *_memory(job.classes, job.device.memory_bytes)]
    if job.step is not None:
        lines += ["", *_time(job.step)]
    if report.measured is not None:
        found = report.measured
        lines.append(
            f"run here on rank {found.rank}: "
            f"{format_seconds(found.step_s)} a step without messages, mean of {found.steps}; the process took "
            f"{format_bytes(found.process_bytes)}"
        )
    lines += ["", f"one training step sends, on {_ranks(job.classes[0])}: {_traffic(job.classes[0])}"]
    if report.changes is not None:
        lines += ["", *report.changes.lines()]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _memory(classes: Sequence[RankClass], room: int) -> list[str]:
    rows: list[tuple[str, ...]] = [("memory of", *_HEADS, "peak", "")]
    shown = classes if len(classes) <= MAX_ROWS else [*classes[: MAX_ROWS - 1], classes[-1]]
    for found in shown:
        assert found.record is not None
        kinds = memory_of(found.record)
        peak = found.record.peak_bytes
        share = f"{100 * peak / room:.0f} % of {format_bytes(room)}" + ("" if peak <= room else ": does not fit")
        rows.append((_ranks(found), *(format_bytes(kinds[kind]) for kind in KINDS), format_bytes(peak), share))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]
        lines.append("  ".join(cells))
    if len(shown) < len(classes):
        lines.insert(-1, f"... {len(classes) - len(shown)} more in simulation.json")
    for found in shown:
        assert found.record is not None
        if found.record.host_bytes:
            kept = format_bytes(found.record.host_bytes)
            lines.append(f"host memory of {_ranks(found)}: {kept} of parameters and optimizer state each")
    return [line.rstrip() for line in lines]


def _time(step: StepTime) -> list[str]:
    overlap = "" if step.overlap is None else f", {100 * step.overlap:.0f} % of that hidden behind operators"
    operators, messages = format_seconds(step.compute_s), format_seconds(step.messages_s)
    lines = [f"step {format_seconds(step.seconds)}: operators {operators}, messages {messages}{overlap}"]
    if step.bubble is not None:
        lines.append(f"pipeline: ranks wait for other stages {100 * step.bubble:.0f} % of the step")
    return lines


def _traffic(found: RankClass) -> str:
    moved = found.plan.traffic
    if moved is None or not moved.calls:
        return "nothing"
    return "; ".join(
        f"{calls} {name}, {format_bytes(moved.bytes[name])}" for name, calls in sorted(moved.calls.items())
    )


def _ranks(found: RankClass) -> str:
    stages = f" (stage {', '.join(map(str, found.stages))})" if found.stages else ""
    if len(found.ranks) == 1:
        return f"rank {found.ranks[0]}{stages}"
    return f"ranks {found.ranks[0]}-{found.ranks[-1]}{stages}"


COLOURS = ("#4e79a7", "#59a14f", "#9c755f", "#f28e2b", "#edc948", "#e15759", "#b07aa1")
PHASE_COLOURS = {"activations": "#8fb8de", "recompute": "#f2d388", "backward": "#a8d5a2", "optimizer": "#c9b29b"}
_WIDTH, _BAR, _LEFT = 760, 22, 150
MOST_SPANS = 1500
"""In one row of the timeline: neighbours of one phase are drawn as one."""
MOST_BARS = 64
_STYLE = (
    "body{font-family:sans-serif;margin:2em;max-width:1000px;color:#222}pre{background:#f5f5f5;padding:1em;"
    "overflow:auto}td,th{border:1px solid #ccc;padding:2px 6px;text-align:right;font-size:13px}table{border-collapse:"
    "collapse}svg text{font-size:12px}"
)


def render_page(report: Report) -> str:
    """Return the page: the table, memory by kind, the step in time, traffic between hosts, the pipeline's schedule."""
    job = report.job
    title = f"Dry run of {job.world_size} ranks: {' '.join(report.script)}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><pre>{escape(render_table(report))}</pre>",
        "<h2>Memory at the fullest moment of a step</h2>",
        _memory_of_page(job),
    ]
    if job.step is not None:
        parts += ["<h2>One step in time</h2>", *(_timeline(found) for found in job.classes[:MOST_BARS])]
        parts += ["<p>Every span with its name is in simulation_trace.json, for https://ui.perfetto.dev.</p>"]
        parts += ["<h2>Traffic between hosts in a step</h2>", _matrix(count_host_traffic(job, report.local_worker_num))]
    if job.step is not None and job.step.timeline:
        parts += ["<h2>Schedule of the pipeline, to scale</h2>", _schedule(job.step)]
    if job.plan.pipeline is not None:
        parts += ["<h2>Schedule of the pipeline, in units of a forward pass</h2>", job.plan.schedule_svg()]
    parts += ["<h2>Plan</h2>", f"<pre>{escape(job.plan.explain())}</pre></body></html>\n"]
    return "\n".join(parts)


def _memory_of_page(job: SimulatedJob) -> str:
    classes = job.classes[:MOST_BARS]
    most = max([job.device.memory_bytes if job.peak_bytes * 20 > job.device.memory_bytes else 0, job.peak_bytes, 1])
    height = _BAR * len(classes) + 46
    parts = [_svg(height)]
    for row, found in enumerate(classes):
        assert found.record is not None
        x, y = float(_LEFT), row * _BAR
        parts.append(f'<text x="0" y="{y + 15}">{escape(_label(found))}</text>')
        for (kind, nbytes), colour in zip(memory_of(found.record).items(), COLOURS, strict=True):
            width = _WIDTH * nbytes / most
            tip = f"<title>{kind}: {format_bytes(nbytes)}</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR - 4}" fill="{colour}">{tip}</rect>'
            )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{format_bytes(found.record.peak_bytes)}</text>')
    limit = _LEFT + _WIDTH * job.device.memory_bytes / most
    if limit <= _LEFT + _WIDTH:
        parts.append(f'<line x1="{limit:.1f}" y1="0" x2="{limit:.1f}" y2="{height - 46}" stroke="#c00"/>')
    x = 0.0
    for kind, colour in zip(KINDS, COLOURS, strict=True):
        parts.append(f'<rect x="{x:.0f}" y="{height - 26}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{height - 15}">{kind.replace("_", " ")}</text>')
        x += 34 + 7.2 * len(kind)
    return "".join([*parts, "</svg>"])


def _timeline(found: RankClass) -> str:
    assert found.record is not None
    spans, end_s = found.record.recording.spans, max(found.record.step_s, 1e-12)
    parts = [_svg(3 * _BAR), f'<text x="0" y="15">{escape(_label(found))}</text>']
    for row, is_message in enumerate((False, True)):
        for span in _joined([s for s in spans if s.is_message is is_message]):
            x, width = _LEFT + _WIDTH * span.begin_s / end_s, _WIDTH * (span.end_s - span.begin_s) / end_s
            colour = "#e15759" if is_message else PHASE_COLOURS.get(span.phase, "#cccccc")
            tip = f"<title>{escape(span.name)}, {format_seconds(span.end_s - span.begin_s)}</title>"
            place = f'x="{x:.2f}" y="{row * _BAR}" width="{max(width, 0.3):.2f}" height="{_BAR - 4}"'
            parts.append(f'<rect {place} fill="{colour}">{tip}</rect>')
    legend = "operators above: blue forward, yellow again, green backward, brown optimizer; messages below, red"
    parts.append(f'<text x="{_LEFT}" y="{3 * _BAR - 8}">0 to {format_seconds(end_s)}; {legend}</text>')
    return "".join([*parts, "</svg>"])


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Join neighbours of one phase until few enough are left."""
    found = list(spans)
    gap_s = 0.0
    whole_s = max((span.end_s for span in spans), default=0.0)
    while len(found) > MOST_SPANS:
        gap_s = max(gap_s * 2, whole_s / 100000)
        joined: list[Span] = []
        for span in found:
            last = joined[-1] if joined else None
            if last is not None and last.phase == span.phase and span.begin_s - last.end_s <= gap_s:
                joined[-1] = Span("several", last.begin_s, span.end_s, span.is_message, span.phase)
            else:
                joined.append(span)
        if len(joined) == len(found) and gap_s > whole_s:
            return joined[:MOST_SPANS]
        found = joined
    return found


def _schedule(step: StepTime) -> str:
    end_s = max(max(row[-1].end for row in step.timeline), 1e-12)
    parts = [_svg(_BAR * len(step.timeline) + 10)]
    for number, row in enumerate(step.timeline):
        parts.append(f'<text x="0" y="{number * _BAR + 15}">pp rank {number}</text>')
        for cell in row:
            x, width = _LEFT + _WIDTH * cell.begin / end_s, _WIDTH * (cell.end - cell.begin) / end_s
            tip = f"<title>{escape(str(cell.action))}, {format_seconds(cell.end - cell.begin)}</title>"
            place = f'x="{x:.2f}" y="{number * _BAR}" width="{max(width, 0.3):.2f}" height="{_BAR - 4}"'
            parts.append(f'<rect {place} fill="{ACTION_COLOURS[cell.action.kind]}" stroke="#666">{tip}</rect>')
    return "".join([*parts, "</svg>"])


def _matrix(traffic: HostTraffic) -> str:
    if not traffic.nbytes.any():
        return "<p>Nothing: no group of ranks crosses hosts.</p>"
    size = len(traffic.nbytes)
    name = "host" if traffic.hosts_per_row == 1 else f"{traffic.hosts_per_row} hosts from"
    labels = [f"{name} {index * traffic.hosts_per_row}" for index in range(size)]
    rows = ["<table><tr><th>from, to</th>", *(f"<th>{label}</th>" for label in labels), "</tr>"]
    most = traffic.nbytes.max()
    for label, row in zip(labels, traffic.nbytes.tolist(), strict=True):
        cells = [
            f'<td style="background:rgba(225,87,89,{0.7 * value / most:.2f})">{format_bytes(value)}</td>'
            for value in row
        ]
        rows += [f"<tr><th>{label}</th>", *cells, "</tr>"]
    text = "Messages go round rings of their ranks, all-to-alls straight to each rank."
    return "".join([*rows, "</table>", f"<p>{text}</p>"])


def _svg(height: int) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 90}" height="{height}">'


def _label(found: RankClass) -> str:
    stages = f", stage {','.join(map(str, found.stages))}" if found.stages else ""
    return f"ranks {found.ranks[0]}-{found.ranks[-1]}{stages}"


NOT_THE_JOBS = "nothing was received from other ranks: losses that the script has printed are not those of the job"
COMPUTED_STEPS = 3
"""Steps that level 3 runs; the first one, which captures, does not count."""


@dataclass
class _Steps:
    """What level 3 knows when the steps that it runs are over."""

    report: Report
    begun_s: list[float] = field(default_factory=list)


_running: list[_Steps] = []


def begin_step(settings: ParallelSettings, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """End the dry run in place of this step; at level 3 let the first ones run."""
    level = world.simulation_level()
    assert level is not None
    if level < REAL_VALUES:
        _end(_look(settings, target, args, kwargs, level))
    if not torch.is_grad_enabled():
        return
    if not _running:
        _running.append(_Steps(_look(settings, target, args, kwargs, level)))
    steps = _running[0]
    steps.begun_s.append(time.perf_counter())
    if len(steps.begun_s) > COMPUTED_STEPS:
        took = [later - earlier for earlier, later in itertools.pairwise(steps.begun_s[1:])]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        measured = Measured(len(took), world.get_rank(), sum(took) / len(took), peak)
        _end(replace(steps.report, measured=measured, notes=(*steps.report.notes, NOT_THE_JOBS)))


def _look(
    settings: ParallelSettings, target: Target, args: Sequence[Any], kwargs: dict[str, Any], level: int
) -> Report:
    """Return what a step with these arguments does; this process stands for the same rank as before."""
    own_rank = world.get_rank()
    tries_changes = os.environ.get(contract.MSRUN_SIM_ESTIMATE) == "1"
    if (tries_changes or level == REAL_VALUES) and changes_network(target, settings):
        raise StrategyError(
            f"{'msrun estimate' if tries_changes else '--sim_level 3'} of a step function with "
            f"parallel_mode={settings.parallel_mode!r} and hsdp: it can be looked at only once; use --sim_level 2, or "
            "call the network as a module"
        )
    asked = Asked(target, settings, args, kwargs, own_profile(), level, own_rank)
    job = simulate_job(asked)
    changes = None
    if tries_changes:
        changes = try_changes(job, replace(asked, level=2))
    world.stand_for(own_rank)
    notes = list(job.plan.notes)
    if not torch.is_grad_enabled():
        notes.append("the first call had no gradients: this is a forward pass, not a training step")
    if level and not any(found.record.optimizer for found in job.classes if found.record is not None):
        notes.append("no optimizer of these parameters existed at the first call: its memory is not counted")
    return Report(job, level, world.world().local_world_size, tuple(sys.argv), tuple(notes), changes)


def _end(report: Report) -> NoReturn:
    """Write and print the report, and end the process with status 0."""
    folder = os.environ.get(contract.MSRUN_LOG_DIR)
    if folder:
        write_report(report, Path(folder))
    sys.stderr.flush()
    sys.stdout.write(f"{render_table(report)}\n")
    sys.stdout.flush()
    raise SystemExit(0)


def write_report(report: Report, folder: Path) -> None:
    """Write simulation.json, the page and, where time was looked at, the trace; each whole or not at all."""
    files = {contract.SIMULATION_JSON: json.dumps(report.to_json(), indent=1) + "\n"}
    if report.level:
        files[contract.SIMULATION_HTML] = render_page(report)
    if report.job.step is not None:
        files[contract.SIMULATION_TRACE] = json.dumps(build_trace(report.job), separators=(",", ":")) + "\n"
    for name, text in files.items():
        path = folder / name
        try:
            replace_file(path, text.encode(), mode=contract.FILE_MODE)
        except OSError as error:
            raise WorldError(f"{path}: cannot be written ({error.strerror}); give another --log_dir") from None
