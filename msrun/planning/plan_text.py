"""The plan as text for people, or as JSON."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Collection, Mapping, Sequence

from msrun.planning.hosts.assignment import UNKNOWN
from msrun.planning.masking import mask_words, masked
from msrun.planning.placement.host import format_cpu_list
from msrun.planning.plan import HostPlan, LaunchPlan, WorkerPlan
from msrun.planning.ranks import count_workers, fold_ranks
from msrun.planning.settings import render_settings
from msrun.planning.spec import format_size


def render_columns(columns: Mapping[str, Sequence[str]], left: Collection[str] | None = None) -> list[str]:
    """Return a table: names of the columns, then a line for each row.

    Args:
        left: the columns that begin at the left, the others end at the right; None = all.
    """
    shown = {name: [name, *cells] for name, cells in columns.items()}
    width = {name: max(map(len, cells)) for name, cells in shown.items()}
    align = {name: str.ljust if left is None or name in left else str.rjust for name in shown}
    rows = range(len(next(iter(shown.values()))))
    return ["  ".join(align[name](cells[row], width[name]) for name, cells in shown.items()).rstrip() for row in rows]


def common_to_all(hosts: Sequence[HostPlan]) -> dict[str, str]:
    """Return the variables that all hosts give their workers with one value."""
    first, *others = (host.common_env for host in hosts)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def variable_lines(env: Mapping[str, str]) -> list[str]:
    """Return a line for each variable, however many lines its value has; secrets are masked."""
    return [f"  {name}={_on_one_line(value)}" for name, value in sorted(masked(env).items())]


def _on_one_line(value: str) -> str:
    return value.replace("\n", "\\n").replace("\r", "\\r")


def host_columns(hosts: Sequence[HostPlan]) -> dict[str, list[str]]:
    """Return the hosts, and how each is reached where that is not from themselves, by columns that hold something."""
    agents = [host.agent for host in hosts if host.agent]
    columns = {
        "node": [str(host.node_rank) for host in hosts],
        "name": [host.name for host in hosts],
        "slots": [str(len(host.workers)) for host in hosts],
        "ranks": [fold_ranks(worker.global_rank for worker in host.workers) for host in hosts],
        "devices": [fold_ranks(worker.device_id for worker in host.workers) for host in hosts],
        "address": ["" if host.address == UNKNOWN else host.address for host in hosts],
        "user": [agent.user for agent in agents],
        "port": [str(agent.port or "") for agent in agents],
        "python": [agent.python for agent in agents],
    }
    return {name: [cell or "-" for cell in cells] for name, cells in columns.items() if any(cells)}


def fleet_columns(plan: LaunchPlan) -> dict[str, list[str]]:
    """Return all hosts of a job of which the plan is for one."""
    return {
        "node": [str(one.node_rank) for one in plan.fleet],
        "name": [one.name for one in plan.fleet],
        "address": [one.address for one in plan.fleet],
        "ranks": [fold_ranks(one.ranks) for one in plan.fleet],
        "devices": [fold_ranks(one.device_ids) for one in plan.fleet],
    }


def worker_columns(workers: Sequence[WorkerPlan]) -> dict[str, list[str]]:
    """Return the workers; physical devices and processors only where they say something."""
    is_bound, has_memory = any(worker.cpus for worker in workers), any(worker.memory_nodes for worker in workers)
    is_renumbered = any(worker.physical_device != str(worker.device_id) for worker in workers)
    return {
        "rank": [str(worker.global_rank) for worker in workers],
        "local": [str(worker.local_rank) for worker in workers],
        "device": [str(worker.device_id) for worker in workers],
        **({"physical": [worker.physical_device for worker in workers]} if is_renumbered else {}),
        **({"cpus": [format_cpu_list(worker.cpus) or "all" for worker in workers]} if is_bound else {}),
        **({"memory": [format_cpu_list(worker.memory_nodes) or "any" for worker in workers]} if has_memory else {}),
        "log": [worker.log_path for worker in workers],
    }


def _hosts(plan: LaunchPlan) -> list[str]:
    """Return the hosts and, of those that are reached from here, what is started there and what goes there."""
    commands = dict.fromkeys(host.agent.command for host in plan.hosts if host.agent)
    if not commands and not plan.fleet:
        return []
    table = render_columns(host_columns(plan.hosts) if commands else fleet_columns(plan))
    lines = ["hosts", *(f"  {line}" for line in table)]
    for words, _, program in (command.partition(" -c ") for command in commands):
        same = f"a program of {len(program)} characters, the same for every job; --dry_run=json has it"
        lines.append(f"agent        {words} -c ... ({same})")
    if commands:
        lines += ["environment that goes there from here", *(variable_lines(plan.forwarded) or ["  nothing"])]
    return lines


def render_plan(plan: LaunchPlan, *, as_json: bool) -> str:
    """Return the plan as text for people or as JSON, without a last newline."""
    if as_json:
        return json.dumps(plan.to_json(), indent=2)
    common = common_to_all(plan.hosts)
    lines = [
        *(f"{name:12} {text}" for name, text in describe_job(plan)),
        *render_settings(plan.settings),
        *_hosts(plan),
        "",
        "environment of every worker",
        *variable_lines(common),
    ]
    for host in plan.hosts:
        own = {name: value for name, value in host.common_env.items() if name not in common}
        lines += [
            f"host {host.node_rank}       {host.name}{'' if host.agent else f' ({host.address})'}",
            *(f"  {line}" for line in variable_lines(own)),
            *(f"  {line}" for line in render_workers(host.workers, host.scheduler_cpus)),
            *(f"  parameter server {server.index}, log {server.log_path}" for server in host.servers),
        ]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def _commands(host: HostPlan, world_size: int) -> list[tuple[str, str]]:
    """Return the command of the job's workers; of several programs with the ranks of each."""
    interpreter = (host.agent.python,) if host.agent else ()
    lines = []
    for program, ranks in host.program.ranks(world_size).items():
        whose = f"  (ranks {fold_ranks(ranks)}, role {program.role})" if host.program.others else ""
        lines.append(("command", shlex.join(mask_words(program.argv(*interpreter))) + whose))
    return lines


