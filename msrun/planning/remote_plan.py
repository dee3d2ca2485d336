"""The plan of a job that is started on many hosts from here, as far as it can be told without asking them. Pure.

Which devices, cores and threads there are, and where a host keeps its temporary files, is decided on each host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msrun import contract
from msrun.planning.build import environment_notes, host_plan, plan_job, server_plans, worker_plan
from msrun.planning.environment import common_environment
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.assignment import UNKNOWN, assign_hosts
from msrun.planning.hosts.forwarded import explain_kept_secrets, forwarded_environment
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.placement.binding import THREADS_VARIABLE, HostBinding, WorkerBinding
from msrun.planning.placement.host import DevicePlacement, HostFacts
from msrun.planning.plan import AgentPlan, HostPlan, LaunchPlan
from msrun.planning.settings import settings_note
from msrun.planning.spec import LaunchSpec, is_loopback

LOOPBACK = "127.0.0.1"
UNSEEN = HostFacts("{hostname}", "{ip}", ())
"""A host of which nothing is known: the name of a log keeps what the host fills in."""
DECIDED_THERE = (
    contract.MASTER_PORT,
    contract.MS_SCHED_PORT,
    contract.MSRUN_DEVICE_TARGET,
    contract.MSRUN_LOG_DIR,
    contract.MSRUN_PROGRESS,
    contract.MSRUN_RENDEZVOUS,
    contract.RANK_TABLE_FILE,
)
"""Variables of workers whose values are known when the host has been reached."""


def build_remote_plan(
    spec: LaunchSpec, caller: Mapping[str, str], *, job_id: str, agent_command: Callable[[str], str]
) -> LaunchPlan:
    """Decide what can be decided here about a job on `spec.host_entries`.

    Args:
        caller: the launcher's environment.
        agent_command: path of an interpreter -> what starts an agent with it.
    """
    forwarded = forwarded_environment(caller, spec.forward_env)
    assignments = assign_hosts(spec.host_entries, spec.table_hosts)
    master_addr = _master_addr(spec, assignments)
    hosts = tuple(
        _host(
            spec, entry, assignment, _common(spec, assignment, forwarded, job_id, master_addr), forwarded, agent_command
        )
        for entry, assignment in zip(spec.host_entries, assignments, strict=True)
    )
    return plan_job(
        spec,
        hosts,
        job_id=job_id,
        run_dir="",
        master=(master_addr, spec.master_port),
        target=(spec.device_target, "--device_target" if spec.device_target != "auto" else "decided on each host"),
        notes=_notes(spec, caller, forwarded, {**hosts[0].common_env, **hosts[0].workers[0].env}),
        fleet=assignments if len(assignments) > 1 else (),
        forwarded=forwarded,
    )


def plan_agent(entry: HostEntry, agent_command: Callable[[str], str]) -> AgentPlan:
    """Return how a host is reached and what is started there; `agent_command` as for `build_remote_plan`."""
    python = entry.python or sys.executable
    return AgentPlan(entry.name, entry.user, entry.port, python, agent_command(python))


def _master_addr(spec: LaunchSpec, assignments: Sequence[HostAssignment]) -> str:
    """Return where the scheduler will be: an address given, else node 0's as far as the list tells it."""
    if len(assignments) == 1:
        return LOOPBACK
    return assignments[0].address if is_loopback(spec.master_addr) else spec.master_addr


def _common(
    spec: LaunchSpec, assignment: HostAssignment, forwarded: Mapping[str, str], job_id: str, master_addr: str
) -> dict[str, str]:
    """Return the variables of all workers of a host that are known here."""
    given = dict(spec.env)
    env = common_environment(
        spec,
        caller=forwarded,
        extra=given,
        job_id=job_id,
        run_dir="",
        local_world_size=len(assignment.ranks),
        master=(master_addr, 0),
        target=spec.device_target,
        threads=1,
        group_world_size=len(spec.host_entries),
        interfaces={},
    )
    unknown = {*DECIDED_THERE, *([] if THREADS_VARIABLE in {**forwarded, **given} else [THREADS_VARIABLE])}
    if spec.device_target != "auto":
        unknown.discard(contract.MSRUN_DEVICE_TARGET)
    if master_addr == UNKNOWN:
        unknown |= {contract.MASTER_ADDR, contract.MS_SCHED_HOST}
    return {name: value for name, value in env.items() if name not in unknown}


def _host(
    spec: LaunchSpec,
    entry: HostEntry,
    assignment: HostAssignment,
    common: dict[str, str],
    forwarded: Mapping[str, str],
    agent_command: Callable[[str], str],
) -> HostPlan:
    ids = assignment.device_ids
    devices = DevicePlacement(spec.device_target, ids, tuple(map(str, ids)), "")
    binding = HostBinding((WorkerBinding((), (), ""),) * len(ids))
    workers = tuple(worker_plan(spec, UNSEEN, assignment, index, devices, binding) for index in range(len(ids)))
    place = f"node {assignment.node_rank} ({entry.name})"
    servers = server_plans(spec, assignment, len(spec.host_entries), assignment.address)
    host = host_plan(spec, UNSEEN, forwarded, common, workers, assignment, place, binding, servers)
    return replace(host, name=entry.name, address=assignment.address, agent=plan_agent(entry, agent_command))


def _notes(
    spec: LaunchSpec, caller: Mapping[str, str], forwarded: Mapping[str, str], planned: Mapping[str, str]
) -> list[str]:
    names = (contract.MASTER_ADDR, *DECIDED_THERE, THREADS_VARIABLE)
    open_names = [name for name in names if name not in {**planned, **forwarded}]
    kept = explain_kept_secrets(caller, spec.forward_env, dict(spec.env))
    return [
        *settings_note(spec.settings),
        *([kept] if kept else []),
        *environment_notes(spec, forwarded, planned),
        f"decided on the hosts: whether the devices are there, cores, network interfaces, {', '.join(open_names)}",
    ]
