"""`ranktable show`: a table as a person reads it."""

from __future__ import annotations

import click

from ranktable.commands.outcome import Outcome
from ranktable.report.listing import render_table


@click.command()
@click.argument("file", metavar="FILE")
def show(file: str) -> Outcome:
    """Print the ranks of FILE as plain columns; - is standard input."""
    from ranktable.reading.read import read_table

    return Outcome(render_table(read_table(file)) + "\n")
