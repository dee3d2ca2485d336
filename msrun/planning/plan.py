"""LaunchPlan: what was decided. Printed by --dry_run, written to plan.json, and exactly what a run carries out."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.planning.environment import common_environment, masked, overridden_names, rank_environment
from msrun.planning.imports import read_preload
from msrun.planning.log_size import format_size
from msrun.planning.masking import mask_words, secret_values
from msrun.planning.placement.binding import HostBinding, bind_workers
from msrun.planning.placement.host import DevicePlacement, HostFacts, place_devices
from msrun.planning.placement.threads import (
    THREADS_VARIABLE,
    self_binding,
    self_binding_note,
    thread_note,
    threads_per_worker,
)
from msrun.planning.program import Program
from msrun.planning.settings import Setting, render_settings, settings_note
from msrun.planning.spec import LaunchSpec, StartMethod, is_loopback
from msrun.planning.worker_table import render_workers


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: its ranks, its device, its own variables and its log."""

    global_rank: int
    local_rank: int
    device_id: int
    env: dict[str, str]
    """Only what differs from the other workers of the host."""
    log_path: str
    physical_device: str = ""
    """The device by its number on the host; the worker itself sees it as `device_id`."""
    cpus: tuple[int, ...] = ()
    """Processors that it is bound to; empty = not bound."""
    memory_nodes: tuple[int, ...] = ()
    """NUMA nodes that its memory is bound to; empty = not bound."""
    binding: str = ""
    """Why these, in words."""


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
    scheduler_cpus: tuple[int, ...] = ()
    """Processors that the scheduler is bound to; empty = not bound."""


@dataclass(frozen=True)
class LaunchPlan:
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
    cluster_time_out_s: int
    grace_s: float
    forward_signals: tuple[int, ...]
    """Signals that msrun passes on to the workers instead of ending the job."""
    hang_time_out_s: float
    """0 = no limit."""
    max_restarts: int
    log_max_bytes: int
    """0 = worker logs are not rotated."""
    log_keep: int
    tail_ranks: tuple[int, ...]
    rank_table_file: str
    """Table of the job: the user's, or the one generated in the log directory."""
    hosts: tuple[HostPlan, ...]
    settings: tuple[Setting, ...] = ()
    """What the user has set, and where."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know of these decisions, one line each."""

    @property
    def workers(self) -> list[WorkerPlan]:
        """All workers in rank order."""
        return sorted((worker for host in self.hosts for worker in host.workers), key=lambda w: w.global_rank)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that msrun writes and prints nowhere."""
        found = (value for host in self.hosts for value in secret_values(host.program.args, host.common_env))
        return tuple(dict.fromkeys(found))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict with secret-looking values masked."""
        return {
            "job_id": self.job_id,
            "world_size": self.world_size,
            "master": {"address": self.master_addr, "port": self.master_port},
            "log_dir": self.log_dir,
            "run_dir": self.run_dir,
            "device_target": self.device_target,
            "device_reason": self.device_reason,
            "cluster_time_out_s": self.cluster_time_out_s,
            "grace_s": self.grace_s,
            "forward_signals": [signal.Signals(signum).name for signum in self.forward_signals],
            "hang_time_out_s": self.hang_time_out_s,
            "max_restarts": self.max_restarts,
            "log_max_bytes": self.log_max_bytes,
            "log_keep": self.log_keep,
            "tail_ranks": list(self.tail_ranks),
            "rank_table_file": self.rank_table_file,
            "settings": [asdict(setting) for setting in self.settings],
            "notes": list(self.notes),
            "hosts": [_host_json(host) for host in self.hosts],
        }


def _host_json(host: HostPlan) -> dict[str, Any]:
    return {
        "node_rank": host.node_rank,
        "name": host.name,
        "address": host.address,
        "argv": mask_words(host.program.argv()),
        "program": {**host.program.to_json(), "args": mask_words(host.program.args)},
        "working_directory": host.working_directory,
        "start_method": host.start_method,
        "preload": list(host.preload),
        "env": masked(host.common_env),
        "scheduler_cpus": list(host.scheduler_cpus),
        "workers": [
            {
                "global_rank": worker.global_rank,
                "local_rank": worker.local_rank,
                "device_id": worker.device_id,
                "physical_device": worker.physical_device,
                "cpus": list(worker.cpus),
                "memory_nodes": list(worker.memory_nodes),
                "binding": worker.binding,
                "env": masked(worker.env),
                "log": worker.log_path,
            }
            for worker in host.workers
        ],
    }


