"""`ranktable merge`: one table out of the tables of several hosts."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ranktable.commands.outcome import Outcome, deliver_table, profile_options
from ranktable.edit.ordering import MERGE_ORDERS, MergeOrder
from ranktable.edit.result import Edited
from ranktable.errors import MergeError
from ranktable.model import RankTable
from ranktable.profile import build_profile

_SHOWN = 20


@click.command()
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
    from ranktable.sources.hostfile import read_hostfile

    try:
        if is_global:
            if order is not None or hostfile is not None:
                raise click.UsageError("--global sorts by cluster and job name; leave --order and --hostfile out")
            return deliver_table(_merge_global(files, allow_initializing), output)
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
        return deliver_table(edited, output)
    except MergeError as error:
        return Outcome(notes=_list_conflicts(error.conflicts), exit_code=error.exit_code)


def _read(name: str) -> RankTable:
    """Return the table whatever its status: whether that matters is for the merge to say."""
    from ranktable.codec import decode_table
    from ranktable.reading.source import read_document

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
