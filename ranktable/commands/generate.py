"""`ranktable generate`: a table out of hosts, devices and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ranktable.commands.outcome import Outcome
from ranktable.generate import SERVER_ORDERS, ServerOrder, build_table, default_file_name
from ranktable.model import RankTable
from ranktable.sources.hosts import HostList, parse_numbers
from ranktable.validate import validate_table


@click.command()
@click.option("--hosts", required=True, metavar="LIST", help="Hosts with device counts: a:8,b:8 or node[01-16]:8.")
@click.option("--devices", metavar="IDS", help="Device ids used on every host, such as 4-7, in place of counts.")
@click.option(
    "-o", "--output", metavar="FILE", help="Where to write; - is standard output.  [default: rank_table_<n>pcs.json]"
)
@click.option(
    "--order",
    type=click.Choice(SERVER_ORDERS),
    default="server_id",
    show_default=True,
    help="Order of the ranks over the hosts; Ascend readers demand server_id, the string order.",
)
@click.option("--device_ips", metavar="PATTERN|FILE", help="192.168.{device+1}.{server+10}, or a YAML file of lists.")
def generate(
    hosts: str, devices: str | None, output: str | None, order: ServerOrder, device_ips: str | None
) -> Outcome:
    """Write a rank table for HOSTS with contiguous ranks. Without --device_ips the devices get no device_ip."""
    from ranktable.codec import encode_table
    from ranktable.write import write_table

    servers = _servers_of(HostList.parse(hosts), devices)
    table = build_table(servers, device_ips=_device_ips_of(device_ips, servers), order=order)
    notes = _notes_on(table, order)
    if output == "-":
        return Outcome(encode_table(table), notes)
    target = output or default_file_name(table)
    if output is None and Path(target).exists():
        raise click.UsageError(f"{target} is there already; name it with -o to replace it")
    write_table(target, table)
    return Outcome(notes=(f"wrote {target}: {len(table.servers)} servers, {table.world_size} devices", *notes))


def _servers_of(hosts: HostList, devices: str | None) -> list[tuple[str, Sequence[int]]]:
    device_ids = parse_numbers(devices) if devices is not None else None
    servers: list[tuple[str, Sequence[int]]] = []
    for host in hosts:
        if device_ids is None and host.num_devices is None:
            raise click.UsageError(
                f"host {host.name!r} has no number of devices; write {host.name}:8, or give --devices"
            )
        if device_ids is not None and host.num_devices not in (None, len(device_ids)):
            raise click.UsageError(
                f"host {host.name!r} has {host.num_devices} devices, --devices lists {len(device_ids)}; leave one out"
            )
        servers.append((host.name, device_ids if device_ids is not None else range(host.num_devices or 0)))
    return servers


def _device_ips_of(option: str | None, servers: Sequence[tuple[str, Sequence[int]]]) -> dict[str, list[str]] | None:
    from ranktable.sources.device_ips import expand_pattern, is_pattern, read_device_ips

    if option is None:
        return None
    return expand_pattern(option, servers) if is_pattern(option) else read_device_ips(option)


def _notes_on(table: RankTable, order: ServerOrder) -> tuple[str, ...]:
    """Say which order was used, and what keeps the table from use on Ascend."""
    meaning = {
        "server_id": "the string order of the server ids",
        "numeric": "numeric order",
        "given": "the order given",
    }
    first = table.servers[0].server_id
    notes = [f"ranks follow {meaning[order]}; rank 0 is on {first}"] if len(table.servers) > 1 else []
    problems = validate_table(table)
    if any(problem.rule == "R16" for problem in problems):
        notes.append("no device_ip was given: right for cpu and gpu, while Ascend needs --device_ips")
    if any(problem.rule == "R11" for problem in problems):
        notes.append("warning: Ascend readers demand --order server_id")
    return tuple(notes)
