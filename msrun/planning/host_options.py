"""From what the environment tells, and what the user gave, to the options that put this host into its job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from msrun.errors import UsageError
from msrun.planning.hosts import count_workers
from msrun.planning.record import Record
from msrun.planning.schedulers import OFF, Surroundings, Told
from msrun.planning.settings import FoundSetting
from msrun.planning.spec import MEETING_PORT

PLACE_OPTIONS = frozenset({"worker_num", "local_worker_num", "node_rank", "master_addr"})
"""Options that together leave nothing to be found."""


class HostOptions(Record):
    """What was found."""

    options: Mapping[str, Any]  # values of options that were not given
    settings: tuple[FoundSetting, ...] = ()
    lines: tuple[str, ...] = ()


def is_place_open(options: Mapping[str, Any], given: Collection[str]) -> bool:
    """Return whether something is left to be found: not when all is given, or when all workers are to run here."""
    if set(given) >= PLACE_OPTIONS:
        return False
    is_here = {"worker_num", "local_worker_num"} <= set(given)
    return not is_here or options["worker_num"] != options["local_worker_num"]


def find_host_options(
    job: Surroundings, options: Mapping[str, Any], given: Collection[str], count_devices: Callable[[], int]
) -> HostOptions:
    """Return the options of the command that are not `given`, as far as the surroundings tell them (UsageError:
    something needed is missing, or a contradiction). Workers of this host: --local_worker_num, an even share of
    --worker_num, what a variable says, one for each device, else one."""
    asked = {name: Told(options[name], f"--{name}") for name in ("worker_num", "local_worker_num") if name in given}
    if job.node_num is not None and job.node_num.value == 1:
        return _alone(job, asked, count_devices)
    local = asked.get("local_worker_num") or _local_worker_num(job, asked.get("worker_num"), count_devices)
    if job.node_num is None and not _is_of_several(job, asked, local):
        return _alone(job, asked, count_devices)
    assert local is not None
    return _among_others(job, options, given, local)


def _alone(job: Surroundings, asked: Mapping[str, Told[int]], count_devices: Callable[[], int]) -> HostOptions:
    hint = [job.hint] if job.hint and len(asked) < 2 else []
    here = asked.get("local_worker_num") or job.local_worker_num or job.worker_num
    if here is None and job.without_devices and not count_devices():
        here = job.without_devices
    if "worker_num" in asked or here is None:
        return HostOptions({}, lines=tuple(hint))
    said = [] if asked else [f"{job.name}: {count_workers(here.value)} on this host ({here.source})"]
    return _found({"worker_num": here}, [*said, *hint])


def _local_worker_num(job: Surroundings, total: Told[int] | None, count_devices: Callable[[], int]) -> Told[int] | None:
    if total is not None and job.node_num is not None:
        if total.value < 1 or total.value % job.node_num.value:
            raise UsageError(
                f"--worker_num {total.value}: cannot be shared evenly by {job.node_num.value} hosts "
                f"({job.node_num.source}); give a multiple of {job.node_num.value}, or --local_worker_num on each host"
            )
        return Told(total.value // job.node_num.value, f"--worker_num / {job.node_num.source}")
    if job.local_worker_num is not None:
        return job.local_worker_num
    if (devices := count_devices()) > 0:
        return Told(devices, "devices of this host")
    return job.without_devices or (Told(1, "default of one per host") if job.node_num is not None else None)


def _is_of_several(job: Surroundings, asked: Mapping[str, Told[int]], local: Told[int] | None) -> bool:
    """Return whether a job whose number of hosts nobody says has other hosts than this one."""
    total = asked.get("worker_num") or job.worker_num
    if total is not None and local is not None:
        return local.value < total.value
    if not job.are_peers_near and (job.worker_num is None or (total is not None and total.value == 1)):
        return False
    missing = [f"--{name}" for name, one in (("worker_num", total), ("local_worker_num", local)) if one is None]
    raise UsageError(
        f"{job.name}: is one of a job's, but no variable says how many those are; give {' and '.join(missing)}, or "
        f"{OFF} for a job of this host alone"
    )


def _among_others(
    job: Surroundings, options: Mapping[str, Any], given: Collection[str], local: Told[int]
) -> HostOptions:
    total = job.worker_num
    if job.node_num is not None:
        total = Told(job.node_num.value * local.value, f"{job.node_num.source} x {local.source}")
    told = {
        "node_rank": job.node_rank,
        "worker_num": total,
        "local_worker_num": local,
        "min_hosts": job.min_hosts,
        "master_addr": job.master_addr,
        "master_port": job.master_port,
    }
    found = {name: one for name, one in told.items() if one is not None and name not in given}
    if "master_addr" not in {*found, *given}:
        remedy = job.remedy or "give --master_addr ADDRESS on every host"
        raise UsageError(f"{job.name}: no variable says the address of node 0; {remedy}")
    value = {**options, **{name: one.value for name, one in found.items()}}
    here, node_rank = count_workers(local.value), value["node_rank"]
    node_num = job.node_num.value if job.node_num else -(-value["worker_num"] // local.value)
    if job.node_num is None and node_rank >= node_num:
        raise UsageError(
            f"{job.name}: node {node_rank} with {here} per host is beyond --worker_num {value['worker_num']}, which is "
            f"for {node_num} hosts; make the numbers fit"
        )
    place = f"node {node_rank}" if node_rank >= 0 else "one"
    least = f", {value['min_hosts']} are enough" if value.get("min_hosts") else ""
    master = f"{value['master_addr']}:{value['master_port'] or MEETING_PORT}"
    known = [job.node_num, *(found.get(name) for name in ("node_rank", "local_worker_num", "master_addr"))]
    sources = dict.fromkeys(one.source for one in (*known, found.get("master_port")) if one is not None)
    shown = ", ".join(source for source in sources if not source.startswith("--"))
    lines = [f"{job.name}: {place} of {node_num}{least}, {here} here, master {master} ({shown})"]
    if 0 < job.cpu_count < local.value:
        lines.append(f"{job.name}: {here} share {job.cpu_count} CPU here; {job.cpu_remedy}")
    return _found(found, lines)


def _found(told: Mapping[str, Told[int] | Told[str]], lines: list[str]) -> HostOptions:
    settings = tuple(FoundSetting(name, one.value, one.source) for name, one in told.items())
    return HostOptions({name: one.value for name, one in told.items()}, settings, tuple(lines))
