"""`ranktable generate`: a table out of hosts, devices and addresses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ranktable.bounded_text import TextError, load_yaml
from ranktable.commands import Outcome, choice_option, deliver_table, target_option
from ranktable.errors import BuildError, HostListError
from ranktable.files import decode_text, read_bytes, read_source
from ranktable.generate import (
    SERVER_ORDERS,
    HostInventory,
    ServerOrder,
    assemble_table,
    default_file_name,
    devices_of,
    expand_pattern,
    give_super_device_ids,
    parse_super_pods,
    take_hosts,
)
from ranktable.hosts.host_list import ListedHost, parse_device_ids, parse_hosts, select_hosts
from ranktable.hosts.hostfile import FAMILIES, MAX_BYTES, Family, parse_hostfile
from ranktable.kinds import dialect_of, written_names
from ranktable.model import RankTable
from ranktable.problem import Problem
from ranktable.profile import ANY_TARGET, CHIPS, Profile, build_profile
from ranktable.validate import hold_to_rules, judge_table

_MEANINGS = {"server_id": "the string order of the server ids", "given": "the order given"}
_NEEDS_ASCEND = "no device_ip was given: right for cpu and gpu, while Ascend needs --device_ips or --probe"


@click.command(short_help="Write a table from a list of hosts, a host file or this host.")
@click.option("--hosts", metavar="LIST", help="Hosts with device counts: a:8,b:8 or node[01-16]:8.")
@click.option("--hostfile", metavar="FILE", help="Hosts from a file of another launcher; - is standard input.")
@click.option(
    "--hostfile_format",
    type=click.Choice(FAMILIES),
    help="Whose file it is, where lines of one host come again: openmpi and mpich (and Intel) add them up,"
    " deepspeed refuses them.  [default: by what stands in it]",
)
@click.option("--probe", is_flag=True, help="Ask this host: /dev, /etc/hccn.conf, hccn_tool, npu-smi.")
@click.option("--root", metavar="DIR", default="/", help="With --probe: where the host's /dev and /etc are.")
@click.option("--server_id", metavar="ID", help="With --probe: the id of this host, not its main address.")
@click.option("--devices", metavar="IDS", help="Device ids used on every host, such as 4-7, in place of counts.")
@click.option(
    "--device_ips", metavar="PATTERN|FILE", help="192.168.{device+1}.{server+10}, or a YAML file of lists by host."
)
@click.option("--include", metavar="FILTER", help="Only these hosts and devices: a:0,1@b.")
@click.option("--exclude", metavar="FILTER", help="All but these hosts and devices: a:0,1@b.")
@click.option(
    "--order",
    type=click.Choice(SERVER_ORDERS),
    default="server_id",
    show_default=True,
    help="Order of the ranks over the hosts; server_id is the string order that Ascend demands.",
)
@click.option(
    "--version",
    type=click.Choice(written_names()),
    default=written_names()[0],
    show_default=True,
    help="1.2: super pods.",
)
@click.option("--super_pods", metavar="ID=HOSTS", multiple=True, help="For 1.2: the hosts of a super pod: 0=node[1-2].")
@click.option("--super_device_ids", metavar="FILE", help="For 1.2: a YAML file of SDID lists by host.")
@target_option("Refuse what validate would for it; gpu and cpu get host_ip and no device_ip.", default=None)
@choice_option("--chip", CHIPS, "Refuse what validate would for this chip.")
@click.option(
    "-o", "--output", metavar="FILE", help="Where to write; - is standard output.  [default: rank_table_<n>pcs.json]"
)
@click.option("--force", is_flag=True, help="Replace the default file if it is there.")
def generate(
    output: str | None,
    force: bool,
    order: ServerOrder,
    version: str,
    super_pods: tuple[str, ...],
    super_device_ids: str | None,
    device_target: str | None,
    chip: str | None,
    **source: Any,
) -> Outcome:
    """Write a rank table with contiguous ranks, out of --hosts, --hostfile or --probe.

    Without a source of addresses the devices get no device_ip; none is made up.
    """
    target = device_target or ("ascend" if chip else None)
    profile = None if target is None else build_profile(target, chip)
    has_pods = dialect_of(version).reads_super_pods
    if not has_pods and (super_pods or super_device_ids):
        raise click.UsageError("super pods are part of version 1.2; give --version 1.2, or leave them out")
    hosts, probed_target, notes = _find_hosts(device_target=device_target, asks_super_pod=has_pods, **source)
    if profile is None and probed_target is not None:
        profile = build_profile(probed_target)
    if super_device_ids is not None:
        hosts = give_super_device_ids(hosts, read_super_device_ids(super_device_ids))
    hosts = _choose(hosts, source["include"], source["exclude"])
    pods = parse_super_pods(super_pods) if super_pods else None
    table = assemble_table(hosts, order=order, version=version, profile=profile, super_pods=pods)
    problems = hold_to_rules(table, profile or ANY_TARGET)
    problems = problems if profile else judge_table(table, Profile())  # what keeps it from use on Ascend
    notes = (*notes, *_notes_on(table, order, problems, has_target=profile is not None))
    path = output or default_file_name(table)
    if output is None and not force and Path(path).exists():
        raise click.UsageError(f"{path} is there already; name it with -o to replace it, or give --force")
    return deliver_table(table, notes, path)


def _find_hosts(
    *,
    hosts: str | None,
    hostfile: str | None,
    hostfile_format: Family | None,
    probe: bool,
    root: str,
    server_id: str | None,
    devices: str | None,
    device_ips: str | None,
    device_target: str | None,
    asks_super_pod: bool,
    **_filters: str | None,
) -> tuple[tuple[HostInventory, ...], str | None, tuple[str, ...]]:
    """Return the hosts, the target that their source knows, and what is worth a word."""
    named = {"--hosts": hosts is not None, "--hostfile": hostfile is not None, "--probe": probe}
    given = [name for name, is_given in named.items() if is_given]
    if len(given) != 1:
        what = f"{' and '.join(given)} both name the hosts" if given else "no source of hosts is named"
        raise click.UsageError(f"{what}; give one of {', '.join(named)}")
    if not probe and (server_id is not None or root != "/"):
        raise click.UsageError("--root and --server_id go with --probe; leave them out")
    if probe:
        from ranktable.local_host import probe_host

        if device_ips is not None:
            raise click.UsageError("--probe and --device_ips both give the addresses of devices; give one of them")
        ids = None if devices is None else parse_device_ids(devices, "--devices")
        host, target, notes = probe_host(
            Path(root), device_target, ids, server_id=server_id, asks_super_pod=asks_super_pod
        )
        return (host,), target, notes
    listed = parse_hosts(hosts, ListedHost) if hosts is not None else _read_hostfile(str(hostfile), hostfile_format)
    pairs = [(host.name, devices_of(host, devices)) for host in listed]
    addresses = None
    if device_ips is not None and "{" in device_ips:
        addresses = expand_pattern(device_ips, pairs)
    elif device_ips is not None:
        addresses = _read_lists(device_ips, "addresses", "192.168.1.1")
    found = take_hosts(pairs, addresses)
    return tuple(replace(h, host_ip=e.address or None) for h, e in zip(found, listed, strict=True)), None, ()


def _read_hostfile(path: str, family: Family | None) -> tuple[ListedHost, ...]:
    """Return the hosts of the file at `path` (`-` is standard input); raises ReadError, HostListError."""
    name, data = read_source(path)
    source = f"--hostfile {name}"
    try:
        text = decode_text(data, MAX_BYTES)
    except OSError as error:
        raise HostListError(
            str(error.strerror), "write UTF-8 text, and ranges: node[0001-1024] slots=8", source
        ) from error
    return parse_hostfile(text, ListedHost, source, family)


def read_super_device_ids(path: str) -> dict[str, list[str]]:
    """Return the SDIDs in a YAML or JSON file of lists by server id; raises ReadError, BuildError."""
    return _read_lists(path, "SDIDs", "37748736")


def _read_lists(path: str, what: str, example: str) -> dict[str, list[str]]:
    try:
        loaded = load_yaml(read_bytes(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BuildError(f"{path} is not YAML: not UTF-8", f"write lines such as  host-a: [{example}]") from error
    except TextError as error:
        raise BuildError(f"{path}: {error.place}{error.problem}", error.remedy) from error
    kinds = (str, int) if example.isdecimal() else (str,)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(items, list) and all(type(item) in kinds for item in items)
        for name, items in loaded.items()
    ):
        raise BuildError(f"{path} does not map server ids to lists of {what}", f"write  host-a: [{example}]")
    return {server_id: [str(item) for item in items] for server_id, items in loaded.items()}


def _choose(hosts: tuple[HostInventory, ...], include: str | None, exclude: str | None) -> tuple[HostInventory, ...]:
    """Leave out what --include and --exclude leave out."""
    if include is None and exclude is None:
        return hosts
    ids = [tuple(device.device_id for device in host.devices) for host in hosts]
    listed = [ListedHost(host.server_id, len(each), each) for host, each in zip(hosts, ids, strict=True)]
    left = {entry.name: entry.device_ids for entry in select_hosts(listed, include, exclude)}
    return tuple(
        replace(host, devices=tuple(device for device in host.devices if device.device_id in left[host.server_id]))
        for host in hosts
        if host.server_id in left
    )


def _notes_on(table: RankTable, order: ServerOrder, problems: tuple[Problem, ...], *, has_target: bool) -> list[str]:
    """Say which order was used, and what keeps the table from use on Ascend."""
    notes = []
    if len(table.servers) > 1:
        notes.append(f"ranks follow {_MEANINGS[order]}; rank 0 is on {table.servers[0].server_id}")
    rules = {problem.rule for problem in problems}
    if "R16" in rules and not has_target:
        notes.append(_NEEDS_ASCEND)
    if "R11" in rules:
        notes.append("warning: Ascend readers demand --order server_id")
    rest = [problem for problem in problems if problem.rule not in ("R11", "R16") and (problem.is_error or has_target)]
    for rule in dict.fromkeys(problem.rule for problem in rest):
        same = [problem for problem in rest if problem.rule == rule]
        more = f" (and {len(same) - 1} more)" if len(same) > 1 else ""
        where = "" if has_target else " on Ascend"
        notes.append(f"{same[0].severity}{where}: {rule} {same[0].subject}: {same[0].message}{more}")
    return notes
