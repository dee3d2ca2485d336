"""Draws tables: a canvas of characters, and servers with their devices on it.

SVG text: boxes and words with everything escaped, in colours that can be read on light and dark pages.

A picture of a rank table: servers as boxes, devices as cells in the colour of their network plane.

Super pods are frames around their servers. Up to 64 servers show every device with rank, number and address; above
that a server is one small cell that tells its name and ranks when pointed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from xml.sax.saxutils import escape, quoteattr

from ranktable.hosts.ranges import fold_numbers
from ranktable.model import Device, RankTable
from ranktable.report.overview import Plane, ServerPlace, find_planes, list_servers
from ranktable.text import count_noun

# Middle tones: dark words on them are readable, and they stand out from a light page as well as from a dark one.
PLANE_COLOURS = ("#8fbcd4", "#e3b587", "#a3c99a", "#d6a0b3", "#b9aadb", "#d8cb83", "#8fcac0", "#c9b3a0")
_STYLE = """
  .page { fill: #f6f6f3; }
  .pod { fill: #e6e6e1; stroke: #8a8a84; }
  .server { fill: #ffffff; stroke: #6d6d68; }
  .device { stroke: #6d6d68; stroke-width: 0.5; }
  text { fill: #1c1c1a; font-family: monospace; font-size: 10px; }
  .title { font-size: 15px; font-weight: bold; }
  .name { font-size: 11px; font-weight: bold; }
  .faint { fill: #55554f; }
"""
MAX_DETAILED = 64
"""Most servers whose devices are drawn one by one."""
_MARGIN = 16.0
_GAP = 10.0
_CELL_WIDTH, _CELL_HEIGHT = 100.0, 40.0
_MAX_CELLS_PER_ROW = 8
_CELLS_PER_ROW_OF_MANY = 4
_HEAD = 22.0
_SMALL = 14.0
_MULTIPLE = 16
_NO_PLANE = "#c9c9c4"
_WIDE = 1.7
"""How much wider than high a page is meant to be."""


def printable(text: str) -> str:
    """Return the text with escapes for what XML does not allow or a reader cannot see."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


class Canvas:
    """Collects the elements of one picture; the page is as large as what is drawn on it."""

    def __init__(self, title: str, description: str) -> None:
        self._title = printable(title)
        self._description = printable(description)
        self._elements: list[str] = []
        self._width = 0.0
        self._height = 0.0

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, *, colour: str | None = None, note: str = ""
    ) -> None:
        """Draw a rectangle of a class of the style, with an own colour, and a note that a pointer shows."""
        self._width, self._height = max(self._width, x + width), max(self._height, y + height)
        fill = f' style="fill:{colour}"' if colour else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"'
        title = f"<title>{escape(printable(note))}</title>" if note else ""
        self._elements.append(f'<rect class="{kind}" {place}{fill}>{title}</rect>' if title else
                              f'<rect class="{kind}" {place}{fill}/>')  # fmt: skip

    def text(self, x: float, y: float, text: str, kind: str = "", *, room: float | None = None) -> None:
        """Write a line that starts at x on the base line y; `room` is the width in which it has to fit."""
        shown = printable(text)
        size = 9.2 if kind == "title" else 6.8 if kind == "name" else 6.1
        if room is not None and len(shown) * size > room:
            shown = shown[: max(1, int(room / size) - 1)] + "\u2026"
        self._width = max(self._width, x + len(shown) * size)
        self._height = max(self._height, y + 4)
        attribute = f" class={quoteattr(kind)}" if kind else ""
        self._elements.append(f'<text{attribute} x="{x:g}" y="{y:g}">{escape(shown)}</text>')

    def render(self, margin: float) -> str:
        """Return the whole picture as an XML document."""
        width, height = self._width + margin, self._height + margin
        body = "\n".join(self._elements)
        return (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="title description">\n'
            f'<title id="title">{escape(self._title)}</title>\n'
            f'<desc id="description">{escape(self._description)}</desc>\n'
            f"<style>{_STYLE}</style>\n"
            f'<rect class="page" width="{width:g}" height="{height:g}"/>\n{body}\n</svg>\n'
        )


@dataclass(frozen=True, slots=True)
class _Frame:
    """The servers of one super pod or group, or of a table without any."""

    label: str
    servers: tuple[ServerPlace, ...]


def draw_table(table: RankTable, title: str) -> str:
    """Return an SVG document that shows `table` under the heading `title`; it needs no font, script or other file."""
    frames = _list_frames(table)
    colours = _colour_planes(table)
    size = f"{count_noun(table.world_size, 'rank')} on {count_noun(len(table.servers), 'server')}"
    canvas = Canvas(f"Rank table {title}", _describe(table, size))
    canvas.text(_MARGIN, _MARGIN + 14, f"{title}: {size}, version {table.dialect}, status {table.status}", "title")
    top = _draw_legend(canvas, table, colours, _MARGIN + 34)
    if len(table.servers) <= MAX_DETAILED:
        _draw_detailed(canvas, frames, colours, top)
    else:
        _draw_cells(canvas, frames, top)
    return canvas.render(_MARGIN)


def _describe(table: RankTable, size: str) -> str:
    servers = list_servers(table)[:MAX_DETAILED]
    parts = [
        f"{place.server.server_id} has ranks {_fold(place.server.ranks)}" for place in servers if place.server.ranks
    ]
    more = f"; and {len(table.servers) - MAX_DETAILED} more servers" if len(table.servers) > MAX_DETAILED else ""
    return f"{size}: {'; '.join(parts)}{more}."


def _list_frames(table: RankTable) -> list[_Frame]:
    """Return super pods, or else groups, in the order of their first rank; servers outside them are one frame."""
    noun = "super pod" if table.super_pods else "group"
    framed: dict[str | None, list[ServerPlace]] = {}
    for place in list_servers(table):
        framed.setdefault(place.super_pod_id if table.super_pods else place.server.group, []).append(place)
    if set(framed) <= {None}:
        return [_Frame("", tuple(places)) for places in framed.values()]
    return [
        _Frame(f"outside the {noun}s" if name is None else f"{noun} {name}", tuple(places))
        for name, places in framed.items()
    ]


def _colour_planes(table: RankTable) -> dict[int, str]:
    """Return the colour of each device number that has an address."""
    planes = enumerate(find_planes(table))
    return {
        device_id: PLANE_COLOURS[index % len(PLANE_COLOURS)]
        for index, plane in planes
        for device_id in plane.device_ids
    }


def _draw_legend(canvas: Canvas, table: RankTable, colours: dict[int, str], y: float) -> float:
    """Draw a line per plane and return where the picture goes on."""
    if len(table.servers) > MAX_DETAILED:
        canvas.text(_MARGIN, y, "one cell is one server; point at it for its name and ranks", "faint")
        return y + 12
    planes = find_planes(table)
    for plane in planes[: len(PLANE_COLOURS)]:
        canvas.box(_MARGIN, y - 9, 14, 11, "device", colour=colours[plane.device_ids[0]])
        canvas.text(_MARGIN + 20, y, f"{_name_devices(plane)}: network {plane.network}", "faint")
        y += 15
    if len(planes) > len(PLANE_COLOURS):
        canvas.text(_MARGIN, y, f"and {count_noun(len(planes) - len(PLANE_COLOURS), 'network')} more", "faint")
        y += 15
    return y


def _name_devices(plane: Plane) -> str:
    return f"{'devices' if len(plane.device_ids) > 1 else 'device'} {_fold(plane.device_ids)}"


def _draw_detailed(canvas: Canvas, frames: Sequence[_Frame], colours: dict[int, str], y: float) -> None:
    servers = [place for frame in frames for place in frame.servers]
    most = max((len(place.server.devices) for place in servers), default=0)
    per_row = min(max(most, 1), _MAX_CELLS_PER_ROW if len(servers) <= 2 else _CELLS_PER_ROW_OF_MANY)
    width = per_row * _CELL_WIDTH + 12
    height = _HEAD + max(1, ceil(most / per_row)) * (_CELL_HEIGHT + 4) + 4
    columns = _columns_for(frames, width + _GAP, height + _GAP)
    for frame in frames:
        y = _draw_frame_box(canvas, frame, columns, width, height, y)
        left = _MARGIN + (_GAP if frame.label else 0)
        for index, place in enumerate(frame.servers):
            row, column = divmod(index, columns)
            x = left + column * (width + _GAP)
            _draw_server(canvas, place, colours, (x, y + row * (height + _GAP)), (width, height), per_row)
        y += ceil(len(frame.servers) / columns) * (height + _GAP) + _GAP


def _draw_frame_box(canvas: Canvas, frame: _Frame, columns: int, width: float, height: float, y: float) -> float:
    """Draw the frame of a super pod around what will stand in it; return where its first server goes."""
    if not frame.label:
        return y
    rows = ceil(len(frame.servers) / columns)
    used = min(columns, len(frame.servers))
    canvas.box(_MARGIN, y, used * (width + _GAP) + _GAP, rows * (height + _GAP) + _HEAD, "pod")
    devices = sum(len(place.server.devices) for place in frame.servers)
    label = f"{frame.label}: {count_noun(len(frame.servers), 'server')}, {count_noun(devices, 'device')}"
    canvas.text(_MARGIN + _GAP, y + 15, label, "name", room=used * (width + _GAP))
    return y + _HEAD


def _draw_server(
    canvas: Canvas,
    place: ServerPlace,
    colours: dict[int, str],
    corner: tuple[float, float],
    size: tuple[float, float],
    per_row: int,
) -> None:
    (x, y), (width, height) = corner, size
    canvas.box(x, y, width, height, "server")
    address = f"  host {place.server.host_ip}" if place.server.host_ip else ""
    canvas.text(x + 6, y + 15, f"{place.server.server_id}{address}", "name", room=width - 12)
    for index, device in enumerate(sorted(place.server.devices, key=lambda device: device.rank_id)):
        row, column = divmod(index, per_row)
        left, top = x + 6 + column * _CELL_WIDTH, y + _HEAD + row * (_CELL_HEIGHT + 4)
        colour = colours.get(device.device_id, _NO_PLANE) if device.device_ip else _NO_PLANE
        canvas.box(left, top, _CELL_WIDTH - 4, _CELL_HEIGHT, "device", colour=colour, note=_note(place, device))
        canvas.text(left + 4, top + 12, f"rank {device.rank_id}", "name", room=_CELL_WIDTH - 10)
        canvas.text(left + 4, top + 24, f"device {device.device_id}", room=_CELL_WIDTH - 10)
        canvas.text(left + 4, top + 36, device.device_ip or "", room=_CELL_WIDTH - 8)


def _note(place: ServerPlace, device: Device) -> str:
    words = [f"rank {device.rank_id}: device {device.device_id} of {place.server.server_id}"]
    words += [device.device_ip] if device.device_ip else []
    words += [f"super device {device.super_device_id}"] if device.super_device_id else []
    return ", ".join(words)


def _draw_cells(canvas: Canvas, frames: Sequence[_Frame], y: float) -> None:
    columns = ceil(_columns_for(frames, _SMALL, _SMALL) / _MULTIPLE) * _MULTIPLE
    for number, frame in enumerate(frames):
        if frame.label:
            canvas.text(_MARGIN, y + 12, f"{frame.label}: {count_noun(len(frame.servers), 'server')}", "name")
            y += 18
        colour = PLANE_COLOURS[number % len(PLANE_COLOURS)]
        for index, place in enumerate(frame.servers):
            row, column = divmod(index, columns)
            note = f"{place.server.server_id}: ranks {_fold(place.server.ranks)}"
            x = _MARGIN + column * _SMALL
            canvas.box(x, y + row * _SMALL, _SMALL - 2, _SMALL - 2, "device", colour=colour, note=note)
        y += ceil(len(frame.servers) / columns) * _SMALL + _GAP


def _columns_for(frames: Sequence[_Frame], width: float, height: float) -> int:
    """Return how many servers stand side by side so that the page is somewhat wider than high."""
    largest = max((len(frame.servers) for frame in frames), default=1)
    total = sum(len(frame.servers) for frame in frames)
    return max(1, min(largest, ceil(sqrt(total * _WIDE * height / width))))


def _fold(numbers: Iterable[int]) -> str:
    return fold_numbers(numbers)
