"""From what was asked to what is carried out: LaunchSpec and HostFacts in, LaunchPlan out; of a job on many hosts as
much as can be told without asking them for devices, cores, threads and temporary files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.environment import (
    common_environment,
    early_environment,
    mindspore_environment,
    of_rank,
    server_environment,
    settle_mindspore,
)
from msrun.planning.hosts import UNKNOWN, Fleet, HostAssignment, HostEntry, assign_hosts
from msrun.planning.masking import explain_kept_secrets, forwarded_environment
from msrun.planning.placement.host import (
    ASCEND_VARIABLE,
    CUDA_VARIABLE,
    THREADS_VARIABLE,
    DevicePlacement,
    HostBinding,
    HostFacts,
    WorkerBinding,
    bind_workers,
    place_devices,
    self_binding,
    self_binding_note,
    thread_note,
    threads_per_worker,
)
from msrun.planning.plan import AgentPlan, HostPlan, LaunchPlan, ServerPlan, WorkerPlan
from msrun.planning.program import OF_OPTIMIZERS, SAFE_PACKAGES, ScriptImports, StartMethod, read_imports
from msrun.planning.record import Record
from msrun.planning.settings import settings_note
from msrun.planning.spec import LOOPBACK, JobTerms, LaunchSpec, check_server_logs, is_loopback

SERVER_IMPORTS = ("msrun.server.serving", OF_OPTIMIZERS)  # the second one with their first optimizer
OF_MINDSPORE = {contract.MS_ROLE: contract.ROLE_SCHEDULER, contract.MS_NODE_ID: "sched", contract.RANK_ID: "0"}
"""Variables of MindSpore's own scheduler."""
OURS = "msrun.mindspore"
POSED = f"--mindspore torch takes {OURS} instead"
RECOVERY_VARIABLE = "MS_ENABLE_RECOVERY"  # 1: MindSpore's scheduler waits for lost nodes for ever
RECOVERY_NOTE = (
    f"{RECOVERY_VARIABLE}=1 starts nothing again: --max_restarts N does, after a failure; with --spares N or "
    "--min_hosts M after the loss of a host, too"
)
ASSUMED = "the other hosts are not known before they register; here each is taken to run as many workers"
DECIDED_THERE = (  # variables of workers on other hosts whose values are known when the host has been reached
    contract.MASTER_PORT,
    contract.MS_SCHED_PORT,
    contract.MSRUN_DEVICE_TARGET,
    contract.MSRUN_LOG_DIR,
    contract.MSRUN_PROGRESS,
    contract.MSRUN_RENDEZVOUS,
    contract.RANK_TABLE_FILE,
)


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
    """Return the plan of a job on hosts whose parts are decided. `run_dir`: its temporary folder here, if it has one;
    `master`: numeric address and port of the store, or of several hosts' scheduler, 0 = chosen at start; `target`:
    device target, and why; `fleet`: all hosts of several; `forwarded`: variables that go to them."""
    if spec.min_hosts and spec.is_remote:
        spares = f"spare hosts: {', '.join(entry.name for entry in spec.spares)}" if spec.spares else "no spare hosts"
        count = f"{spec.min_hosts} of {len(spec.host_entries)} hosts"
        notes = [*notes, f"{spares}; {count} are enough to start again; restarts left: {spec.max_restarts}"]
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
        notes=tuple(notes),
        fleet=tuple(fleet),
        forwarded=dict(forwarded or {}),
        **{term.name: getattr(spec, term.name) for term in fields(JobTerms)},
    )


