"""The hosts of a Slurm job out of its environment.

Node lists are folded (`node[01-16,20]`), tasks per node are counts with repeats (`8(x2),4`). Source: the environment
variables of Slurm's sbatch and srun pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ranktable.errors import HostListError
from ranktable.hosts.brackets import MAX_HOSTS, quote
from ranktable.hosts.host_list import ListedHost, parse_names

_NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASK_COUNTS = ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_COUNT = re.compile(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?")


def read_slurm_hosts(environment: Mapping[str, str]) -> tuple[ListedHost, ...]:
    """Return the hosts of the job in Slurm's order with their tasks as slots (0 where Slurm does not tell).

    Raises HostListError that names the variable.
    """
    listed = next((name for name in _NODE_LISTS if environment.get(name)), None)
    if listed is None:
        remedy = "run it inside sbatch or salloc, or give --hosts"
        raise HostListError("the variable is not set, so this is no job of Slurm", remedy, _NODE_LISTS[0])
    hosts = parse_names(environment[listed], listed)
    counted = next((name for name in _TASK_COUNTS if environment.get(name)), None)
    counts = [0] * len(hosts)
    if counted is not None:
        counts = parse_task_counts(environment[counted], counted)
        if counted == "SLURM_NTASKS_PER_NODE" and len(counts) == 1:
            counts *= len(hosts)
        if len(counts) != len(hosts):
            fault = f"{quote(environment[counted])} counts {len(counts)} hosts, {listed} names {len(hosts)}"
            raise HostListError(fault, "take both from the same job", counted)
    return tuple(
        ListedHost(name, count, tuple(range(count)), source=listed) for name, count in zip(hosts, counts, strict=True)
    )


def parse_task_counts(text: str, source: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Return the count of each host: `8(x2),4` is 8, 8, 4. Raises HostListError.

    >>> parse_task_counts("8(x2),4")
    [8, 8, 4]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise HostListError(f"{quote(part)} is no count of tasks", "it is to look like 8(x2),4", source)
        repeats = int(match.group(2) or 1)
        if len(counts) + repeats > MAX_HOSTS:
            raise HostListError(f"it counts more than {MAX_HOSTS} hosts", "check the repeats", source)
        counts += [int(match.group(1))] * repeats
    return counts
