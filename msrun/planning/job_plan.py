"""The plan of a whole job: what was asked, and what each host runs. The one place where a LaunchPlan is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msrun import contract
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.spec import LaunchSpec


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
        cluster_time_out_s=spec.cluster_time_out_s,
        grace_s=spec.grace_s,
        forward_signals=spec.forward_signals,
        hang_time_out_s=spec.hang_time_out_s,
        exit_time_out_s=spec.exit_time_out_s,
        max_restarts=spec.max_restarts,
        restart_on=spec.restart_on,
        no_restart_on=spec.no_restart_on,
        log_max_bytes=spec.log_max_bytes,
        log_keep=spec.log_keep,
        tail_ranks=spec.tail_ranks,
        interactive_rank=spec.interactive_rank,
        rank_table_file=rank_table_path(spec),
        hosts=tuple(hosts),
        settings=spec.settings,
        notes=(*notes, *_note_of_spares(spec)),
        fleet=tuple(fleet),
        forwarded=dict(forwarded or {}),
    )


def _note_of_spares(spec: LaunchSpec) -> list[str]:
    if not spec.min_hosts or not spec.is_remote:
        return []
    spares = f"spare hosts: {', '.join(entry.name for entry in spec.spares)}" if spec.spares else "no spare hosts"
    count = len(spec.host_entries)
    return [
        f"{spares}; {spec.min_hosts} of {count} hosts are enough to start again; restarts left: {spec.max_restarts}"
    ]


def rank_table_path(spec: LaunchSpec) -> str:
    """Return the path of the user's table, or of the one that is generated."""
    return str(spec.rank_table_file or spec.log_dir / contract.RANK_TABLE_JSON)
