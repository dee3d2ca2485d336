"""`ranktable join`: shards of a table put together again."""

from __future__ import annotations

from pathlib import Path

import click

from ranktable.commands.outcome import Outcome


@click.command()
@click.argument("index", metavar="INDEX")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where the table goes; - is standard output.")
def join(index: str, output: str) -> Outcome:
    """Put together the shards that INDEX lists, which lie beside it, and write the table byte for byte.

    Sizes and sha256 of every shard and of the whole must be those of the index; otherwise nothing is written, and a
    file that is there stays as it is.
    """
    from ranktable.edit.shards import join_shards
    from ranktable.reading.document import parse_document
    from ranktable.write import write_bytes

    data = join_shards(Path(index))
    if output == "-":
        return Outcome(parse_document(data, index).text)
    write_bytes(output, data)
    return Outcome(notes=(f"wrote {output}: {len(data)} bytes, as {index} says",))
