"""LaunchPlan: what was decided. Printed by --dry_run, written to plan.json, and exactly what a run carries out."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, fields
from typing import Any, cast

from msrun import contract
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.masking import mask_words, masked, secret_values
from msrun.planning.program import Program, StartMethod
from msrun.planning.record_json import encode_record
from msrun.planning.spec import JobTerms


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: its ranks, its device, its own variables and its log."""

    global_rank: int
    local_rank: int
    device_id: int
    env: dict[str, str]
    """Only what differs from the other workers of the host."""
    log_path: str
    error_log_path: str = ""
    """Of stderr alone; empty = it goes to `log_path`, too."""
    physical_device: str = ""
    """The device by its number on the host; the worker itself sees it as `device_id`."""
    cpus: tuple[int, ...] = ()
    """Processors that it is bound to; empty = not bound."""
    memory_nodes: tuple[int, ...] = ()
    """NUMA nodes that its memory is bound to; empty = not bound."""
    binding: str = ""
    """Why these, in words."""

    @property
    def last_words_path(self) -> str:
        return self.error_log_path or self.log_path

    @property
    def log_paths(self) -> list[str]:
        return [self.log_path, *([self.error_log_path] if self.error_log_path else [])]


@dataclass(frozen=True)
class ServerPlan:
    """One parameter server: its own variables and its log."""

    index: int
    env: dict[str, str]
    """Beside those that it shares with the workers."""
    log_path: str


@dataclass(frozen=True)
class AgentPlan:
    """How a host is reached from here, and what is started there; empty words are left to ssh_config."""

    name: str
    user: str
    port: int
    """0 = left to ssh_config."""
    python: str
    """Path of the interpreter there."""
    command: str
    """What the host's shell is given: a constant, but for the interpreter."""


@dataclass(frozen=True)
class HostPlan:
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
    mindspore_scheduler: dict[str, str] = field(default_factory=dict)
    """Variables of MindSpore's own scheduler; empty = the host runs none."""
    scheduler_cpus: tuple[int, ...] = ()
    """Processors that the scheduler is bound to; empty = not bound."""
    place: str = ""
    """The host among several, in words: "node 1 (worker-1, 10.0.0.7)"; empty when it is the only one."""
    agent: AgentPlan | None = None
    """How it is reached; None = this host, without an agent."""

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


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(JobTerms):
    """The whole job."""

    job_id: str
    world_size: int
    master_addr: str
    master_port: int
    log_dir: str
    run_dir: str
    """Private temporary folder of the job: the FileStore; removed at the end."""
    device_target: str
    device_reason: str
    rank_table_file: str
    """Table of the job: the user's, or the one generated in the log directory."""
    hosts: tuple[HostPlan, ...]
    notes: tuple[str, ...] = field(default=())
    """What the user should know of these decisions, one line each."""
    fleet: tuple[HostAssignment, ...] = ()
    """All hosts of a job of several, in the order of their node_rank; `hosts` holds this one alone when each host is
    started for itself, all of them when they are started from here."""
    forwarded: dict[str, str] = field(default_factory=dict)
    """Variables that go from here to the hosts; workers inherit them."""

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