class _Part(Record):
    """One host's part of a job: what its plan is made of."""

    spec: LaunchSpec
    caller: Mapping[str, str]  # the environment that workers inherit
    assignment: HostAssignment
    hosts: int
    name: str
    address: str  # of the host as its logs are named; where nothing is known of it, what it fills in itself
    devices: DevicePlacement
    binding: HostBinding
    own_threads: Sequence[str] = ()  # compute threads of each worker, where they differ
    reached_at: str = ""  # where workers of other hosts reach its parameter servers

    def plan(self, common: dict[str, str], place: str) -> HostPlan:
        """Return what one agent runs, of the `common` variables of its workers; `place`: as in `HostPlan`."""
        spec, start_method = self.spec, choose_start_method(self.spec, self.caller)
        return HostPlan(
            node_rank=self.assignment.node_rank,
            name=self.name,
            address=self.address,
            program=spec.program,
            working_directory=str(spec.working_directory),
            start_method=start_method,
            preload=preloaded_modules(spec) if start_method != "exec" else (),
            common_env=common,
            workers=tuple(map(self._worker, range(len(self.devices.device_ids)))),
            servers=tuple(map(self._server, range(self.assignment.node_rank, spec.server_num, self.hosts))),
            mindspore_scheduler=OF_MINDSPORE if spec.mindspore == "real" and not self.assignment.node_rank else {},
            scheduler_cpus=self.binding.scheduler_cpus,
            place=place,
        )

    def _worker(self, index: int) -> WorkerPlan:
        spec, devices, bound = self.spec, self.devices, self.binding.workers[index]
        node_rank = self.assignment.node_rank
        rank, folder = self.assignment.ranks[index], spec.log_folder
        env = {
            contract.RANK: str(rank),
            contract.LOCAL_RANK: str(index),
            contract.GROUP_RANK: str(node_rank),
            contract.ROLE_RANK: str(rank),
            contract.MS_ROLE: contract.ROLE_WORKER,
            contract.MS_NODE_ID: str(rank),
            contract.MS_NODE_RANK: str(node_rank),
            contract.RANK_ID: str(rank),
            contract.DEVICE_ID: str(devices.device_ids[index]),
        }
        if spec.virtual_local_rank:
            visible = {"gpu": CUDA_VARIABLE, "ascend": ASCEND_VARIABLE}.get(devices.target)
            env |= {contract.LOCAL_RANK: "0", contract.DEVICE_ID: "0"}  # Source: torchrun's --virtual-local-rank
            env |= {visible: devices.physical[index]} if visible else {}
        env |= of_rank(spec.env, {"rank": rank, "local_rank": index, "node_rank": node_rank})
        if self.own_threads and self.own_threads[index]:
            env[THREADS_VARIABLE] = self.own_threads[index]
        stem = spec.worker_log_name.replace("{ip}", self.address).replace("{hostname}", self.name)
        check_server_logs(stem, spec.server_num)
        log_name = contract.worker_log_name(stem, rank)
        return WorkerPlan(
            global_rank=rank,
            local_rank=index,
            device_id=devices.device_ids[index],
            env=env,
            log_path=str(folder / log_name),
            error_log_path=str(folder / contract.error_log_name(log_name)) if spec.splits_logs else "",
            physical_device=devices.physical[index],
            cpus=bound.cpus,
            memory_nodes=bound.memory_nodes,
            binding=bound.reason,
        )

    def _server(self, index: int) -> ServerPlan:
        name = contract.server_name(index)
        env = {
            contract.MS_ROLE: contract.ROLE_SERVER,
            contract.MS_NODE_ID: name,
            contract.MSRUN_SERVER_ADDRESS: self.reached_at if self.hosts > 1 else LOOPBACK,
        }
        return ServerPlan(index, env, str(self.spec.log_folder / f"{name}.log"))


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
    """Decide everything about this host's part of a job; pure, but for reading the script's imports (UsageError: more
    workers than devices, a binding that this host does not allow, or servers without torch). `fleet`: None = this is
    the only host; `run_dir`: need not exist; `master_port`: of the store, 0 in a dry run; `server_token`: empty in a
    dry run."""
    spec = settle_mindspore(spec, host)
    ranks = tuple(range(spec.local_worker_num))
    listed = spec.table_hosts[0].device_ids if spec.table_hosts else ()
    assignment = fleet.own if fleet else HostAssignment(0, host.name, host.address, ranks, listed or ranks)
    devices, binding, threads = _place(spec, host, assignment.device_ids if fleet else listed)
    common = common_environment(
        spec,
        fleet,
        caller=caller,
        extra=_set_by_user(spec, caller),
        job_id=job_id,
        run_dir=run_dir,
        master=(fleet.master_addr if fleet else host.address, master_port),
        target=devices.target,
        threads=min(threads),
        has_store=host.has_torch or fleet is not None,
        server_token=server_token,
    )
    has_threads = THREADS_VARIABLE in {**caller, **dict(spec.env)}
    own_threads = ["" if has_threads or count == min(threads) else str(count) for count in threads]
    hosts = len(fleet.hosts) if fleet else 1
    part = _Part(
        spec, caller, assignment, hosts, host.name, host.address, devices, binding, own_threads, reached_at=host.address
    )
    own = part.plan(common, assignment.describe() if fleet else "")
    missing = "" if host.mindspore_version else "; mindspore is not installed"
    unused = f"--master_addr {spec.master_addr} is not used: a job on one host meets on loopback only"
    notes = [
        *settings_note(spec.settings),
        *environment_notes(spec, caller, {**common, **own.workers[0].env}),
        *([] if has_threads else [thread_note(host.known_topology(), binding.workers)]),
        *devices.notes,
        *binding.notes,
        *([ASSUMED] if fleet and fleet.is_assumed else [] if fleet or is_loopback(spec.master_addr) else [unused]),
        *([f"mindspore {host.mindspore_version} of this environment; {POSED}"] if spec.mindspore == "real" else []),
        *([f"mindspore is {OURS}, on torch{missing}"] if spec.mindspore == "torch" else []),
    ]
    return plan_job(
        spec,
        [own],
        job_id=job_id,
        run_dir=run_dir,
        master=(common[contract.MASTER_ADDR], master_port),
        target=(devices.target, devices.reason),
        notes=notes,
        fleet=fleet.hosts if fleet else (),
    )


