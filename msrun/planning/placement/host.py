"""What the planner must know of a host, gathered by `msrun.agent.host`, and its devices, processors and memory for each
worker."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from msrun.errors import UsageError
from msrun.planning.hosts import count_workers
from msrun.planning.program import DeviceTarget, StartMethod
from msrun.planning.record import Record
from msrun.planning.spec import SCHEDULER_KEY, CoreBinding, parse_cpu_range
from ranktable.hosts.ranges import fold_numbers


class Cpu(Record):
    """One processor as the kernel numbers them: a hardware thread."""

    number: int
    node: int  # NUMA node
    package: int
    core: int  # lowest processor number of its physical core: equal for hyper-threads of one core, unique on the host


class Topology(Record):
    """The processors of a host and what this process may use of them."""

    cpus: tuple[Cpu, ...]  # every processor that is online
    allowed: tuple[int, ...]  # processors that this process may use: its affinity within the cgroup's cpuset
    quota_cores: float | None = None  # the cgroup's limit of processor time, in processors; None = no limit
    memory_nodes: tuple[int, ...] = (0,)  # NUMA nodes with memory that this process may use
    device_nodes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """Per device target: every accelerator of the host by its number, and its NUMA node, None when not known."""

    def cores(self) -> list[tuple[Cpu, ...]]:
        """Return the allowed processors by physical core, neighbours next to each other."""
        allowed = set(self.allowed)
        groups: dict[int, list[Cpu]] = {}
        for cpu in sorted(self.cpus, key=lambda cpu: (cpu.node, cpu.package, cpu.core, cpu.number)):
            if cpu.number in allowed:
                groups.setdefault(cpu.core, []).append(cpu)
        return [tuple(group) for group in groups.values()]

    def nodes(self) -> tuple[int, ...]:
        allowed = set(self.allowed)
        return tuple(sorted({cpu.node for cpu in self.cpus if cpu.number in allowed}))


def flat_topology(cpus: Iterable[int]) -> Topology:
    numbers = tuple(sorted(cpus))
    return Topology(tuple(Cpu(number, 0, 0, number) for number in numbers), numbers)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Turn the kernel's `0-3,8` into numbers, ascending; blank text is the empty set (ValueError: not such a list)."""
    pieces = [piece for piece in text.strip().split(",") if piece.strip()]
    return tuple(sorted({number for piece in pieces for number in parse_cpu_range(piece)}))


CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
ASCEND_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"

_LEADING_NUMBER = r"\s*[+]?(\d+)"


class Device(Record):
    """One accelerator of the host."""

    number: str  # physical number, as nvidia-smi or npu-smi shows it
    uuid: str = ""
    """"GPU-..." when known."""
    node: int | None = None  # NUMA node; None when not known


class VisibleDevices(Record):
    """What a process sees of the host's accelerators."""

    names: tuple[str, ...]  # physical numbers as the process counts them; a name where none is known
    reason: str = ""  # why fewer are visible than the variable names or the host has, in words


def visible_cuda(preset: str | None, present: Sequence[Device]) -> VisibleDevices:
    """Apply CUDA_VISIBLE_DEVICES: indexes or UUIDs, abbreviated while unique; the first invalid entry hides itself and
    all after it; one twice hides everything; a process sees one MIG device. Sources: CUDA C++ Programming Guide; MIG
    User Guide; `torch.cuda` for repeats and mixed forms."""
    shown, names = f"{CUDA_VARIABLE}={preset}", list[str]()
    if preset is None or not present:
        return VisibleDevices(tuple(device.number for device in present))
    for entry in preset.split(","):
        name = _resolve_cuda(entry, preset, present)
        if name is None:
            return _ended(shown, entry, names, len(present))
        if name in names:
            return VisibleDevices((), f"{shown}: {entry.strip()} is named twice, and CUDA then shows no device")
        names.append(name)
    if len(names) > 1 and names[0].startswith("MIG-"):
        return VisibleDevices(tuple(names[:1]), f"{shown}: CUDA shows a process one MIG device only")
    return VisibleDevices(tuple(names))


def _resolve_cuda(entry: str, preset: str, present: Sequence[Device]) -> str | None:
    """Return the physical number (or the name, when there is no telling) of an entry; None = invalid."""
    if preset.startswith("MIG-"):
        return entry if entry.startswith("MIG-") else None
    if not preset.startswith("GPU-"):
        match = re.match(_LEADING_NUMBER, entry)  # the driver reads numbers as strtoul does
        index = int(match[1]) if match else len(present)
        return present[index].number if index < len(present) else None
    if not entry.startswith("GPU-") or not all(device.uuid for device in present):
        return entry if entry.startswith("GPU-") else None
    found = [device.number for device in present if device.uuid.lower().startswith(entry.strip().lower())]
    return found[0] if len(found) == 1 else None