def describe_job(plan: LaunchPlan) -> list[tuple[str, str]]:
    """Return what concerns the whole job, as words and what they are."""
    host = plan.hosts[0]
    target = f"device target {plan.device_target} ({plan.device_reason})"
    hosts = f"{len(plan.fleet)} hosts" if plan.fleet else "1 host"
    rotation = f"; each worker's is rotated at {format_size(plan.log_max_bytes)}, {plan.log_keep} older files stay"
    return [
        ("job", f"{count_workers(plan.world_size)} on {hosts}, {target}"),
        *_commands(host, plan.world_size),
        ("directory", host.working_directory),
        ("start method", f"{host.start_method}, preload: {', '.join(host.preload) or 'nothing'}"),
        ("rendezvous", _rendezvous(plan)),
        ("rank table", plan.rank_table_file),
        ("logs", f"{plan.log_dir}{rotation if plan.log_max_bytes else ''}"),
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


def render_workers(workers: Sequence[WorkerPlan], scheduler_cpus: Sequence[int]) -> list[str]:
    """Return the workers as columns, and why they are bound to their processors."""
    is_bound = any(worker.cpus for worker in workers)
    reasons: dict[str, list[int]] = {}
    for worker in workers if is_bound else ():
        reasons.setdefault(worker.binding, []).append(worker.global_rank)
    return [
        *render_columns(worker_columns(workers), left=("log",)),
        *(f"binding of rank {format_cpu_list(ranks)}: {why}" for why, ranks in reasons.items()),
        *([f"binding of the scheduler: CPU {format_cpu_list(scheduler_cpus)}"] if scheduler_cpus else []),
    ]