def build_remote_plan(
    spec: LaunchSpec, caller: Mapping[str, str], *, job_id: str, agent_command: Callable[[str], str]
) -> LaunchPlan:
    """Decide what can be here about `spec.host_entries`; `agent_command`: interpreter -> what starts an agent."""
    forwarded = forwarded_environment(caller, spec.forward_env)
    assignments = assign_hosts(spec.host_entries, spec.table_hosts)
    if len(assignments) == 1:
        master_addr = LOOPBACK
    else:  # an address given, else node 0's as far as the list tells it
        master_addr = assignments[0].address if is_loopback(spec.master_addr) else spec.master_addr
    unknown = {*DECIDED_THERE, *([] if THREADS_VARIABLE in {**forwarded, **dict(spec.env)} else [THREADS_VARIABLE])}
    unknown -= set() if spec.device_target == "auto" else {contract.MSRUN_DEVICE_TARGET}
    unknown |= {contract.MASTER_ADDR, contract.MS_SCHED_HOST} if master_addr == UNKNOWN else set()
    hosts = []
    for entry, assignment in zip(spec.host_entries, assignments, strict=True):
        ids = assignment.device_ids
        env = common_environment(
            spec,
            Fleet(assignment.node_rank, assignments, master_addr, interface=""),
            caller=forwarded,
            extra=dict(spec.env),
            job_id=job_id,
            run_dir="",
            master=(master_addr, 0),
            target=spec.device_target,
            threads=1,
        )
        part = _Part(
            spec,
            forwarded,
            assignment,
            len(assignments),
            "{hostname}",
            "{ip}",
            DevicePlacement(spec.device_target, ids, tuple(map(str, ids)), ""),
            HostBinding((WorkerBinding((), (), ""),) * len(ids)),
            reached_at=assignment.address,
        )
        common = {name: value for name, value in env.items() if name not in unknown}
        host = part.plan(common, f"node {assignment.node_rank} ({entry.name})")
        agent = plan_agent(entry, agent_command)
        hosts.append(replace(host, name=entry.name, address=assignment.address, agent=agent))
    planned = {**hosts[0].common_env, **hosts[0].workers[0].env}
    names = (contract.MASTER_ADDR, *DECIDED_THERE, THREADS_VARIABLE)
    open_names = [name for name in names if name not in {**planned, **forwarded}]
    kept = explain_kept_secrets(caller, spec.forward_env, dict(spec.env))
    return plan_job(
        spec,
        hosts,
        job_id=job_id,
        run_dir="",
        master=(master_addr, spec.master_port),
        target=(spec.device_target, "--device_target" if spec.device_target != "auto" else "decided on each host"),
        notes=[
            *settings_note(spec.settings),
            *([kept] if kept else []),
            *environment_notes(spec, forwarded, planned),
            f"decided on the hosts: whether the devices are there, cores, network interfaces, {', '.join(open_names)}",
        ],
        fleet=assignments if len(assignments) > 1 else (),
        forwarded=forwarded,
    )


