"""Which processors and which memory each worker gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msrun.errors import UsageError
from msrun.planning.placement.host import Cpu, Topology
from msrun.planning.program import StartMethod
from msrun.planning.spec import SCHEDULER_KEY, CoreBinding
from ranktable.hosts.ranges import fold_numbers

IN_TURN = "one core in turn"
"""How the reason of a worker begins that shares its core because there are fewer cores than workers."""

Core = tuple[Cpu, ...]


@dataclass(frozen=True)
class WorkerBinding:
    """Where one worker runs."""

    cpus: tuple[int, ...]
    """Processors; empty = not bound."""
    memory_nodes: tuple[int, ...]
    """NUMA nodes of its memory; empty = not bound."""
    reason: str
    """Why these, in words."""


@dataclass(frozen=True)
class HostBinding:
    """Where all processes of a host run."""

    workers: tuple[WorkerBinding, ...]
    """By local rank."""
    scheduler_cpus: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    """What the user should know of it, one line each."""


def bind_workers(
    topology: Topology, devices: Sequence[str], *, target: str, core: CoreBinding | None, numa: bool
) -> HostBinding:
    """Give every local worker, with these physical devices of a target, its processors and its memory (UsageError: the
    dict names a device or processor that is not here or not allowed).
    """
    if core is None and not numa:
        return HostBinding((WorkerBinding((), (), "not bound"),) * len(devices))
    near = topology.device_nodes.get(target, {})
    homes = [near.get(device) for device in devices]
    homes = [node if node in topology.nodes() else None for node in homes]
    notes: list[str] = []
    if numa:
        bound = _bind_nodes(topology, homes, core is not None and core.is_auto, notes)
    else:
        bound = _share_near(topology.cores(), homes)
    if core is not None and not core.is_auto:
        _check_named(core, topology, devices, near)
        bound = _bind_named(core, topology, devices, bound if numa else None, notes)
    taking_turns: dict[str, list[int]] = {}
    for local_rank, binding in enumerate(bound):
        if binding.reason.startswith(IN_TURN):
            taking_turns.setdefault(binding.reason, []).append(local_rank)
    notes += [f"--bind_core: local ranks {fold_numbers(who, ',')} get {why}" for why, who in taking_turns.items()]
    return HostBinding(tuple(bound), core.scheduler if core else (), tuple(notes))


# -- shares ---------------------------------------------------------------------------------------------------------


def _numbers(cores: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu.number for core in cores for cpu in core))


def _share_evenly(cores: Sequence[Core], workers: int, where: str) -> list[WorkerBinding]:
    """Cut the row of cores into even pieces, whole cores each; with fewer cores than workers they take turns."""
    if len(cores) < workers:
        why = f"{IN_TURN}: {len(cores)} cores for {workers} workers"
        return [WorkerBinding(_numbers([cores[index % len(cores)]]), (), why) for index in range(workers)]
    cuts = [index * len(cores) // workers for index in range(workers + 1)]
    reason = f"an even share of the {len(cores)} cores{where}"
    return [WorkerBinding(_numbers(cores[cuts[i] : cuts[i + 1]]), (), reason) for i in range(workers)]


def _share_near(cores: Sequence[Core], homes: Sequence[int | None]) -> list[WorkerBinding]:
    """Share evenly, but let each worker choose cores of its device's NUMA node first, in order of local ranks."""
    workers = len(homes)
    if len(cores) < workers or all(home is None for home in homes):
        return _share_evenly(cores, workers, "")
    base, rest = divmod(len(cores), workers)
    sizes = [base + (index < rest) for index in range(workers)]
    free = list(cores)
    taken: list[list[Core]] = []
    for home, size in zip(homes, sizes, strict=True):
        taken.append([core for core in free if core[0].node == home][:size])
        free = [core for core in free if core not in taken[-1]]
    bound = []
    for home, size, own in zip(homes, sizes, taken, strict=True):
        more, free = free[: size - len(own)], free[size - len(own) :]
        if home is None:
            reason = "an even share of the cores left over: the NUMA node of its device is not known"
        elif not own:
            reason = f"an even share of the cores left over: NUMA node {home} of its device has none left"
        else:
            reason = f"an even share near its device: NUMA node {home}"
            reason += f", and {len(more)} from elsewhere" if more else ""
        bound.append(WorkerBinding(_numbers([*own, *more]), (), reason))
    return bound


