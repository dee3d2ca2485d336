"""`ranktable diff`: what two tables say differently."""

from __future__ import annotations

import click

from ranktable.commands.outcome import Outcome
from ranktable.errors import EXIT_PROBLEMS, EXIT_USAGE, EXIT_VALID, RankTableError


@click.command()
@click.argument("first", metavar="FIRST")
@click.argument("second", metavar="SECOND")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def diff(first: str, second: str, form: str) -> Outcome:
    """Compare what FIRST and SECOND say; the order of servers, devices and keys does not count.

    Exit status: 0 they say the same, 1 they differ, 2 one of them cannot be read. One of them may be -.
    """
    from ranktable.codec import decode_table
    from ranktable.codec.layout import render_json
    from ranktable.compare.diff import diff_tables
    from ranktable.reading.source import read_document
    from ranktable.report.differences import changes_as_json, render_changes

    if first == second == "-":
        raise click.UsageError("only one of the two can be standard input")
    try:
        tables = [decode_table(read_document(name)) for name in (first, second)]
    except RankTableError as error:
        return Outcome(notes=(f"error: {error}",), exit_code=EXIT_USAGE)
    changes = diff_tables(*tables)
    is_json = form == "json"
    text = render_json(changes_as_json(changes, first, second)) if is_json else render_changes(changes, first, second)
    return Outcome(text, exit_code=EXIT_PROBLEMS if changes else EXIT_VALID)