def plan_agent(entry: HostEntry, agent_command: Callable[[str], str]) -> AgentPlan:
    """Return how a host is reached and what is started there; `agent_command` as for `build_remote_plan`."""
    python = entry.python or sys.executable
    return AgentPlan(entry.name, entry.user, entry.port, python, agent_command(python))


def _place(
    spec: LaunchSpec, host: HostFacts, wanted: tuple[int, ...]
) -> tuple[DevicePlacement, HostBinding, tuple[int, ...]]:
    """Return the devices of a host's workers, their processors, and their numbers of threads; refuse what it cannot."""
    if spec.server_num and not host.has_torch:
        raise UsageError(
            f"--server_num {spec.server_num}: parameter servers need torch, which this Python does not have: "
            "pip install 'msrun[runtime]'"
        )
    devices = place_devices(spec.device_target, spec.local_worker_num, host, wanted)
    topology = host.known_topology()
    binding = bind_workers(topology, devices.physical, target=devices.target, core=spec.bind_core, numa=spec.bind_numa)
    return devices, binding, threads_per_worker(topology, binding.workers)


def _set_by_user(spec: LaunchSpec, caller: Mapping[str, str]) -> dict[str, str]:
    return {**dict(spec.env), **mindspore_environment(spec, caller)}


def choose_start_method(spec: LaunchSpec, caller: Mapping[str, str]) -> StartMethod:
    """Return how workers start, as far as that can be told without starting one."""
    if not spec.program.is_python:
        return "exec"
    needs_exec = spec.mindspore == "real" or self_binding({**caller, **dict(spec.env)})
    return "exec" if needs_exec and spec.start_method == "auto" else spec.start_method


def preloaded_modules(spec: LaunchSpec) -> tuple[str, ...]:
    """Return what the fork server imports: the script's own imports, what servers need, and what the user names."""
    found = script_imports(spec)
    names = [name for one in found for name in one.names]
    if spec.server_num and not any(one.left for one in found):
        names += SERVER_IMPORTS
    return tuple(dict.fromkeys([*names, *spec.preload]))


def script_imports(spec: LaunchSpec) -> list[ScriptImports]:
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
    replaced = (name for name, value in planned.items() if caller.get(name, value) != value)
    if names := sorted(name for name in replaced if not planned[name].startswith(f"{caller[name]}{os.pathsep}")):
        notes.append(f"set in your environment and replaced for the workers: {', '.join(names)}")
    if {**caller, **dict(spec.env)}.get(RECOVERY_VARIABLE) == "1" and not spec.max_restarts + spec.first_attempt:
        notes.append(RECOVERY_NOTE)
    return notes


class EarlyServer(Record):
    """A fork server without its job."""

    environment: Mapping[str, str]
    working_directory: str
    imports: tuple[str, ...]  # nothing of the user's own: whether the job starts is not known yet


def early_imports(spec: LaunchSpec, caller: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a fork server may import before it has its job: nothing of the user's own."""
    if choose_start_method(spec, caller) == "exec":
        return ()
    return tuple(name for name in preloaded_modules(spec) if name.partition(":")[0].partition(".")[0] in SAFE_PACKAGES)


def plan_early_server(spec: LaunchSpec, host: HostFacts, caller: Mapping[str, str], job_id: str) -> EarlyServer | None:
    """Return what to begin with on this host; None when there is nothing to import. UsageError as of `build_plan`."""
    spec = settle_mindspore(spec, host)
    imports = early_imports(spec, caller)
    if not imports:
        return None
    threads = min(_place(spec, host, spec.own_device_ids)[2])
    known = early_environment(caller=caller, extra=_set_by_user(spec, caller), threads=threads)
    environment = server_environment(caller, {**known, contract.MSRUN_JOB_ID: job_id})
    return EarlyServer(environment, str(spec.working_directory), imports)