def _bind_nodes(
    topology: Topology, homes: Sequence[int | None], is_split: bool, notes: list[str]
) -> list[WorkerBinding]:
    """Put each worker on one NUMA node: its device's, else the nodes in blocks of local ranks."""
    nodes = topology.nodes()
    if len(nodes) == 1:
        notes.append(f"--bind_numa changes nothing for memory: NUMA node {nodes[0]} is the only one with usable CPUs")
    chosen = [nodes[i * len(nodes) // len(homes)] if home is None else home for i, home in enumerate(homes)]
    bound: list[WorkerBinding] = []
    for local_rank, node in enumerate(chosen):
        cores = [core for core in topology.cores() if core[0].node == node]
        mates = [mate for mate, other in enumerate(chosen) if other == node]
        if is_split:
            share = _share_evenly(cores, len(mates), f" of NUMA node {node}")[mates.index(local_rank)]
        else:
            share = WorkerBinding(_numbers(cores), (), f"all cores of NUMA node {node}")
        memory = (node,) if len(nodes) > 1 and node in topology.memory_nodes else ()
        near = ", where its device is" if homes[local_rank] is not None else ""
        bound.append(WorkerBinding(share.cpus, memory, share.reason + near))
    without = sorted({node for node in chosen if node not in topology.memory_nodes})
    if without:
        notes.append(
            f"--bind_numa: no memory of NUMA node {fold_numbers(without, ',')} may be used; only CPUs are bound"
        )
    return bound


# -- the dict -------------------------------------------------------------------------------------------------------


def _check_named(core: CoreBinding, topology: Topology, devices: Sequence[str], near: Mapping[str, int | None]) -> None:
    known = sorted({int(name) for name in (*devices, *near) if name.isdigit()})
    for number in core.devices:
        if number not in known:
            raise UsageError(
                f"--bind_core: 'device{number}' is no device here; "
                f"there are devices {fold_numbers(known, ',') or 'without numbers only'}, by their physical numbers"
            )
    online, allowed = {cpu.number for cpu in topology.cpus}, topology.allowed
    lists = {f"device{number}": cpus for number, cpus in core.devices.items()} | {SCHEDULER_KEY: core.scheduler}
    for key, cpus in lists.items():
        if missing := set(cpus) - online:
            raise UsageError(
                f"--bind_core: {key!r} names CPU {fold_numbers(missing, ',')}, which does not exist here; "
                f"there are {fold_numbers(online, ',')}"
            )
        if forbidden := set(cpus) - set(allowed):
            raise UsageError(
                f"--bind_core: {key!r} names CPU {fold_numbers(forbidden, ',')}, which this process may not use "
                f"(affinity or cgroup); it may use {fold_numbers(allowed, ',')}"
            )


def _bind_named(
    core: CoreBinding,
    topology: Topology,
    devices: Sequence[str],
    by_node: Sequence[WorkerBinding] | None,
    notes: list[str],
) -> list[WorkerBinding]:
    """Take the named processors; a device that is not named leaves its worker to --bind_numa, or unbound."""
    node_of = {cpu.number: cpu.node for cpu in topology.cpus}
    rests = by_node or [WorkerBinding((), (), "not bound")] * len(devices)
    bound, left_out = [], []
    for local_rank, (device, rest) in enumerate(zip(devices, rests, strict=True)):
        cpus = core.devices.get(int(device)) if device.isdigit() else None
        if cpus:
            nodes = {node_of[cpu] for cpu in cpus} & set(topology.memory_nodes)
            memory = tuple(sorted(nodes)) if by_node and len(topology.nodes()) > 1 else ()
            bound.append(WorkerBinding(cpus, memory, f"named by --bind_core for device {device}"))
            continue
        left_out += [f"{device} (local rank {local_rank})"] if cpus is None else []
        how = "is not named" if cpus is None else "has an empty list"
        bound.append(replace(rest, reason=f"{rest.reason}: device {device} {how}"))
    if left_out:
        what = "bound to a NUMA node only" if by_node else "not bound"
        notes.append(f"--bind_core names no CPUs for device {', '.join(left_out)}: {what}")
    return bound


THREADS_VARIABLE = "OMP_NUM_THREADS"
SELF_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With one of these OpenMP binds the thread that loads it: every worker forked afterwards would sit on its CPU."""
ROUNDING = 1e-9
"""Three thirds of a core are one, whatever floating point makes of them."""


def threads_per_worker(topology: Topology, workers: Sequence[WorkerBinding]) -> tuple[int, ...]:
    """Return the number of compute threads of each worker: its own physical cores, cores of several in parts, unbound
    workers' even share of all; at least one, and within an even share of the cgroup's quota.
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
