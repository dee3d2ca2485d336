"""LaunchPlan: what was decided, printed by --dry_run as text or JSON, written to plan.json, and carried out."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, cast

from msrun import contract
from msrun.planning.hosts import UNKNOWN, HostAssignment, count_workers, fold_ranks
from msrun.planning.masking import mask_words, masked, secret_values
from msrun.planning.program import Program, StartMethod
from msrun.planning.record import Record, encode_record
from msrun.planning.spec import JobTerms, format_size
from ranktable.hosts.ranges import fold_numbers


class WorkerPlan(Record):
    """One worker: its ranks, its device, its own variables and its log."""

    global_rank: int
    local_rank: int
    device_id: int
    env: dict[str, str]  # only what differs from the other workers of the host
    log_path: str
    error_log_path: str = ""  # of stderr alone; empty = it goes to `log_path`, too
    physical_device: str = ""  # the device by its number on the host; the worker itself sees it as `device_id`
    cpus: tuple[int, ...] = ()  # processors that it is bound to; empty = not bound
    memory_nodes: tuple[int, ...] = ()  # NUMA nodes that its memory is bound to; empty = not bound
    binding: str = ""  # why these, in words

    @property
    def last_words_path(self) -> str:
        return self.error_log_path or self.log_path

    @property
    def log_paths(self) -> list[str]:
        return [self.log_path, *([self.error_log_path] if self.error_log_path else [])]


class ServerPlan(Record):
    """One parameter server: its own variables and its log."""

    index: int
    env: dict[str, str]  # beside those that it shares with the workers
    log_path: str


class AgentPlan(Record):
    """How a host is reached from here, and what is started there; empty words are left to ssh_config."""

    name: str
    user: str
    port: int  # 0 = left to ssh_config
    python: str  # path of the interpreter there
    command: str  # what the host's shell is given: a constant, but for the interpreter


class HostPlan(Record):
    """Everything one agent needs to run its part."""

    node_rank: int
    name: str
    address: str
    program: Program
    working_directory: str
    start_method: StartMethod
    preload: tuple[str, ...]
    common_env: dict[str, str]
    workers: tuple[WorkerPlan, ...]
    servers: tuple[ServerPlan, ...] = ()
    mindspore_scheduler: dict[str, str] = field(default_factory=dict)  # its variables; empty = it runs none
    scheduler_cpus: tuple[int, ...] = ()  # processors that the scheduler is bound to; empty = not bound
    place: str = ""  # the host among several, in words: "node 1 (worker-1, 10.0.0.7)"; empty when it is the only one
    agent: AgentPlan | None = None  # how it is reached; None = this host, without an agent

    @property
    def first_attempt(self) -> int:
        """The number of the first attempt on these hosts: more than 0 when others were lost before."""
        return int(self.common_env.get(contract.TORCHELASTIC_RESTART_COUNT, 0))

    @property
    def log_paths(self) -> list[str]:
        of_workers = [path for worker in self.workers for path in worker.log_paths]
        return [*of_workers, *(server.log_path for server in self.servers)]

    @property
    def where(self) -> str:
        return self.place or self.name

    @property
    def argv(self) -> list[str]:
        return self.program.argv(self.agent.python) if self.agent else self.program.argv()


class LaunchPlan(JobTerms, kw_only=True):
    """The whole job."""

    job_id: str
    world_size: int
    master_addr: str
    master_port: int
    log_dir: str
    run_dir: str  # private temporary folder of the job: the FileStore; removed at the end
    device_target: str
    device_reason: str
    rank_table_file: str  # table of the job: the user's, or the one generated in the log directory
    hosts: tuple[HostPlan, ...]
    notes: tuple[str, ...] = field(default=())  # what the user should know of these decisions, one line each
    fleet: tuple[HostAssignment, ...] = ()
    """All hosts of a job of several, in the order of their node_rank; `hosts` holds this one alone when each host is
    started for itself, all of them when they are started from here."""
    forwarded: dict[str, str] = field(default_factory=dict)  # variables that go to the hosts, for workers

    @property
    def workers(self) -> list[WorkerPlan]:
        return sorted((worker for host in self.hosts for worker in host.workers), key=lambda w: w.global_rank)

    @property
    def log_paths(self) -> list[str]:
        return [path for host in self.hosts for path in host.log_paths]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that msrun writes and prints nowhere."""
        found = (value for host in self.hosts for value in secret_values(host.program.args, host.common_env))
        return tuple(dict.fromkeys([*found, *secret_values((), self.forwarded)]))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict with secret-looking values masked."""
        told = {one.name: encode_record(getattr(self, one.name)) for one in fields(self)}
        told["master"] = {"address": told.pop("master_addr"), "port": told.pop("master_port")}
        told["forward_signals"] = [signal.Signals(signum).name for signum in self.forward_signals]
        told["fleet"] = [assignment.to_json() for assignment in self.fleet]
        told["hosts"] = [
            {"argv": mask_words(host.argv), **{name: value for name, value in one.items() if name != "place"}}
            for host, one in zip(self.hosts, told["hosts"], strict=True)
        ]
        return cast("dict[str, Any]", _shown(told))


_NAMES = {"log_path": "log", "error_log_path": "error_log", "common_env": "env"}
"""Fields that plan.json has by other names."""
_UNLESS_EMPTY = ["error_log", "agent", "mindspore_scheduler", "servers", "fleet", "forwarded", "interactive_rank"]
_VARIABLES = ("env", "forwarded", "mindspore_scheduler")


def _shown(record: Any) -> Any:
    """Return a record as plan.json has it: with its names, without secrets, and without what says nothing."""
    if isinstance(record, list | tuple):
        return [_shown(item) for item in record]
    if not isinstance(record, dict):
        return record
    found = {}
    for name, value in ((_NAMES.get(name, name), value) for name, value in record.items()):
        if name not in _UNLESS_EMPTY or value not in (None, "", [], (), {}):
            is_words = name == "args"
            found[name] = masked(value) if name in _VARIABLES else mask_words(value) if is_words else _shown(value)
    return found


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
    shown = [(f"{setting.name}={setting.text}", setting.source) for setting in plan.settings]
    width = max((len(text) for text, _ in shown), default=0)
    lines = [
        *(f"{name:12} {text}" for name, text in _describe_job(plan)),
        "settings" if plan.settings else "settings     all defaults",
        *(f"  {text:<{width}}  {source}" for text, source in shown),
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
