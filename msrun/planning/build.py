"""From what was asked to what is carried out: LaunchSpec and HostFacts in, LaunchPlan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.environment import (
    LOOPBACK_DEFAULTS,
    common_environment,
    early_environment,
    interface_defaults,
    of_rank,
    overridden_names,
    rank_environment,
    role_environment,
    server_environment,
    virtual_rank_environment,
)
from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.imports import OF_OPTIMIZERS, SAFE_PACKAGES, ScriptImports, read_imports
from msrun.planning.mindspore import (
    mindspore_environment,
    mindspore_note,
    mindspore_scheduler,
    settle_mindspore,
)
from msrun.planning.placement.binding import (
    THREADS_VARIABLE,
    HostBinding,
    bind_workers,
    self_binding,
    self_binding_note,
    thread_note,
    threads_per_worker,
)
from msrun.planning.placement.host import DevicePlacement, HostFacts, place_devices
from msrun.planning.plan import HostPlan, LaunchPlan, ServerPlan, WorkerPlan
from msrun.planning.program import DEFAULT_ROLE, StartMethod
from msrun.planning.settings import settings_note
from msrun.planning.spec import JobTerms, LaunchSpec, check_server_logs, is_loopback


def plan_job(
    spec: LaunchSpec,
    hosts: Sequence[HostPlan],
    *,
    job_id: str,
    run_dir: str,
    master: tuple[str, int],
    target: tuple[str, str],
    notes: Sequence[str],
    fleet: Sequence[HostAssignment] = (),
    forwarded: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Return the plan of a job on hosts whose parts are decided.

    Args:
        run_dir: the job's temporary folder on this host; empty when it has none.
        master: numeric address and port of the store, or of several hosts' scheduler; port 0 = chosen at start.
        target: device target, and why it is this one.
        fleet: all hosts of a job of several.
        forwarded: variables that go from here to the hosts.
    """
    return LaunchPlan(
        job_id=job_id,
        world_size=spec.worker_num,
        master_addr=master[0],
        master_port=master[1],
        log_dir=str(spec.log_dir),
        run_dir=run_dir,
        device_target=target[0],
        device_reason=target[1],
        rank_table_file=spec.rank_table_path,
        hosts=tuple(hosts),
        notes=(*notes, *([_describe_spares(spec)] if spec.min_hosts and spec.is_remote else [])),
        fleet=tuple(fleet),
        forwarded=dict(forwarded or {}),
        **{term.name: getattr(spec, term.name) for term in fields(JobTerms)},
    )


def _describe_spares(spec: LaunchSpec) -> str:
    spares = f"spare hosts: {', '.join(entry.name for entry in spec.spares)}" if spec.spares else "no spare hosts"
    count = f"{spec.min_hosts} of {len(spec.host_entries)} hosts"
    return f"{spares}; {count} are enough to start again; restarts left: {spec.max_restarts}"


SERVER_IMPORTS = ("msrun.server.serving", OF_OPTIMIZERS)
"""What parameter servers import, the second one with their first optimizer, as workers do."""
LOOPBACK = "127.0.0.1"
"""Where the servers of a job on one host listen."""
RECOVERY_VARIABLE = "MS_ENABLE_RECOVERY"
"""1: MindSpore's scheduler waits without a limit for lost nodes; who starts them again is not msrun there."""
RECOVERY_NOTE = (
    f"{RECOVERY_VARIABLE}=1 starts nothing again: --max_restarts N does, after a failure; with --spares N or "
    "--min_hosts M after the loss of a host, too"
)


