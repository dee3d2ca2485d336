"""The plan as text for people, or as JSON."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Mapping, Sequence

from msrun.planning.environment import masked
from msrun.planning.host_assignment import render_assignments
from msrun.planning.hosts.assignment import UNKNOWN
from msrun.planning.masking import mask_words
from msrun.planning.placement.host import format_cpu_list
from msrun.planning.plan import HostPlan, LaunchPlan, WorkerPlan
from msrun.planning.ranks import count_workers, fold_ranks
from msrun.planning.settings import render_settings
from msrun.planning.spec import format_size


def render_reach(plan: LaunchPlan) -> list[str]:
    """Return who is reached how, what is started there, and what goes there from here."""
    commands = dict.fromkeys(host.agent.command for host in plan.hosts if host.agent)
    return [
        "hosts",
        *(f"  {line}" for line in _columns(plan.hosts)),
        *(f"agent        {_head(command)}" for command in commands),
        "environment that goes there from here",
        *(variable_lines(plan.forwarded) or ["  nothing"]),
    ]


def common_to_all(hosts: Sequence[HostPlan]) -> dict[str, str]:
    """Return the variables that all hosts give their workers with one value."""
    first, *others = (host.common_env for host in hosts)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def own_variables(host: HostPlan, common: Mapping[str, str]) -> list[str]:
    """Return lines of what only this host gives its workers."""
    own = {name: value for name, value in host.common_env.items() if name not in common}
    return [f"  {line}" for line in variable_lines(own)]


def variable_lines(env: Mapping[str, str]) -> list[str]:
    """Return a line for each variable, however many lines its value has; secrets are masked."""
    return [f"  {name}={_on_one_line(value)}" for name, value in sorted(masked(env).items())]


def _on_one_line(value: str) -> str:
    return value.replace("\n", "\\n").replace("\r", "\\r")


def _head(command: str) -> str:
    """Return a command up to the program that the interpreter is given, which is the same for every job."""
    words, mark, program = command.partition(" -c ")
    return f"{words}{mark}... (a program of {len(program)} characters, the same for every job; --dry_run=json has it)"


def _columns(hosts: Sequence[HostPlan]) -> list[str]:
    """Return one line for each host, in columns; what no host has is left out."""
    columns = {
        "node": [str(host.node_rank) for host in hosts],
        "name": [host.name for host in hosts],
        "slots": [str(len(host.workers)) for host in hosts],
        "ranks": [fold_ranks(worker.global_rank for worker in host.workers) for host in hosts],
        "devices": [fold_ranks(worker.device_id for worker in host.workers) for host in hosts],
        "address": ["" if host.address == UNKNOWN else host.address for host in hosts],
        "user": [host.agent.user if host.agent else "" for host in hosts],
        "port": [str(host.agent.port or "") if host.agent else "" for host in hosts],
        "python": [host.agent.python if host.agent else "" for host in hosts],
    }
    shown = {name: [name, *(cell or "-" for cell in cells)] for name, cells in columns.items() if any(cells)}
    widths = {name: max(map(len, cells)) for name, cells in shown.items()}
    return [
        "  ".join(cells[row].ljust(widths[name]) for name, cells in shown.items()).rstrip()
        for row in range(len(hosts) + 1)
    ]


def render_plan(plan: LaunchPlan, *, as_json: bool) -> str:
    """Return the plan as text for people or as JSON, without a last newline."""
    if as_json:
        return json.dumps(plan.to_json(), indent=2)
    is_remote = plan.hosts[0].agent is not None
    head = [f"{name:12} {text}" for name, text in describe_job(plan)]
    lines = [*head, *render_settings(plan.settings), *(render_reach(plan) if is_remote else _fleet(plan)), ""]
    if is_remote:
        common = common_to_all(plan.hosts)
        lines += _environment(common)
        for host in plan.hosts:
            lines += [f"host {host.node_rank}       {host.name}", *own_variables(host, common)]
            lines += [*render_workers(host.workers, host.scheduler_cpus), *_servers(host)]
    else:
        host = plan.hosts[0]
        lines += [f"host {host.node_rank}       {host.name} ({host.address})", *_environment(host.common_env)]
        lines += [*render_workers(host.workers, host.scheduler_cpus), *_servers(host)]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _servers(host: HostPlan) -> list[str]:
    return [f"  parameter server {server.index}, log {server.log_path}" for server in host.servers]


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
    return [
        ("job", f"{count_workers(plan.world_size)} on {hosts}, {target}"),
        *_commands(host, plan.world_size),
        ("directory", host.working_directory),
        ("start method", f"{host.start_method}, preload: {', '.join(host.preload) or 'nothing'}"),
        ("rendezvous", _rendezvous(plan)),
        ("rank table", plan.rank_table_file),
        ("logs", f"{plan.log_dir}{_rotation_words(plan)}"),
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


def _fleet(plan: LaunchPlan) -> list[str]:
    return ["hosts", *(f"  {line}" for line in render_assignments(plan.fleet))] if plan.fleet else []


def _environment(common: Mapping[str, str]) -> list[str]:
    return ["  environment of every worker:", *(f"  {line}" for line in variable_lines(common))]


def _limits(plan: LaunchPlan) -> str:
    hang = f"{plan.hang_time_out_s:g} s" if plan.hang_time_out_s else "none"
    ending = f"{plan.exit_time_out_s:g} s" if plan.exit_time_out_s else "none"
    limit = f", time {plan.time_limit_s:g} s" if plan.time_limit_s else ""
    passed_on = ", ".join(signal.Signals(signum).name for signum in plan.forward_signals) or "none"
    return (
        f"start {plan.cluster_time_out_s} s, grace {plan.grace_s:g} s, hang {hang}, exit {ending}{limit}, "
        f"restarts {plan.max_restarts}; signals passed on: {passed_on}"
    )


def _rotation_words(plan: LaunchPlan) -> str:
    if not plan.log_max_bytes:
        return ""
    return f"; each worker's is rotated at {format_size(plan.log_max_bytes)}, {plan.log_keep} older files stay"


def render_workers(workers: Sequence[WorkerPlan], scheduler_cpus: Sequence[int]) -> list[str]:
    """Return the workers as columns; those of physical devices and of processors only where they say something."""
    columns = {
        "rank": [str(worker.global_rank) for worker in workers],
        "local": [str(worker.local_rank) for worker in workers],
        "device": [str(worker.device_id) for worker in workers],
        "physical": [worker.physical_device for worker in workers],
        "cpus": [format_cpu_list(worker.cpus) or "all" for worker in workers],
        "memory": [format_cpu_list(worker.memory_nodes) or "any" for worker in workers],
    }
    if columns["physical"] == columns["device"]:
        del columns["physical"]
    if not any(worker.memory_nodes for worker in workers):
        del columns["memory"]
    if not any(worker.cpus for worker in workers):
        del columns["cpus"]
    widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}
    rows = ["  ".join(name.rjust(widths[name]) for name in columns) + "  log"]
    for index, worker in enumerate(workers):
        cells = [cells[index].rjust(widths[name]) for name, cells in columns.items()]
        rows.append("  ".join([*cells, worker.log_path]))
    reasons: dict[str, list[int]] = {}
    for worker in workers:
        reasons.setdefault(worker.binding, []).append(worker.global_rank)
    told = [f"binding of rank {format_cpu_list(ranks)}: {why}" for why, ranks in reasons.items() if "cpus" in columns]
    if scheduler_cpus:
        told.append(f"binding of the scheduler: CPU {format_cpu_list(scheduler_cpus)}")
    return [f"  {line}" for line in (*rows, *told)]
