"""The workers of a host as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msrun.planning.placement.topology import format_cpu_list

if TYPE_CHECKING:
    from msrun.planning.plan import WorkerPlan


def render_workers(workers: Sequence[WorkerPlan], scheduler_cpus: Sequence[int]) -> list[str]:
    """Return the workers as columns; those of physical devices and of processors only where they say something."""
    columns = {
        "rank": [str(worker.global_rank) for worker in workers],
        "local": [str(worker.local_rank) for worker in workers],
        "device": [str(worker.device_id) for worker in workers],
        "physical": [worker.physical_device for worker in workers],
        "cpus": [format_cpu_list(worker.cpus) or "all" for worker in workers],
        "memory": [format_cpu_list(worker.memory_nodes) or "any" for worker in workers],
    }
    if columns["physical"] == columns["device"]:
        del columns["physical"]
    if not any(worker.memory_nodes for worker in workers):
        del columns["memory"]
    if not any(worker.cpus for worker in workers):
        del columns["cpus"]
    widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}
    rows = ["  ".join(name.rjust(widths[name]) for name in columns) + "  log"]
    for index, worker in enumerate(workers):
        cells = [cells[index].rjust(widths[name]) for name, cells in columns.items()]
        rows.append("  ".join([*cells, worker.log_path]))
    reasons: dict[str, list[int]] = {}
    for worker in workers:
        reasons.setdefault(worker.binding, []).append(worker.global_rank)
    told = [f"binding of rank {format_cpu_list(ranks)}: {why}" for why, ranks in reasons.items() if "cpus" in columns]
    if scheduler_cpus:
        told.append(f"binding of the scheduler: CPU {format_cpu_list(scheduler_cpus)}")
    return [f"  {line}" for line in (*rows, *told)]
