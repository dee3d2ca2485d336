"""From what the environment tells, and what the user gave, to the options that put this host into its job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from msrun.errors import UsageError
from msrun.planning.discovery.surroundings import OFF, Surroundings, Told
from msrun.planning.ranks import count_workers
from msrun.planning.settings import FoundSetting
from msrun.planning.spec import MEETING_PORT

PLACE_OPTIONS = frozenset({"worker_num", "local_worker_num", "node_rank", "master_addr"})
"""Options that together leave nothing to be found."""


@dataclass(frozen=True)
class HostOptions:
    """What was found."""

    options: Mapping[str, Any]
    """Values of options that were not given."""
    settings: tuple[FoundSetting, ...] = ()
    """The same with their sources."""
    lines: tuple[str, ...] = ()
    """What the user is told."""


def is_place_open(options: Mapping[str, Any], given: Collection[str]) -> bool:
    """Return whether something is left to be found: not when all is given, or when all workers are to run here."""
    if set(given) >= PLACE_OPTIONS:
        return False
    is_here = {"worker_num", "local_worker_num"} <= set(given)
    return not is_here or options["worker_num"] != options["local_worker_num"]


def find_host_options(
    job: Surroundings, options: Mapping[str, Any], given: Collection[str], count_devices: Callable[[], int]
) -> HostOptions:
    """Return the options that are not given, as far as the surroundings tell them; what is given wins.

    Workers of this host: --local_worker_num, an even share of --worker_num, what a variable says, one for each device
    of this host, and one when nothing says more.

    Args:
        options: of the command.
        given: names of those that were set.
        count_devices: how many accelerators are visible on this host.

    Raises:
        UsageError: what is needed is neither given nor told, or both contradict each other.
    """
    finder = _Finder(job, options, given)
    if job.node_num is not None and job.node_num.value == 1:
        return finder.alone(count_devices)
    local = finder.local_worker_num(count_devices)
    if job.node_num is None and not finder.is_of_several(local):
        return finder.alone(count_devices)
    return finder.among_others(local)


class _Finder:
    """Gathers the options of one host."""

    def __init__(self, job: Surroundings, options: Mapping[str, Any], given: Collection[str]) -> None:
        self._job = job
        self._options = options
        self._given = given
        self._told: dict[str, Told[int] | Told[str]] = {}

    def alone(self, count_devices: Callable[[], int]) -> HostOptions:
        """Return the options of the only host; its number of workers may be told."""
        job, lines = self._job, []
        if "worker_num" not in self._given:
            local, here = self._options["local_worker_num"], job.local_worker_num or job.worker_num
            if here is None and job.without_devices and not count_devices():
                here = job.without_devices
            if "local_worker_num" in self._given:
                self._tell("worker_num", Told(local, "--local_worker_num"))
            elif here is not None:
                self._tell("worker_num", here)
                lines.append(f"{job.name}: {count_workers(here.value)} on this host ({here.source})")
        is_by_hand = {"worker_num", "local_worker_num"} <= set(self._given)
        return self._found([*lines, *([job.hint] if job.hint and not is_by_hand else [])])

    def local_worker_num(self, count_devices: Callable[[], int]) -> Told[int] | None:
        """Return the workers of this host; None when they are not known and the number of hosts is not, either."""
        job = self._job
        if "local_worker_num" in self._given:
            return Told(self._options["local_worker_num"], "--local_worker_num")
        if "worker_num" in self._given and job.node_num is not None:
            worker_num, node_num = self._options["worker_num"], job.node_num
            if worker_num < 1 or worker_num % node_num.value:
                raise UsageError(
                    f"--worker_num {worker_num}: cannot be shared evenly by {node_num.value} hosts "
                    f"({node_num.source}); give a multiple of {node_num.value}, or --local_worker_num on each host"
                )
            return Told(worker_num // node_num.value, f"--worker_num / {node_num.source}")
        if job.local_worker_num is not None:
            return job.local_worker_num
        if (devices := count_devices()) > 0:
            return Told(devices, "devices of this host")
        return job.without_devices or (Told(1, "default of one per host") if job.node_num is not None else None)

    def is_of_several(self, local: Told[int] | None) -> bool:
        """Return whether a job whose number of hosts nobody says has other hosts than this one.

        Raises:
            UsageError: that cannot be known.
        """
        job = self._job
        total = job.worker_num.value if job.worker_num else None
        if "worker_num" in self._given:
            total = self._options["worker_num"]
        if total is not None and local is not None:
            return bool(local.value < total)
        if not job.are_peers_near and (job.worker_num is None or total == 1):
            return False
        missing = [name for name in ("worker_num", "local_worker_num") if name not in self._given]
        if job.worker_num is not None and "worker_num" in missing:
            missing.remove("worker_num")
        if local is not None:
            missing.remove("local_worker_num")
        raise UsageError(
            f"{job.name}: is one of a job's, but no variable says how many those are; give "
            f"{' and '.join(f'--{name}' for name in missing)}, or {OFF} for a job of this host alone"
        )

    def among_others(self, local: Told[int] | None) -> HostOptions:
        """Return the options of one of several hosts."""
        job = self._job
        assert local is not None
        self._tell("node_rank", job.node_rank)
        if job.node_num is not None:
            product = f"{job.node_num.source} x {local.source}"
            self._tell("worker_num", Told(job.node_num.value * local.value, product))
        else:
            self._tell("worker_num", job.worker_num)
        self._tell("local_worker_num", local)
        self._tell("min_hosts", job.min_hosts)
        self._tell("master_addr", job.master_addr)
        self._tell("master_port", job.master_port)
        value = {**self._options, **{name: told.value for name, told in self._told.items()}}
        if "master_addr" not in self._told and "master_addr" not in self._given:
            raise UsageError(
                f"{job.name}: no variable says the address of node 0; "
                f"{job.remedy or 'give --master_addr ADDRESS on every host'}"
            )
        node_num = job.node_num.value if job.node_num else -(-value["worker_num"] // local.value)
        node_rank = value["node_rank"]
        if job.node_num is None and node_rank >= node_num:
            raise UsageError(
                f"{job.name}: node {node_rank} with {count_workers(local.value)} per host is beyond --worker_num "
                f"{value['worker_num']}, which is for {node_num} hosts; make the numbers fit"
            )
        place = f"node {node_rank}" if node_rank >= 0 else "one"
        port = value["master_port"] or MEETING_PORT
        here = count_workers(local.value)
        least = f", {value['min_hosts']} are enough" if value.get("min_hosts") else ""
        line = f"{job.name}: {place} of {node_num}{least}, {here} here, master {value['master_addr']}:{port}"
        lines = [f"{line} ({', '.join(self._sources())})"]
        if 0 < job.cpu_count < local.value:
            lines.append(f"{job.name}: {count_workers(local.value)} share {job.cpu_count} CPU here; {job.cpu_remedy}")
        return self._found(lines)

    def _tell(self, name: str, told: Told[int] | Told[str] | None) -> None:
        if told is not None and name not in self._given:
            self._told[name] = told

    def _sources(self) -> list[str]:
        """Return where the line's values came from, but for what the user gave."""
        job, told = self._job, self._told
        known = [job.node_num, *(told.get(name) for name in ("node_rank", "local_worker_num", "master_addr"))]
        sources = (one.source for one in (*known, told.get("master_port")) if one is not None)
        return [source for source in dict.fromkeys(sources) if not source.startswith("--")]

    def _found(self, lines: list[str]) -> HostOptions:
        settings = tuple(FoundSetting(name, told.value, told.source) for name, told in self._told.items())
        return HostOptions({name: told.value for name, told in self._told.items()}, settings, tuple(lines))
