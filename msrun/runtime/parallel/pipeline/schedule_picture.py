"""A schedule as text and as a picture: a row for each pipeline rank, time from left to right."""

from __future__ import annotations

from html import escape

from msrun.runtime.parallel.pipeline.schedule import Action, Cell, Schedule

COLOURS = {"F": "#8fb8de", "B": "#a8d5a2", "I": "#c9e4c5", "W": "#f2d388"}
WORDS = {
    "F": "F forward",
    "B": "B backward",
    "I": "I gradients of inputs",
    "W": "W gradients of weights",
}
_UNIT, _ROW, _LEFT, _TOP = 34, 30, 84, 54


def describe_schedule(schedule: Schedule) -> str:
    """Return name, sizes, bubble and what the fullest rank holds in one line."""
    chunks = schedule.stages // schedule.ranks
    held = f", {chunks} on each rank" if chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.stages} stages{held}, {schedule.micro_size} micro batches, "
        f"bubble {100 * schedule.bubble:.1f} %, at most {schedule.most_held} forward passes held"
    )


def render_text(schedule: Schedule) -> str:
    """Return the order of a step as a table; a dot is a pause, a dash means that the action goes on.

    A cell is KIND and micro batch; before it stands the stage where ranks hold several.
    """
    width = max(len(_label(schedule, cell.action)) for row in schedule.timeline for cell in row)
    lines = [describe_schedule(schedule)]
    for rank, row in enumerate(schedule.timeline):
        columns = ["."] * schedule.length
        for cell in row:
            columns[cell.begin : cell.end] = [_label(schedule, cell.action), *"-" * (cell.end - cell.begin - 1)]
        lines.append(f"{_name(schedule, rank)}  " + " ".join(f"{column:<{width}}" for column in columns).rstrip())
    return "\n".join(lines)


def render_svg(schedule: Schedule) -> str:
    """Return the order of a step as an SVG document."""
    kinds = [kind for kind in COLOURS if any(c.action.kind == kind for row in schedule.timeline for c in row)]
    width = _LEFT + _UNIT * max(schedule.length, 5 * len(kinds)) + 10
    height = _TOP + _ROW * schedule.ranks + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<title>{escape(describe_schedule(schedule))}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text font-size="15" x="10" y="24">{escape(describe_schedule(schedule))}</text>',
    ]
    for rank, row in enumerate(schedule.timeline):
        y = _TOP + _ROW * rank
        parts.append(f'<text font-size="12" x="10" y="{y + 19}">{escape(_name(schedule, rank).strip())}</text>')
        end = _LEFT + _UNIT * schedule.length
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT}" height="{_ROW - 4}" fill="#eeeeee"/>')
        parts += [_svg_cell(schedule, cell, y) for cell in row]
    for index, kind in enumerate(kinds):
        x, y = _LEFT + index * 5 * _UNIT, _TOP + _ROW * schedule.ranks + 10
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[kind]}" stroke="#666666"/>')
        parts.append(f'<text font-size="12" x="{x + 20}" y="{y + 12}">{WORDS[kind]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _svg_cell(schedule: Schedule, cell: Cell, y: int) -> str:
    x, width = _LEFT + _UNIT * cell.begin, _UNIT * (cell.end - cell.begin)
    round_of_rank = schedule.stages_of(schedule.holder[cell.action.stage]).index(cell.action.stage)
    edge = "#666666" if round_of_rank % 2 == 0 else "#000000"
    label = escape(_label(schedule, cell.action))
    return (
        f'<g class="{cell.action.kind}"><title>{escape(str(cell.action))}</title>'
        f'<rect x="{x}" y="{y}" width="{width}" height="{_ROW - 4}" fill="{COLOURS[cell.action.kind]}" '
        f'stroke="{edge}" stroke-width="{1 + round_of_rank % 2}"/>'
        f'<text font-size="12" x="{x + width / 2:g}" y="{y + 18}" text-anchor="middle">{label}</text></g>'
    )


def _label(schedule: Schedule, action: Action) -> str:
    stage = str(action.stage) if schedule.stages > schedule.ranks else ""
    return f"{stage}{action.kind}{action.micro_batch}"


def _name(schedule: Schedule, rank: int) -> str:
    """Return the head of a row: a pipeline rank, as the field calls the ranks that hold the same stages."""
    return f"pp rank {rank:<{len(str(schedule.ranks - 1))}}"
