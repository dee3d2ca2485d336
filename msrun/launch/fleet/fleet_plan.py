"""The plan of a job over many hosts: put together from what each host has decided for itself."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msrun import contract
from msrun.launch.transport.pipe import agent_command
from msrun.planning.host_seat import HostSeat
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.hosts.remote_plan import plan_agent
from msrun.planning.hosts.seats import seat_hosts
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.spec import LaunchSpec


def spec_of_host(spec: LaunchSpec, seats: Sequence[HostSeat], node_rank: int, token: str) -> LaunchSpec:
    """Return what is asked of one host; master and log directory are settled when the job starts."""
    return replace(
        spec,
        host_entries=(),
        table_hosts=tuple(seats),
        local_worker_num=len(seats[node_rank].ranks),
        node_rank=node_rank if len(seats) > 1 else -1,
        token=token,
        rank_table_file=None,
        settings=(),
        tail_ranks=(),
    )


def assemble_plan(
    spec: LaunchSpec,
    job_id: str,
    master: tuple[str, int],
    hosts: Mapping[int, HostPlan],
    notes: Mapping[int, Sequence[str]],
    target: str,
    forwarded: Mapping[str, str],
) -> LaunchPlan:
    """Return the plan of the whole job as this launcher shows it: every log by its name here.

    Args:
        hosts: node_rank -> what the host has decided.
        notes: node_rank -> what a user should know of that; what several hosts say is said once.
        forwarded: variables that they got from here.
    """
    entries = spec.host_entries
    seats = [seat for seat in seat_hosts(entries, spec.table_hosts) if seat.node_rank in hosts]
    fleet = tuple(
        replace(seat, name=hosts[seat.node_rank].name, address=hosts[seat.node_rank].address) for seat in seats
    )
    return LaunchPlan(
        job_id=job_id,
        world_size=spec.worker_num,
        master_addr=master[0],
        master_port=master[1],
        log_dir=str(spec.log_dir),
        run_dir=str(Path(tempfile.gettempdir(), f"msrun-{job_id}")),
        device_target=target,
        device_reason=f"as found on {hosts[0].name}" if 0 in hosts else "",
        cluster_time_out_s=spec.cluster_time_out_s,
        grace_s=spec.grace_s,
        forward_signals=spec.forward_signals,
        hang_time_out_s=spec.hang_time_out_s,
        max_restarts=spec.max_restarts,
        log_max_bytes=spec.log_max_bytes,
        log_keep=spec.log_keep,
        tail_ranks=spec.tail_ranks,
        rank_table_file=str(spec.rank_table_file or spec.log_dir / contract.RANK_TABLE_JSON),
        hosts=tuple(_at_home(hosts[node], entries[node], spec.log_dir) for node in sorted(hosts)),
        settings=spec.settings,
        notes=_merge_notes(notes, entries),
        fleet=fleet if len(entries) > 1 else (),
        forwarded=dict(forwarded),
    )


def _at_home(host: HostPlan, entry: HostEntry, log_dir: Path) -> HostPlan:
    workers = tuple(replace(worker, log_path=str(log_dir / Path(worker.log_path).name)) for worker in host.workers)
    servers = tuple(replace(server, log_path=str(log_dir / Path(server.log_path).name)) for server in host.servers)
    place = host.place or f"{entry.name} ({host.name})"
    return replace(host, workers=workers, servers=servers, place=place, agent=plan_agent(entry, agent_command))


def _merge_notes(notes: Mapping[int, Sequence[str]], entries: Sequence[HostEntry]) -> tuple[str, ...]:
    said: dict[str, list[str]] = {}
    for node_rank, texts in sorted(notes.items()):
        for text in texts:
            said.setdefault(text, []).append(entries[node_rank].name)
    return tuple(
        text if len(names) == len(entries) else f"{names[0]}{' and others' if len(names) > 1 else ''}: {text}"
        for text, names in said.items()
    )
