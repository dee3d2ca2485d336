"""The hosts of a job that is started on them from here, as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msrun.planning.environment import masked
from msrun.planning.hosts.assignment import UNKNOWN
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.ranks import fold_ranks


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
