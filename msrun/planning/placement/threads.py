"""How many compute threads each worker gets, and who decides where OpenMP's threads run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msrun.planning.placement.binding import WorkerBinding
from msrun.planning.placement.topology import Topology
from msrun.planning.program import StartMethod

THREADS_VARIABLE = "OMP_NUM_THREADS"
SELF_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With one of these OpenMP binds the thread that loads it: every worker forked afterwards would sit on its CPU."""
ROUNDING = 1e-9
"""Three thirds of a core are one, whatever floating point makes of them."""


def threads_per_worker(topology: Topology, workers: Sequence[WorkerBinding]) -> tuple[int, ...]:
    """Return the number of compute threads of each worker: the physical cores it has for itself, at least one.

    Unbound workers share all cores evenly; cores that several bound workers have count in parts; what the cgroup's
    quota allows is shared evenly too and never exceeded.
    """
    cores = topology.cores()
    core_of = {cpu.number: core[0].core for core in cores for cpu in core}
    owned = [{core_of[cpu] for cpu in worker.cpus} for worker in workers]
    users = Counter(core for own in owned for core in own)
    even = len(cores) / len(workers)
    shares = [sum(1 / users[core] for core in own) if own else even for own in owned]
    if topology.quota_cores is not None:
        limit = int(topology.quota_cores) / len(workers)
        shares = [min(share, limit) for share in shares]
    return tuple(max(1, int(share + ROUNDING)) for share in shares)


def thread_note(topology: Topology, workers: Sequence[WorkerBinding]) -> str:
    """Return what the user is told of the number of threads."""
    threads = threads_per_worker(topology, workers)
    low, high = min(threads), max(threads)
    count = f"{low}" if low == high else f"{low} to {high}"
    how = "its own cores" if any(worker.cpus for worker in workers) else "cores shared evenly"
    if threads != threads_per_worker(replace(topology, quota_cores=None), workers):
        how = f"its part of the cgroup's limit of {topology.quota_cores:g} CPUs"
    return f"{THREADS_VARIABLE}={count} for each worker ({how}; set it to change)"


def self_binding(env: Mapping[str, str]) -> list[str]:
    """Return the variables by which OpenMP would bind the fork server, and with it every worker, to one processor."""
    return [name for name in SELF_BINDING_VARIABLES if env.get(name, "").lower() not in ("", "false", "disabled")]


def self_binding_note(names: Sequence[str], asked: StartMethod) -> str:
    """Return what these variables do to workers that would start by fork."""
    if asked == "auto":
        return f"{', '.join(names)} binds whole processes: workers start by exec, each for itself"
    return f"--start_method fork with {', '.join(names)}: OpenMP binds the fork server, so workers may share one CPU"