def visible_ascend(preset: str | None, present: Sequence[Device]) -> VisibleDevices:
    """Apply ASCEND_RT_VISIBLE_DEVICES: device numbers between commas and nothing else; what is invalid, a blank
    included, hides itself and all after it. Source: CANN environment variable reference."""
    names: list[str] = []
    if preset is None or not present:
        return VisibleDevices(tuple(device.number for device in present))
    for entry in preset.split(","):
        index = int(entry) if re.fullmatch(r"[0-9]+", entry) else len(present)
        if index >= len(present) or present[index].number in names:
            return _ended(f"{ASCEND_VARIABLE}={preset}", entry, names, len(present))
        names.append(present[index].number)
    return VisibleDevices(tuple(names))


def _ended(shown: str, entry: str, names: Sequence[str], count: int) -> VisibleDevices:
    why = f"{shown}: {entry!r} is none of the host's {count} devices or not allowed there, and hides all from it on"
    return VisibleDevices(tuple(names), f"{shown[:-1]} is empty" if not shown.partition("=")[2] else why)


class HostFacts(Record):
    """One host as the planner sees it."""

    name: str
    address: str  # address towards the master; 127.0.0.1 for a one-host job
    cpus: tuple[int, ...]  # processors that this process may use
    gpus: tuple[str, ...] = ()  # CUDA devices in visible order, by number or by their given name
    npus: tuple[str, ...] = ()  # Ascend devices in visible order by physical number
    gpus_reason: str = ""  # why fewer GPUs are visible than CUDA_VISIBLE_DEVICES names, in words
    npus_reason: str = ""  # the same for ASCEND_RT_VISIBLE_DEVICES
    topology: Topology | None = None  # cores and NUMA nodes; None when only `cpus` is known
    has_torch: bool = True  # whether msrun's own Python has torch: without it the scheduler cannot serve torch's store

    mindspore_version: str = ""  # of MindSpore in msrun's own Python; empty = it has none

    def known_topology(self) -> Topology:
        return self.topology or flat_topology(self.cpus)


class DevicePlacement(Record):
    """Which kind of device the workers use and which one each gets."""

    target: DeviceTarget  # cpu, gpu or ascend; never auto
    device_ids: tuple[int, ...]  # device index per local worker, as the worker sees it
    physical: tuple[str, ...]  # the same devices by physical number; what the worker sees as 0 may be the host's 3
    reason: str  # why this target: for the plan
    notes: tuple[str, ...] = ()  # what the user should know of it, one line each


def place_devices(
    target: DeviceTarget, local_worker_num: int, host: HostFacts, wanted: tuple[int, ...] = ()
) -> DevicePlacement:
    """Give every local worker a device, on a CPU host a number; `wanted`: of a table (UsageError: there is none)."""
    ids, reason = wanted or tuple(range(local_worker_num)), "--device_target"
    hidden = tuple(filter(None, (host.gpus_reason, host.npus_reason)))
    if target == "auto":
        target, reason = "cpu", f"no accelerator {'visible ' if hidden else ''}on {host.name}"
        if host.npus:
            target, reason = "ascend", f"{len(host.npus)} Ascend devices on {host.name}"
        elif host.gpus:
            target, reason = "gpu", f"{len(host.gpus)} CUDA devices on {host.name}"
    if target == "cpu":  # why accelerators that are there are not used, unless the user asked for CPU
        notes = () if reason == "--device_target" else hidden
        return DevicePlacement(target, ids, tuple(map(str, ids)), reason, notes)
    devices, why = (host.gpus, host.gpus_reason) if target == "gpu" else (host.npus, host.npus_reason)
    because = f" ({why})" if why else ""
    if wanted and max(wanted) >= len(devices):
        raise UsageError(
            f"the rank table or the host list gives {host.name} the device {max(wanted)}, but {len(devices)} {target} "
            f"devices are visible there{because}: correct it or give --device_target cpu"
        )
    if len(devices) < local_worker_num:
        raise UsageError(
            f"{count_workers(local_worker_num)} but {len(devices)} {target} devices visible on {host.name}{because}: "
            "start fewer workers or give --device_target cpu"
        )
    return DevicePlacement(target, ids, tuple(devices[index] for index in ids), reason, (why,) if why else ())


IN_TURN = "one core in turn"  # how the reason begins where cores are fewer than workers

Core = tuple[Cpu, ...]


class WorkerBinding(Record):
    """Where one worker runs."""

    cpus: tuple[int, ...]  # processors; empty = not bound
    memory_nodes: tuple[int, ...]  # NUMA nodes of its memory; empty = not bound
    reason: str  # why these, in words


class HostBinding(Record):
    """Where all processes of a host run."""

    workers: tuple[WorkerBinding, ...]  # by local rank
    scheduler_cpus: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # what the user should know of it, one line each


def bind_workers(
    topology: Topology, devices: Sequence[str], *, target: str, core: CoreBinding | None, numa: bool
) -> HostBinding:
    """Give every local worker, with these physical devices of a target, processors and memory (UsageError)."""
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
ROUNDING = 1e-9  # three thirds of a core are one, whatever floating point makes of them


def threads_per_worker(topology: Topology, workers: Sequence[WorkerBinding]) -> tuple[int, ...]:
    """Return the number of compute threads of each worker: its own physical cores, cores of several in parts, unbound
    workers' even share of all; at least one, and within an even share of the cgroup's quota."""
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
