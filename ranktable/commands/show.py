"""What files and tables are: the commands show, detect and rules."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from ranktable.codec.detect import DIALECT_NAMES
from ranktable.commands import FORMAT, Outcome, chip_option, judge_each, reader_option, worst_of
from ranktable.model import RankTable
from ranktable.report.listing import render_rules, render_table, rules_as_json
from ranktable.rules import registered_rules
from ranktable.text import render_json


@click.command(short_help="Print servers, ranks and devices.")
@click.argument("file", metavar="FILE")
@click.option("--ranks", is_flag=True, help="A line per rank.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Who is rank N: its server, device, addresses.")
@click.option("--all", "show_all", is_flag=True, help="A line per server, however many there are.")
@FORMAT
@click.option("--svg", metavar="OUT", help="Write a picture to this file instead; - is standard output.")
def show(file: str, ranks: bool, rank: int | None, show_all: bool, form: str, svg: str | None) -> Outcome:
    """Print the servers of FILE with their ranks and devices, also while its producer works on it; - is stdin."""
    from ranktable.codec import decode_table
    from ranktable.reading.document import read_document

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
    from ranktable.report.overview import find_places, list_places, overview_as_json, place_as_json

    if rank is not None:
        return [place_as_json(place) for place in find_places(table, rank)]
    if ranks:
        return [place_as_json(place) for place in list_places(table)]
    return overview_as_json(table)


def _as_text(table: RankTable, *, ranks: bool, rank: int | None, show_all: bool) -> str:
    from ranktable.report.overview import find_places, render_overview, render_place

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
    from ranktable.files import write_bytes
    from ranktable.report.picture import draw_table

    text = draw_table(table, title=Path(file).name if file != "-" else "rank table")
    if svg == "-":
        return Outcome(text)
    write_bytes(svg, text.encode("utf-8"))
    return Outcome(notes=(f"wrote {svg}",))


@click.command(short_help="Say what a file is, and who reads it.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@FORMAT
def detect(files: tuple[str, ...], form: str) -> Outcome:
    """Say what each FILE is, why, who reads it, and whether it can be read here; - is standard input.

    The exit status is 0 when every file is of a known kind (also one that is no rank table), 1 when one is not or is
    no JSON, 2 when one cannot be opened.
    """
    from ranktable.codec import detect_file
    from ranktable.report.listing import kind_as_json, render_kind
    from ranktable.text import render_json

    kinds = list(judge_each(files, form, detect_file))
    worst = worst_of(found.exit_code for _, found in kinds)
    if form == "json":
        return Outcome(render_json([kind_as_json(*kind) for kind in kinds]), exit_code=worst)
    return Outcome("".join(f"{render_kind(found)}\n" for _, found in kinds), exit_code=worst)


@click.command(short_help="List the rules of validate.")
@FORMAT
@click.option("--dialect", type=click.Choice(DIALECT_NAMES), metavar="NAME", help="Only the rules of this dialect.")
@chip_option("Only the rules that hold for this chip.")
@reader_option("Only the rules that this reader's tables are held to.")
def rules(form: str, dialect: str | None, chip: str | None, profile: str | None) -> Outcome:
    """List the rules that `validate` holds tables to: id, severity, chips, profiles, and what each asks for."""
    chosen = [
        entry
        for entry in registered_rules()
        if (dialect is None or dialect in entry.dialects)
        and (chip is None or not entry.chips or chip in entry.chips)
        and (profile is None or not entry.readers or profile in entry.readers)
    ]
    return Outcome(rules_as_json(chosen) if form == "json" else render_rules(chosen))