def build_plan(
    spec: LaunchSpec,
    host: HostFacts,
    *,
    caller: Mapping[str, str],
    job_id: str,
    run_dir: str,
    master_port: int,
    fleet: Fleet | None = None,
    server_token: str = "",
) -> LaunchPlan:
    """Decide everything about this host's part of a job. Pure, but for reading the script's import lines.

    Args:
        fleet: all hosts of a job of several; None = this is the only one.
        caller: the environment that workers inherit.
        run_dir: where the FileStore will be; need not exist.
        master_port: the port that the store listens on; 0 in a dry run, where it is not chosen yet.
        server_token: what workers and parameter servers know each other by; empty in a dry run. Server i is on host
            i mod N of N, in the order of node_rank.

    Raises:
        UsageError: more workers than devices, a binding that this host does not allow, or servers without torch.
    """
    spec = settle_mindspore(spec, host)
    if spec.server_num and not host.has_torch:
        raise UsageError(
            f"--server_num {spec.server_num}: parameter servers need torch, which this Python does not have: "
            "pip install 'msrun[runtime]'"
        )
    ranks = tuple(range(spec.local_worker_num))
    listed = spec.table_hosts[0].device_ids if spec.table_hosts else ()
    assignment = fleet.own if fleet else HostAssignment(0, host.name, host.address, ranks, listed or ranks)
    devices, binding, threads = _place(spec, host, assignment.device_ids if fleet else listed)
    common = common_environment(
        spec,
        caller=caller,
        extra=_set_by_user(spec, caller),
        job_id=job_id,
        run_dir=run_dir,
        local_world_size=spec.local_worker_num,
        master=(fleet.master_addr if fleet else host.address, master_port),
        target=devices.target,
        threads=min(threads),
        group_world_size=len(fleet.hosts) if fleet else 1,
        rendezvous="env://" if fleet else f"file://{run_dir}/store",
        interfaces=interface_defaults(fleet.interface) if fleet else LOOPBACK_DEFAULTS,
        has_store=host.has_torch or fleet is not None,
        server_token=server_token,
    )
    has_threads = THREADS_VARIABLE in {**caller, **dict(spec.env)}
    own_threads = ["" if has_threads or count == min(threads) else str(count) for count in threads]
    workers = tuple(
        worker_plan(spec, host, assignment, index, devices, binding, own_threads[index])
        for index in range(spec.local_worker_num)
    )
    servers = server_plans(spec, assignment, len(fleet.hosts) if fleet else 1, host.address)
    notes = (
        *settings_note(spec.settings),
        *environment_notes(spec, caller, {**common, **workers[0].env}),
        *([] if has_threads else [thread_note(host.known_topology(), binding.workers)]),
        *devices.notes,
        *binding.notes,
        *_notes_of_hosts(spec, fleet),
        *mindspore_note(spec, host),
    )
    place = assignment.describe() if fleet else ""
    return plan_job(
        spec,
        [host_plan(spec, host, caller, common, workers, assignment, place, binding, servers)],
        job_id=job_id,
        run_dir=run_dir,
        master=(common[contract.MASTER_ADDR], master_port),
        target=(devices.target, devices.reason),
        notes=notes,
        fleet=fleet.hosts if fleet else (),
    )


def _place(
    spec: LaunchSpec, host: HostFacts, wanted: tuple[int, ...]
) -> tuple[DevicePlacement, HostBinding, tuple[int, ...]]:
    """Return the devices of a host's workers, their processors, and their numbers of threads."""
    devices = place_devices(spec.device_target, spec.local_worker_num, host, wanted)
    topology = host.known_topology()
    binding = bind_workers(topology, devices.physical, target=devices.target, core=spec.bind_core, numa=spec.bind_numa)
    return devices, binding, threads_per_worker(topology, binding.workers)


def _set_by_user(spec: LaunchSpec, caller: Mapping[str, str]) -> dict[str, str]:
    return {**dict(spec.env), **mindspore_environment(spec, caller)}


def _notes_of_hosts(spec: LaunchSpec, fleet: Fleet | None) -> list[str]:
    if fleet is not None:
        assumed = "the other hosts are not known before they register; here each is taken to run as many workers"
        return [assumed] if fleet.is_assumed else []
    loopback_only = f"--master_addr {spec.master_addr} is not used: a job on one host meets on loopback only"
    return [] if is_loopback(spec.master_addr) else [loopback_only]


def host_plan(
    spec: LaunchSpec,
    host: HostFacts,
    caller: Mapping[str, str],
    common: dict[str, str],
    workers: tuple[WorkerPlan, ...],
    assignment: HostAssignment,
    place: str,
    binding: HostBinding,
    servers: tuple[ServerPlan, ...],
) -> HostPlan:
    """Return what one agent runs.

    Args:
        common: variables of all workers there.
        place: the host among several, in words.
    """
    start_method = choose_start_method(spec, caller)
    return HostPlan(
        node_rank=assignment.node_rank,
        name=host.name,
        address=host.address,
        program=spec.program,
        working_directory=str(spec.working_directory),
        start_method=start_method,
        preload=preloaded_modules(spec) if start_method != "exec" else (),
        common_env=common,
        workers=workers,
        servers=servers,
        mindspore_scheduler=mindspore_scheduler(spec, assignment.node_rank),
        scheduler_cpus=binding.scheduler_cpus,
        place=place,
    )


def choose_start_method(spec: LaunchSpec, caller: Mapping[str, str]) -> StartMethod:
    """Return how workers start, as far as that can be told without starting one."""
    if not spec.program.is_python:
        return "exec"
    needs_exec = spec.mindspore == "real" or self_binding({**caller, **dict(spec.env)})
    return "exec" if needs_exec and spec.start_method == "auto" else spec.start_method


