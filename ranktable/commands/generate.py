"""`ranktable generate`: a table out of hosts, devices and addresses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ranktable.commands import Outcome, chip_option, deliver_table, target_option
from ranktable.generate import (
    SERVER_ORDERS,
    HostInventory,
    ServerOrder,
    assemble_table,
    default_file_name,
)
from ranktable.hosts.hostfile import FAMILIES
from ranktable.kinds import dialect_of, written_names
from ranktable.model import RankTable
from ranktable.problem import Problem
from ranktable.profile import ANY_TARGET, Profile, build_profile
from ranktable.sources.collect import CollectedHosts, SourceRequest, collect_hosts
from ranktable.validate import hold_to_rules, judge_table

_MEANINGS = {
    "server_id": "the string order of the server ids",
    "numeric": "numeric order",
    "given": "the order given",
    "rank_index": "hccl/rankIndex",
}
_NEEDS_ASCEND = "no device_ip was given: right for cpu and gpu, while Ascend needs --device_ips or --hccn_conf"


def _options(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Add the options of the command, in the order of its help."""
    options = (
        click.option("--hosts", metavar="LIST", help="Hosts with device counts: a:8,b:8 or node[01-16]:8."),
        click.option("--hostfile", metavar="FILE", help="Hosts from a file of another launcher; - is standard input."),
        click.option(
            "--hostfile_format",
            type=click.Choice(FAMILIES),
            help="Whose file it is, where lines of one host come again: openmpi and mpich (and Intel) add them up,"
            " deepspeed refuses them.  [default: by what stands in it]",
        ),
        click.option(
            "--slurm", is_flag=True, help="Hosts of this Slurm job: SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE."
        ),
        click.option(
            "--pod_annotations",
            metavar="FILE",
            help="Hosts and devices from kubectl get pods -o json|yaml; - is stdin.",
        ),
        click.option("--probe", is_flag=True, help="Ask this host: /dev, /etc/hccn.conf, hccn_tool, npu-smi."),
        click.option("--root", metavar="DIR", default="/", help="With --probe: where the host's /dev and /etc are."),
        click.option("--server_id", metavar="ID", help="With --probe: the id of this host, not its main address."),
        click.option(
            "--hccn_conf",
            metavar="DIR",
            help="Devices and addresses from DIR/HOST.conf (hccn.conf), DIR/HOST.txt (tools).",
        ),
        click.option(
            "--devices", metavar="IDS", help="Device ids used on every host, such as 4-7, in place of counts."
        ),
        click.option(
            "--device_ips", metavar="PATTERN|FILE", help="192.168.{device+1}.{server+10}, or a YAML file of lists."
        ),
        click.option("--include", metavar="FILTER", help="Only these hosts and devices: a:0,1@b."),
        click.option("--exclude", metavar="FILTER", help="All but these hosts and devices: a:0,1@b."),
        click.option(
            "--order",
            type=click.Choice(SERVER_ORDERS),
            help="Order of the ranks over the hosts.  [default: server_id, the string order that Ascend demands;"
            " rank_index for pods]",
        ),
        click.option(
            "--version",
            type=click.Choice(written_names()),
            default=written_names()[0],
            show_default=True,
            help="1.2: super pods.",
        ),
        click.option(
            "--super_pods", metavar="ID=HOSTS", multiple=True, help="For 1.2: the hosts of a super pod: 0=node[1-2]."
        ),
        click.option("--super_device_ids", metavar="FILE", help="For 1.2: a YAML file of SDID lists by host."),
        target_option("Refuse what validate would for it; gpu and cpu get host_ip and no device_ip.", default=None),
        chip_option("Refuse what validate would for this chip."),
        click.option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where to write; - is standard output.  [default: rank_table_<n>pcs.json]",
        ),
        click.option("--force", is_flag=True, help="Replace the default file if it is there."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.command(short_help="Write a table from a list of hosts, Slurm, pods or hccn.conf.")
@_options
def generate(output: str | None, force: bool, **options: Any) -> Outcome:
    """Write a rank table with contiguous ranks, out of one source of hosts.

    Sources: --hosts, --hostfile, --slurm, --pod_annotations, --probe, or --hccn_conf alone. Without a source of
    addresses the devices get no device_ip; none is made up.
    """
    table, notes = _build(**options)
    target = output or default_file_name(table)
    if output is None and not force and Path(target).exists():
        raise click.UsageError(f"{target} is there already; name it with -o to replace it, or give --force")
    return deliver_table(table, notes, target)


def _build(
    *,
    order: ServerOrder | None,
    version: str,
    super_pods: tuple[str, ...],
    chip: str | None,
    slurm: bool,
    probe: bool,
    root: str,
    server_id: str | None,
    **sources: Any,
) -> tuple[RankTable, tuple[str, ...]]:
    """Return the table and what is to be said of it."""
    from ranktable.sources.collect import parse_super_pods

    device_target = sources["device_target"] or ("ascend" if chip else None)
    profile = None if device_target is None else build_profile(device_target, chip)
    has_pods = bool(dialect_of(version).reads_super_pods)
    if not has_pods and (super_pods or sources["super_device_ids"]):
        raise click.UsageError("super pods are part of version 1.2; give --version 1.2, or leave them out")
    asked = _probe(root, server_id, asks_super_pod=has_pods) if probe else None
    if not probe and (server_id is not None or root != "/"):
        raise click.UsageError("--root and --server_id go with --probe; leave them out")
    collected = collect_hosts(SourceRequest(slurm=os.environ if slurm else None, probe=asked, **sources))
    if profile is None and collected.device_target is not None:
        profile = build_profile(collected.device_target)
    order = order or collected.order
    pods = parse_super_pods(super_pods) if super_pods else None
    table = assemble_table(collected.hosts, order=order, version=version, profile=profile, super_pods=pods)
    problems = hold_to_rules(table, profile or ANY_TARGET)
    problems = problems if profile else judge_table(table, Profile())  # what keeps it from use on Ascend
    return table, _notes_on(table, order, collected, problems, has_target=profile is not None)


def _probe(root: str, server_id: str | None, *, asks_super_pod: bool) -> Any:
    from ranktable.sources.local_host import Probe

    return Probe(Path(root), server_id=server_id, asks_super_pod=asks_super_pod)


def _notes_on(
    table: RankTable, order: ServerOrder, collected: CollectedHosts, problems: tuple[Problem, ...], *, has_target: bool
) -> tuple[str, ...]:
    """Say which order was used, what was left out, and what keeps the table from use on Ascend."""
    notes = list(collected.notes)
    if len(table.servers) > 1:
        notes.append(f"ranks follow {_MEANINGS[order]}; rank 0 is on {table.servers[0].server_id}")
    if not dialect_of(table.dialect).reads_super_pods:
        notes += _describe_lost_pods(collected.hosts)
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
    return tuple(notes)


def _describe_lost_pods(hosts: tuple[HostInventory, ...]) -> list[str]:
    lost = sum(device.super_device_id is not None for host in hosts for device in host.devices)
    in_pods = any(host.super_pod_id is not None for host in hosts)
    if not lost and not in_pods:
        return []
    return [f"super pods and {lost} super_device_ids are left out: --version 1.2 keeps them"]
