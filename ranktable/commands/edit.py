"""One table out of several, and several out of one: the commands merge, select and split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ranktable.commands import Outcome, deliver_table, profile_options
from ranktable.edit import Edited
from ranktable.edit.parts import SplitUnit
from ranktable.errors import MergeError
from ranktable.model import RankTable
from ranktable.ordering import MERGE_ORDERS, MergeOrder
from ranktable.profile import build_profile
from ranktable.text import count_noun

_SHOWN = 20


@click.command(short_help="Write one table of all servers of several.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", metavar="FILE", help="Where to write; - or nothing is standard output.")
@click.option(
    "--order",
    type=click.Choice(MERGE_ORDERS),
    help="Order of servers and ranks; Ascend readers ask for server_id, the string order. `rank` keeps every rank."
    "  [default: server_id]",
)
@click.option(
    "--hostfile", metavar="FILE", help="Host list, a host per line, whose order is taken (--order host_file)."
)
@click.option("--allow_initializing", is_flag=True, help='Merge also tables whose status is not "completed".')
@click.option(
    "--global",
    "is_global",
    is_flag=True,
    help="Write Volcano's table of several clusters (version 1.4); each FILE is CLUSTER=FILE or CLUSTER/JOB=FILE.",
)
@profile_options
def merge(
    files: tuple[str, ...],
    output: str | None,
    order: MergeOrder | None,
    hostfile: str | None,
    allow_initializing: bool,
    is_global: bool,
    device_target: str,
    chip: str | None,
) -> Outcome:
    """Write one table of all servers of the FILEs, ranks 0 to n-1; - is standard input.

    A server, an address or a number of a super pod that stands twice is an error, and nothing is written. Super pods,
    clusters and groups of equal names are joined.
    """
    from ranktable.edit.merge import merge_tables
    from ranktable.sources.collect import read_hostfile

    try:
        if is_global:
            if order is not None or hostfile is not None:
                raise click.UsageError("--global sorts by cluster and job name; leave --order and --hostfile out")
            merged = _merge_global(files, allow_initializing)
            return deliver_table(merged.table, merged.notes, output)
        chosen = order or ("host_file" if hostfile is not None else "server_id")
        if chosen == "host_file" and hostfile is None:
            raise click.UsageError("--order host_file needs --hostfile FILE")
        if chosen != "host_file" and hostfile is not None:
            raise click.UsageError("--hostfile goes with --order host_file")
        hosts = None if hostfile is None else [host.name for host in read_hostfile(hostfile)]
        tables = [_read(name) for name in files]
        build_profile(device_target, chip)  # refuses a chip of another target
        edited = merge_tables(
            tables,
            names=files,
            order=chosen,
            hosts=hosts,
            allow_initializing=allow_initializing,
            device_target=device_target,
            chip=chip,
        )
        return deliver_table(edited.table, edited.notes, output)
    except MergeError as error:
        return Outcome(notes=_list_conflicts(error.conflicts), exit_code=error.exit_code)


def _read(name: str) -> RankTable:
    """Return the table whatever its status: whether that matters is for the merge to say."""
    from ranktable.codec import decode_table
    from ranktable.reading.document import read_document

    return decode_table(read_document(name))


def _merge_global(arguments: Sequence[str], allow_initializing: bool) -> Edited:
    from ranktable.edit.global_table import ClusterPart, merge_clusters

    parts = []
    for argument in arguments:
        name, equals, path = argument.partition("=")
        cluster_id, _, job = name.partition("/")
        if not (equals and cluster_id and path):
            raise click.UsageError(f"{argument!r} does not name its cluster; write CLUSTER=FILE or CLUSTER/JOB=FILE")
        parts.append(ClusterPart(cluster_id, job, _read(path), path))
    return merge_clusters(parts, allow_initializing=allow_initializing)


def _list_conflicts(conflicts: Sequence[str]) -> tuple[str, ...]:
    lines = [f"error: {conflict}" for conflict in conflicts[:_SHOWN]]
    more = [f"and {len(conflicts) - _SHOWN} more"] if len(conflicts) > _SHOWN else []
    return (*lines, *more, "nothing is written")


@click.command(short_help="Write the table of some of the devices.")
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
    from ranktable.codec import read_table
    from ranktable.edit.parts import parse_ranges, select_devices

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
    return deliver_table(edited.table, edited.notes, output)


def _parse_servers(text: str, table: RankTable) -> list[str]:
    """Return the ids of a host list; an id with a sign that host lists do not have is taken as it is."""
    from ranktable.hosts.host_list import parse_names

    if any(server.server_id == text for server in table.servers):
        return [text]
    return parse_names(text, "--servers")


@click.command(short_help="Write the parts of a table into a folder.")
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
    from ranktable.codec import encode_table, read_table
    from ranktable.edit.parts import split_table
    from ranktable.files import write_folder

    found = split_table(read_table(file), by, keep_ranks=keep_ranks)
    write_folder(folder, ((part.name, encode_table(part.table).encode("ascii")) for part in found.parts))
    first, last = found.parts[0].name, found.parts[-1].name
    names = first if first == last else f"{first} to {last}"
    return Outcome(notes=(f"wrote {count_noun(len(found.parts), 'table')} to {folder}: {names}", *found.notes))