def worker_plan(
    spec: LaunchSpec,
    host: HostFacts,
    assignment: HostAssignment,
    index: int,
    devices: DevicePlacement,
    binding: HostBinding,
    own_threads: str = "",
) -> WorkerPlan:
    """Return one worker of a host.

    Args:
        index: its local rank.
        own_threads: its number of compute threads where it differs from that of others there; empty = it does not.
    """
    device_id, bound, rank = devices.device_ids[index], binding.workers[index], assignment.ranks[index]
    env = rank_environment(global_rank=rank, local_rank=index, node_rank=assignment.node_rank, device_id=device_id)
    if spec.virtual_local_rank:
        env |= virtual_rank_environment(devices.target, devices.physical[index])
    role = spec.program.role_of(rank, spec.worker_num)
    if role != (DEFAULT_ROLE, rank, spec.worker_num):
        env |= role_environment(*role)
    env |= of_rank(spec.env, {"rank": rank, "local_rank": index, "node_rank": assignment.node_rank})
    stem = spec.worker_log_name.replace("{ip}", host.address).replace("{hostname}", host.name)
    check_server_logs(stem, spec.server_num)
    folder, log_name = spec.log_folder, contract.worker_log_name(stem, rank)
    return WorkerPlan(
        global_rank=rank,
        local_rank=index,
        device_id=device_id,
        env={**env, THREADS_VARIABLE: own_threads} if own_threads else env,
        log_path=str(folder / log_name),
        error_log_path=str(folder / contract.error_log_name(log_name)) if spec.splits_logs else "",
        physical_device=devices.physical[index],
        cpus=bound.cpus,
        memory_nodes=bound.memory_nodes,
        binding=bound.reason,
    )


def server_plans(spec: LaunchSpec, assignment: HostAssignment, hosts: int, address: str) -> tuple[ServerPlan, ...]:
    """Return the parameter servers of one of `hosts` hosts: server i is on host i mod N of N.

    Args:
        address: where workers of other hosts reach this one.
    """
    found = []
    for index in range(assignment.node_rank, spec.server_num, hosts):
        name = contract.server_name(index)
        env = {
            contract.MS_ROLE: contract.ROLE_SERVER,
            contract.MS_NODE_ID: name,
            contract.MSRUN_SERVER_ADDRESS: address if hosts > 1 else LOOPBACK,
        }
        found.append(ServerPlan(index, env, str(spec.log_folder / f"{name}.log")))
    return tuple(found)


def preloaded_modules(spec: LaunchSpec) -> tuple[str, ...]:
    """Return what the fork server imports: the script's own imports, what servers need, and what the user names."""
    found = script_imports(spec)
    names = [name for one in found for name in one.names]
    if spec.server_num and not any(one.left for one in found):
        names += SERVER_IMPORTS
    return tuple(dict.fromkeys([*names, *spec.preload]))


def script_imports(spec: LaunchSpec) -> list[ScriptImports]:
    """Return what the files import that every worker will want."""
    is_module = spec.program.kind == "module" and spec.program.target != "pytest"
    root = spec.working_directory if is_module else None
    return [
        read_imports(script, root, poses=spec.mindspore == "torch")
        for script in spec.program.files(spec.working_directory)
    ]


def environment_notes(spec: LaunchSpec, caller: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    """Return what the user should know of variables that workers inherit and of those that are `planned` for them."""
    notes = []
    bound_by = self_binding({**caller, **dict(spec.env)}) if spec.program.is_python else []
    if bound_by and spec.start_method != "exec":
        notes.append(self_binding_note(bound_by, spec.start_method))
    for found in script_imports(spec) if choose_start_method(spec, caller) != "exec" else ():
        if found.left:
            told = [name for name in spec.preload if name.partition(".")[0].partition(":")[0] == found.left]
            does = "--preload has imported it by then" if told else "each worker imports it itself, which takes longer"
            notes.append(f"{found.where} may set variables that {found.left} reads at its import: {does}")
    replaced = overridden_names(caller, planned)
    if replaced:
        notes.append(f"set in your environment and replaced for the workers: {', '.join(replaced)}")
    if {**caller, **dict(spec.env)}.get(RECOVERY_VARIABLE) == "1" and not spec.max_restarts + spec.first_attempt:
        notes.append(RECOVERY_NOTE)
    return notes


@dataclass(frozen=True)
class EarlyServer:
    """A fork server without its job."""

    environment: Mapping[str, str]
    working_directory: str
    imports: tuple[str, ...]
    """Nothing of the user's own: whether the job starts is not known yet."""


def early_imports(spec: LaunchSpec, caller: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a fork server may import before it has its job: nothing of the user's own."""
    if choose_start_method(spec, caller) == "exec":
        return ()
    return tuple(name for name in preloaded_modules(spec) if name.partition(":")[0].partition(".")[0] in SAFE_PACKAGES)


def plan_early_server(spec: LaunchSpec, host: HostFacts, caller: Mapping[str, str], job_id: str) -> EarlyServer | None:
    """Return what to begin with on this host; None when there is nothing to import.

    Args:
        caller: the environment that workers inherit.

    Raises:
        UsageError: more workers than devices, or a binding that this host does not allow.
    """
    spec = settle_mindspore(spec, host)
    imports = early_imports(spec, caller)
    if not imports:
        return None
    threads = min(_place(spec, host, spec.own_device_ids)[2])
    known = early_environment(caller=caller, extra=_set_by_user(spec, caller), threads=threads)
    environment = server_environment(caller, {**known, contract.MSRUN_JOB_ID: job_id})
    return EarlyServer(environment, str(spec.working_directory), imports)
