"""`ranktable split`: one table into several."""

from __future__ import annotations

from pathlib import Path

import click

from ranktable.commands.outcome import Outcome
from ranktable.edit.split import SplitUnit
from ranktable.report.words import count_noun


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--per_server", is_flag=True, help="A table for every server.")
@click.option("--per_super_pod", is_flag=True, help="A table for every super pod.")
@click.option("--servers", type=click.IntRange(min=1), metavar="N", help="A table for every N servers of the list.")
@click.option("--keep_ranks", is_flag=True, help="Keep the ranks instead of counting every table from 0.")
@click.option("-o", "--output", required=True, metavar="DIR", help="Where the parts go: a folder that is new or empty.")
def split(
    file: str,
    per_server: bool,
    per_super_pod: bool,
    servers: int | None,
    keep_ranks: bool,
    output: str,
) -> Outcome:
    """Write the parts of FILE into a folder; - is standard input.

    Their names sort in the order of the table, so that `ranktable merge --order rank DIR/*.json` gives back what
    --keep_ranks split.
    """
    if sum((per_server, per_super_pod, servers is not None)) != 1:
        raise click.UsageError("give one of --per_server, --per_super_pod and --servers")
    by: SplitUnit | int = "super_pod" if per_super_pod else servers if servers is not None else "server"
    return _write_parts(file, by, keep_ranks, Path(output))


def _write_parts(file: str, by: SplitUnit | int, keep_ranks: bool, folder: Path) -> Outcome:
    from ranktable.codec import encode_table
    from ranktable.edit.split import split_table
    from ranktable.read import read_table
    from ranktable.write import write_folder

    found = split_table(read_table(file), by, keep_ranks=keep_ranks)
    write_folder(folder, ((part.name, encode_table(part.table).encode("ascii")) for part in found.parts))
    first, last = found.parts[0].name, found.parts[-1].name
    names = first if first == last else f"{first} to {last}"
    return Outcome(notes=(f"wrote {count_noun(len(found.parts), 'table')} to {folder}: {names}", *found.notes))
