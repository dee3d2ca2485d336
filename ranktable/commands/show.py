"""`ranktable show`: a table as a person reads it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from ranktable.codec.layout import render_json
from ranktable.commands.outcome import Outcome
from ranktable.model import RankTable
from ranktable.report.listing import render_table


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--ranks", is_flag=True, help="A line per rank.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Who is rank N: its server, device, addresses.")
@click.option("--all", "show_all", is_flag=True, help="A line per server, however many there are.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--svg", metavar="OUT", help="Write a picture to this file instead; - is standard output.")
def show(file: str, ranks: bool, rank: int | None, show_all: bool, form: str, svg: str | None) -> Outcome:
    """Print the servers of FILE with their ranks and devices, also while its producer works on it; - is stdin."""
    from ranktable.codec import decode_table
    from ranktable.reading.source import read_document

    if (rank is not None) + ranks + (svg is not None) + show_all > 1:
        raise click.UsageError("--ranks, --rank, --all and --svg exclude each other; give one of them")
    if form == "json" and (show_all or svg is not None):
        raise click.UsageError("--format json goes with --ranks and --rank only; by itself it lists every server")
    table = decode_table(read_document(file))
    if svg is not None:
        return _draw(table, file, svg)
    if form == "json":
        return Outcome(render_json(_as_json(table, ranks=ranks, rank=rank)))
    return Outcome(_as_text(table, ranks=ranks, rank=rank, show_all=show_all) + "\n")


def _as_json(table: RankTable, *, ranks: bool, rank: int | None) -> object:
    from ranktable.report.overview import overview_as_json
    from ranktable.report.places import find_places, list_places, place_as_json

    if rank is not None:
        return [place_as_json(place) for place in find_places(table, rank)]
    if ranks:
        return [place_as_json(place) for place in list_places(table)]
    return overview_as_json(table)


def _as_text(table: RankTable, *, ranks: bool, rank: int | None, show_all: bool) -> str:
    from ranktable.report.overview import render_overview
    from ranktable.report.places import find_places, render_place

    if rank is not None:
        return "\n\n".join(render_place(place) for place in find_places(table, rank))
    if ranks:
        return render_table(table)
    return render_overview(table, width=_terminal_width(), show_all=show_all)


def _terminal_width() -> int | None:
    """Return the width of the terminal, or COLUMNS; None when the output goes to a file or a pipe."""
    if not os.environ.get("COLUMNS") and not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def _draw(table: RankTable, file: str, svg: str) -> Outcome:
    from ranktable.report.picture import draw_table
    from ranktable.write import write_bytes

    text = draw_table(table, title=Path(file).name if file != "-" else "rank table")
    if svg == "-":
        return Outcome(text)
    write_bytes(svg, text.encode("utf-8"))
    return Outcome(notes=(f"wrote {svg}",))
