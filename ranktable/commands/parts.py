"""The commands select and split."""

from __future__ import annotations

from pathlib import Path

import click

from ranktable.commands.outcome import Outcome, deliver_table
from ranktable.edit.split import SplitUnit
from ranktable.model import RankTable
from ranktable.report.words import count_noun


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--ranks", metavar="LIST", help="Global ranks, such as 0-7,12.")
@click.option("--servers", metavar="LIST", help="Server ids, such as a,node[1-4].")
@click.option("--devices", metavar="LIST", help="Device ids on every server, such as 0-3.")
@click.option("--keep_ranks", is_flag=True, help="Keep the ranks instead of counting from 0: a table to merge again.")
@click.option("-o", "--output", metavar="FILE", help="Where to write; - or nothing is standard output.")
def select(
    file: str, ranks: str | None, servers: str | None, devices: str | None, keep_ranks: bool, output: str | None
) -> Outcome:
    """Write the table of the devices of FILE that every given choice names; - is standard input.

    Super pods, clusters and groups are cut down too; the ranks are counted anew from 0 in the order that they had.
    """
    from ranktable.edit.select import parse_ranges, select_devices
    from ranktable.read import read_table

    if ranks is None and servers is None and devices is None:
        raise click.UsageError("nothing is chosen; give --ranks, --servers or --devices")
    table = read_table(file)
    edited = select_devices(
        table,
        ranks=None if ranks is None else parse_ranges(ranks, "ranks"),
        servers=None if servers is None else _parse_servers(servers, table),
        devices=None if devices is None else parse_ranges(devices, "devices"),
        keep_ranks=keep_ranks,
    )
    return deliver_table(edited, output)


def _parse_servers(text: str, table: RankTable) -> list[str]:
    """Return the ids of a host list; an id with a sign that host lists do not have is taken as it is."""
    from ranktable.hostlist.host_list import HostList

    if any(server.server_id == text for server in table.servers):
        return [text]
    hosts = HostList.parse(text)
    counted = next((host for host in hosts if host.num_devices is not None), None)
    if counted is not None:
        raise click.UsageError(f"--servers {text[:60]!r} has a number of devices; choose them with --devices")
    return [host.name for host in hosts]


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