def build_plan(
    spec: LaunchSpec, host: HostFacts, *, caller: Mapping[str, str], job_id: str, run_dir: str, master_port: int
) -> LaunchPlan:
    """Decide everything about a one-host job. Pure, but for reading the script's import lines.

    Args:
        caller: the environment that workers inherit.
        run_dir: where the FileStore will be; need not exist.
        master_port: the port that the store listens on; 0 in a dry run, where it is not chosen yet.

    Raises:
        UsageError: more workers than devices, or a binding that this host does not allow.
    """
    devices = place_devices(spec.device_target, spec.local_worker_num, host)
    topology = host.known_topology()
    binding = bind_workers(topology, devices.physical, target=devices.target, core=spec.bind_core, numa=spec.bind_numa)
    threads = threads_per_worker(topology, binding.workers)
    table = str(spec.rank_table_file or spec.log_dir / contract.RANK_TABLE_JSON)
    common = common_environment(
        caller=caller,
        extra=dict(spec.env),
        job_id=job_id,
        world_size=spec.worker_num,
        local_world_size=spec.local_worker_num,
        master_addr=host.address,
        master_port=master_port,
        log_dir=str(spec.log_dir),
        rank_table_file=table,
        rendezvous=f"file://{run_dir}/store",
        progress=f"{run_dir}/progress",
        max_restarts=spec.max_restarts,
        device_target=devices.target,
        threads=min(threads),
    )
    has_threads = THREADS_VARIABLE in {**caller, **dict(spec.env)}
    own_threads = ["" if has_threads or count == min(threads) else str(count) for count in threads]
    workers = tuple(
        _worker(spec, host, index, devices, binding, own_threads[index]) for index in range(spec.local_worker_num)
    )
    return LaunchPlan(
        job_id=job_id,
        world_size=spec.worker_num,
        master_addr=host.address,
        master_port=master_port,
        log_dir=str(spec.log_dir),
        run_dir=run_dir,
        device_target=devices.target,
        device_reason=devices.reason,
        cluster_time_out_s=spec.cluster_time_out_s,
        grace_s=spec.grace_s,
        forward_signals=spec.forward_signals,
        hang_time_out_s=spec.hang_time_out_s,
        max_restarts=spec.max_restarts,
        log_max_bytes=spec.log_max_bytes,
        log_keep=spec.log_keep,
        tail_ranks=spec.tail_ranks,
        rank_table_file=table,
        hosts=(
            HostPlan(
                node_rank=0,
                name=host.name,
                address=host.address,
                program=spec.program,
                working_directory=str(spec.working_directory),
                start_method=_start_method(spec, caller),
                preload=_preload(spec) if _start_method(spec, caller) != "exec" else (),
                common_env=common,
                workers=workers,
                scheduler_cpus=binding.scheduler_cpus,
            ),
        ),
        settings=spec.settings,
        notes=(
            *settings_note(spec.settings),
            *_notes(spec, caller, common, workers[0].env),
            *([] if has_threads else [thread_note(topology, binding.workers)]),
            *devices.notes,
            *binding.notes,
        ),
    )


def _start_method(spec: LaunchSpec, caller: Mapping[str, str]) -> StartMethod:
    if not spec.program.is_python:
        return "exec"
    is_bound = bool(self_binding({**caller, **dict(spec.env)}))
    return "exec" if is_bound and spec.start_method == "auto" else spec.start_method


