"""The plan as text for people, or as JSON."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Collection, Mapping, Sequence

from msrun.planning.hosts.assignment import UNKNOWN
from msrun.planning.masking import mask_words, masked
from msrun.planning.plan import LaunchPlan, WorkerPlan
from msrun.planning.ranks import count_workers, fold_ranks
from msrun.planning.settings import render_settings
from msrun.planning.spec import format_size
from ranktable.hosts.ranges import fold_numbers


def render_columns(columns: Mapping[str, Sequence[str]], left: Collection[str] | None = None) -> list[str]:
    """Return a table: names, then a line for each row; all but the `left` columns (None: all) end at the right."""
    shown = {name: [name, *cells] for name, cells in columns.items()}
    width = {name: max(map(len, cells)) for name, cells in shown.items()}
    align = {name: str.ljust if left is None or name in left else str.rjust for name in shown}
    rows = range(len(next(iter(shown.values()))))
    return ["  ".join(align[name](cells[row], width[name]) for name, cells in shown.items()).rstrip() for row in rows]


def _variables(env: Mapping[str, str]) -> list[str]:
    shown = sorted(masked(env).items())
    return [f"  {name}={value}".replace("\n", "\\n").replace("\r", "\\r") for name, value in shown]


def _hosts(plan: LaunchPlan) -> list[str]:
    commands = dict.fromkeys(host.agent.command for host in plan.hosts if host.agent)
    if not commands and not plan.fleet:
        return []
    columns = {
        "node": [str(one.node_rank) for one in plan.fleet],
        "name": [one.name for one in plan.fleet],
        "address": [one.address for one in plan.fleet],
        "ranks": [fold_ranks(one.ranks) for one in plan.fleet],
        "devices": [fold_ranks(one.device_ids) for one in plan.fleet],
    }
    if commands:
        agents = [host.agent for host in plan.hosts if host.agent]
        told = {
            "node": [str(host.node_rank) for host in plan.hosts],
            "name": [host.name for host in plan.hosts],
            "slots": [str(len(host.workers)) for host in plan.hosts],
            "ranks": [fold_ranks(worker.global_rank for worker in host.workers) for host in plan.hosts],
            "devices": [fold_ranks(worker.device_id for worker in host.workers) for host in plan.hosts],
            "address": ["" if host.address == UNKNOWN else host.address for host in plan.hosts],
            "user": [agent.user for agent in agents],
            "port": [str(agent.port or "") for agent in agents],
            "python": [agent.python for agent in agents],
        }
        columns = {name: [cell or "-" for cell in cells] for name, cells in told.items() if any(cells)}
    lines = ["hosts", *(f"  {line}" for line in render_columns(columns))]
    for words, _, program in (command.partition(" -c ") for command in commands):
        same = f"a program of {len(program)} characters, the same for every job; --dry_run=json has it"
        lines.append(f"agent        {words} -c ... ({same})")
    if commands:
        lines += ["environment that goes there from here", *(_variables(plan.forwarded) or ["  nothing"])]
    return lines


def render_plan(plan: LaunchPlan, *, as_json: bool) -> str:
    """Return the plan as text for people or as JSON, without a last newline."""
    if as_json:
        return json.dumps(plan.to_json(), indent=2)
    first, *others = (host.common_env for host in plan.hosts)
    common = {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
    lines = [
        *(f"{name:12} {text}" for name, text in _describe_job(plan)),
        *render_settings(plan.settings),
        *_hosts(plan),
        "",
        "environment of every worker",
        *_variables(common),
    ]
    for host in plan.hosts:
        own = {name: value for name, value in host.common_env.items() if name not in common}
        lines += [
            f"host {host.node_rank}       {host.name}{'' if host.agent else f' ({host.address})'}",
            *(f"  {line}" for line in (*_variables(own), *_workers(host.workers, host.scheduler_cpus))),
            *(f"  parameter server {server.index}, log {server.log_path}" for server in host.servers),
        ]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def _describe_job(plan: LaunchPlan) -> list[tuple[str, str]]:
    host = plan.hosts[0]
    target = f"device target {plan.device_target} ({plan.device_reason})"
    hosts = f"{len(plan.fleet)} hosts" if plan.fleet else "1 host"
    limit = f"; of each worker's the newest {format_size(plan.log_max_bytes * plan.log_keep)} stay"
    return [
        ("job", f"{count_workers(plan.world_size)} on {hosts}, {target}"),
        ("command", shlex.join(mask_words(host.argv))),
        ("directory", host.working_directory),
        ("start method", f"{host.start_method}, preload: {', '.join(host.preload) or 'nothing'}"),
        ("rendezvous", _rendezvous(plan)),
        ("rank table", plan.rank_table_file),
        ("logs", f"{plan.log_dir}{limit if plan.log_max_bytes else ''}"),
        ("limits", _limits(plan)),
    ]


def _rendezvous(plan: LaunchPlan) -> str:
    first = plan.hosts[0]
    port = plan.master_port or "chosen at start"
    if plan.fleet and first.agent:
        address = f"found when {first.name} is reached" if plan.master_addr == UNKNOWN else plan.master_addr
        return f"the TCPStore of the scheduler on {first.name}; MASTER_ADDR {address}, MASTER_PORT {port}"
    store = (
        "the scheduler's TCPStore" if plan.fleet else f"FileStore {plan.run_dir}/store" if plan.run_dir else "FileStore"
    )
    return f"{store}; MASTER_ADDR {plan.master_addr}, MASTER_PORT {port}"


def _limits(plan: LaunchPlan) -> str:
    hang = f"{plan.hang_time_out_s:g} s" if plan.hang_time_out_s else "none"
    ending = f"{plan.exit_time_out_s:g} s" if plan.exit_time_out_s else "none"
    limit = f", time {plan.time_limit_s:g} s" if plan.time_limit_s else ""
    passed_on = ", ".join(signal.Signals(signum).name for signum in plan.forward_signals) or "none"
    return (
        f"start {plan.cluster_time_out_s} s, grace {plan.grace_s:g} s, hang {hang}, exit {ending}{limit}, "
        f"restarts {plan.max_restarts}; signals passed on: {passed_on}"
    )


def _workers(workers: Sequence[WorkerPlan], scheduler_cpus: Sequence[int]) -> list[str]:
    is_bound, has_memory = any(worker.cpus for worker in workers), any(worker.memory_nodes for worker in workers)
    is_renumbered = any(worker.physical_device != str(worker.device_id) for worker in workers)
    columns = {
        "rank": [str(worker.global_rank) for worker in workers],
        "local": [str(worker.local_rank) for worker in workers],
        "device": [str(worker.device_id) for worker in workers],
        **({"physical": [worker.physical_device for worker in workers]} if is_renumbered else {}),
        **({"cpus": [fold_numbers(worker.cpus, ",") or "all" for worker in workers]} if is_bound else {}),
        **({"memory": [fold_numbers(worker.memory_nodes, ",") or "any" for worker in workers]} if has_memory else {}),
        "log": [worker.log_path for worker in workers],
    }
    reasons: dict[str, list[int]] = {}
    for worker in workers if is_bound else ():
        reasons.setdefault(worker.binding, []).append(worker.global_rank)
    return [
        *render_columns(columns, left=("log",)),
        *(f"binding of rank {fold_numbers(ranks, ',')}: {why}" for why, ranks in reasons.items()),
        *([f"binding of the scheduler: CPU {fold_numbers(scheduler_cpus, ',')}"] if scheduler_cpus else []),
    ]
