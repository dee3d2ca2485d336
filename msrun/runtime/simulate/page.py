"""The report of a dry run as one HTML page: no server, no script, nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from msrun.runtime.parallel.pipeline.schedule_picture import COLOURS as ACTION_COLOURS
from msrun.runtime.simulate.host_traffic import HostTraffic, count_host_traffic
from msrun.runtime.simulate.job import RankClass, SimulatedJob, StepTime
from msrun.runtime.simulate.recording import Span
from msrun.runtime.simulate.report import KINDS, Report, memory_of
from msrun.runtime.simulate.table import render_table
from msrun.runtime.simulate.units import format_bytes, format_seconds

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
        _memory(job),
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


def _memory(job: SimulatedJob) -> str:
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