def _worker(
    spec: LaunchSpec, host: HostFacts, index: int, devices: DevicePlacement, binding: HostBinding, own_threads: str
) -> WorkerPlan:
    device_id, bound = devices.device_ids[index], binding.workers[index]
    env = rank_environment(global_rank=index, local_rank=index, node_rank=0, device_id=device_id)
    stem = spec.worker_log_name.replace("{ip}", host.address).replace("{hostname}", host.name)
    return WorkerPlan(
        global_rank=index,
        local_rank=index,
        device_id=device_id,
        env={**env, THREADS_VARIABLE: own_threads} if own_threads else env,
        log_path=str(spec.log_dir / contract.worker_log_name(stem, index)),
        physical_device=devices.physical[index],
        cpus=bound.cpus,
        memory_nodes=bound.memory_nodes,
        binding=bound.reason,
    )


def _preload(spec: LaunchSpec) -> tuple[str, ...]:
    names = [name for script in _scripts(spec) for name in read_preload(script)]
    return tuple(dict.fromkeys([*names, *spec.preload]))


def _scripts(spec: LaunchSpec) -> list[Path]:
    """Return the files whose imports every worker will want; a module is looked for in the working directory only."""
    target = spec.program.target
    if spec.program.kind == "script":
        return [Path(target)]
    if target == "pytest":
        files = [Path(spec.working_directory, arg.partition("::")[0]) for arg in spec.program.args]
        return [file for file in files if file.suffix == ".py"]
    stem = spec.working_directory.joinpath(*target.split("."))
    return [stem.with_suffix(".py"), stem / "__main__.py"]


def _notes(
    spec: LaunchSpec, caller: Mapping[str, str], common: Mapping[str, str], ranks: Mapping[str, str]
) -> tuple[str, ...]:
    notes = []
    bound_by = self_binding({**caller, **dict(spec.env)}) if spec.program.is_python else []
    if bound_by and spec.start_method != "exec":
        notes.append(self_binding_note(bound_by, spec.start_method))
    replaced = overridden_names(caller, {**common, **ranks})
    if replaced:
        notes.append(f"set in your environment and replaced for the workers: {', '.join(replaced)}")
    if not is_loopback(spec.master_addr):
        notes.append(f"--master_addr {spec.master_addr} is not used: a job on one host meets on loopback only")
    return tuple(notes)


def _limits(plan: LaunchPlan) -> str:
    hang = f"{plan.hang_time_out_s:g} s" if plan.hang_time_out_s else "none"
    return (
        f"start {plan.cluster_time_out_s} s, grace {plan.grace_s:g} s, hang {hang}, restarts {plan.max_restarts}; "
        f"signals passed on: {', '.join(signal.Signals(signum).name for signum in plan.forward_signals) or 'none'}"
    )


def _rotation_words(plan: LaunchPlan) -> str:
    if not plan.log_max_bytes:
        return ""
    return f"; each worker's is rotated at {format_size(plan.log_max_bytes)}, {plan.log_keep} older files stay"


def render_plan(plan: LaunchPlan, *, as_json: bool) -> str:
    """Return the plan as text for people or as JSON, without a last newline."""
    if as_json:
        return json.dumps(plan.to_json(), indent=2)
    host = plan.hosts[0]
    port = plan.master_port or "chosen at start"
    target = f"device target {plan.device_target} ({plan.device_reason})"
    lines = [
        f"job          {plan.world_size} workers on {len(plan.hosts)} host, {target}",
        f"command      {shlex.join(mask_words(host.program.argv()))}",
        f"directory    {host.working_directory}",
        f"start method {host.start_method}, preload: {', '.join(host.preload) or 'nothing'}",
        f"rendezvous   FileStore {plan.run_dir}/store; MASTER_ADDR {plan.master_addr}, MASTER_PORT {port}",
        f"rank table   {plan.rank_table_file}",
        f"logs         {plan.log_dir}{_rotation_words(plan)}",
        f"limits       {_limits(plan)}",
        *render_settings(plan.settings),
        "",
        f"host {host.node_rank}       {host.name} ({host.address})",
        "  environment of every worker:",
    ]
    lines += [f"    {name}={value}" for name, value in sorted(masked(host.common_env).items())]
    lines += render_workers(host.workers, host.scheduler_cpus)
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)
