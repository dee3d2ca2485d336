"""The report of a dry run on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from msrun.runtime.simulate.job import RankClass, StepTime
from msrun.runtime.simulate.report import KINDS, LEVELS, Report, memory_of
from msrun.runtime.simulate.units import format_bytes, format_seconds

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
