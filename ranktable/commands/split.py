"""`ranktable split`: one table into several, or into shards that are small enough for a ConfigMap."""

from __future__ import annotations

from pathlib import Path

import click

from ranktable.commands.outcome import Outcome
from ranktable.edit.shards import COMPRESSIONS, Compression
from ranktable.edit.split import SplitUnit
from ranktable.report.words import count_noun

_MAX_CONFIG_MAP = 1024 * 1024


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--per_server", is_flag=True, help="A table for every server.")
@click.option("--per_super_pod", is_flag=True, help="A table for every super pod.")
@click.option("--servers", type=click.IntRange(min=1), metavar="N", help="A table for every N servers of the list.")
@click.option(
    "--max_bytes", metavar="SIZE", help="Shards of the file's bytes of at most SIZE (800KiB), to be joined again."
)
@click.option("--compress", type=click.Choice(COMPRESSIONS), help="How --max_bytes packs them.  [default: none]")
@click.option("--keep_ranks", is_flag=True, help="Keep the ranks instead of counting every table from 0.")
@click.option("-o", "--output", required=True, metavar="DIR", help="Where the parts go: a folder that is new or empty.")
def split(
    file: str,
    per_server: bool,
    per_super_pod: bool,
    servers: int | None,
    max_bytes: str | None,
    compress: Compression | None,
    keep_ranks: bool,
    output: str,
) -> Outcome:
    """Write the parts of FILE into a folder; - is standard input.

    Their names sort in the order of the table, so that `ranktable merge --order rank DIR/*.json` gives back what
    --keep_ranks split. With --max_bytes the parts are pieces of text with an index, for `ranktable join`.
    """
    if sum((per_server, per_super_pod, servers is not None, max_bytes is not None)) != 1:
        raise click.UsageError("give one of --per_server, --per_super_pod, --servers and --max_bytes")
    if max_bytes is None and compress is not None:
        raise click.UsageError("--compress goes with --max_bytes")
    if max_bytes is not None and keep_ranks:
        raise click.UsageError("--keep_ranks does not go with --max_bytes: shards are pieces of the same text")
    folder = Path(output)
    if max_bytes is not None:
        return _write_shards(file, max_bytes, compress or "none", folder)
    by: SplitUnit | int = "super_pod" if per_super_pod else servers if servers is not None else "server"
    return _write_parts(file, by, keep_ranks, folder)


def _write_parts(file: str, by: SplitUnit | int, keep_ranks: bool, folder: Path) -> Outcome:
    from ranktable.codec import encode_table
    from ranktable.edit.split import split_table
    from ranktable.read import read_table
    from ranktable.write_folder import write_folder

    found = split_table(read_table(file), by, keep_ranks=keep_ranks)
    write_folder(folder, ((part.name, encode_table(part.table).encode("ascii")) for part in found.parts))
    first, last = found.parts[0].name, found.parts[-1].name
    names = first if first == last else f"{first} to {last}"
    return Outcome(notes=(f"wrote {count_noun(len(found.parts), 'table')} to {folder}: {names}", *found.notes))


def _write_shards(file: str, max_bytes: str, compress: Compression, folder: Path) -> Outcome:
    from ranktable.codec import decode_table
    from ranktable.edit.shards import parse_size, shard_bytes, write_shards
    from ranktable.reading.document import parse_document
    from ranktable.reading.source import read_source

    size = parse_size(max_bytes)
    name, data = read_source(file)
    decode_table(parse_document(data, name))  # whoever joins the shards is to get a rank table
    sharded = shard_bytes(data, size, compress)
    index = write_shards(sharded, folder)
    shown = f"{count_noun(len(sharded.shards), 'shard')} of at most {size} bytes"
    too_large = ("warning: a ConfigMap holds at most 1 MiB",) if size > _MAX_CONFIG_MAP else ()
    joining = f"put them together with: ranktable join {index} -o FILE"
    return Outcome(notes=(f"wrote {shown} and {index}", joining, *too_large))
