"""From what was asked to what is carried out: LaunchSpec and HostFacts in, LaunchPlan out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msrun import contract
from msrun.planning.environment import common_environment, overridden_names, rank_environment
from msrun.planning.imports import read_preload
from msrun.planning.placement.binding import HostBinding, bind_workers
from msrun.planning.placement.host import DevicePlacement, HostFacts, place_devices
from msrun.planning.placement.threads import (
    THREADS_VARIABLE,
    self_binding,
    self_binding_note,
    thread_note,
    threads_per_worker,
)
from msrun.planning.plan import HostPlan, LaunchPlan, WorkerPlan
from msrun.planning.settings import settings_note
from msrun.planning.spec import LaunchSpec, StartMethod, is_loopback


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
    common = common_environment(
        caller=caller,
        extra=dict(spec.env),
        job_id=job_id,
        world_size=spec.worker_num,
        local_world_size=spec.local_worker_num,
        master_addr=host.address,
        master_port=master_port,
        log_dir=str(spec.log_dir),
        rank_table_file=_rank_table(spec),
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
        rank_table_file=_rank_table(spec),
        hosts=(_host(spec, host, caller, common, workers, binding.scheduler_cpus),),
        settings=spec.settings,
        notes=(
            *settings_note(spec.settings),
            *_notes(spec, caller, common, workers[0].env),
            *([] if has_threads else [thread_note(topology, binding.workers)]),
            *devices.notes,
            *binding.notes,
        ),
    )


def _rank_table(spec: LaunchSpec) -> str:
    return str(spec.rank_table_file or spec.log_dir / contract.RANK_TABLE_JSON)


def _host(
    spec: LaunchSpec,
    host: HostFacts,
    caller: Mapping[str, str],
    common: dict[str, str],
    workers: tuple[WorkerPlan, ...],
    scheduler_cpus: tuple[int, ...],
) -> HostPlan:
    start_method = _start_method(spec, caller)
    return HostPlan(
        node_rank=0,
        name=host.name,
        address=host.address,
        program=spec.program,
        working_directory=str(spec.working_directory),
        start_method=start_method,
        preload=_preload(spec) if start_method != "exec" else (),
        common_env=common,
        workers=workers,
        scheduler_cpus=scheduler_cpus,
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
