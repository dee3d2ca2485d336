"""The hosts of a Slurm job out of its environment: SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE.

Source: the environment variables of Slurm's sbatch and srun pages: node lists are folded (`node[01-16,20]`), tasks
per node are counts with repeats (`8(x2),4`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ranktable.errors import HostListError, SourceError
from ranktable.hostlist.brackets import MAX_HOSTS
from ranktable.hostlist.host_list import HostList
from ranktable.sources.hostfile import ListedHost

_NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASK_COUNTS = ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_COUNT = re.compile(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?")


def read_slurm_hosts(environment: Mapping[str, str]) -> tuple[ListedHost, ...]:
    """Return the hosts of the job in Slurm's order with their tasks as slots (None where Slurm does not tell).

    Raises SourceError that names the variable.
    """
    list_name = next((name for name in _NODE_LISTS if environment.get(name)), None)
    if list_name is None:
        message = "the variable is not set, so this is no job of Slurm"
        raise SourceError(_NODE_LISTS[0], None, message, "run it inside sbatch or salloc, or give --hosts")
    hosts = _parse_nodes(environment[list_name], list_name)
    count_name = next((name for name in _TASK_COUNTS if environment.get(name)), None)
    if count_name is None:
        return tuple(ListedHost(name, None, list_name) for name in hosts)
    counts = parse_task_counts(environment[count_name], count_name)
    if count_name == "SLURM_NTASKS_PER_NODE" and len(counts) == 1:
        counts *= len(hosts)
    if len(counts) != len(hosts):
        message = f"{environment[count_name]!r} counts {len(counts)} hosts, {list_name} names {len(hosts)}"
        raise SourceError(count_name, None, message, "take both from the same job")
    return tuple(ListedHost(name, count, list_name) for name, count in zip(hosts, counts, strict=True))


def parse_task_counts(text: str, source: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Return the count of each host: `8(x2),4` is 8, 8, 4. Raises SourceError.

    >>> parse_task_counts("8(x2),4")
    [8, 8, 4]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise SourceError(source, None, f"{part!r} is no count of tasks", "it is to look like 8(x2),4")
        repeats = int(match.group(2) or 1)
        if len(counts) + repeats > MAX_HOSTS:
            raise SourceError(source, None, f"it counts more than {MAX_HOSTS} hosts", "check the repeats")
        counts += [int(match.group(1))] * repeats
    return counts


def _parse_nodes(text: str, source: str) -> list[str]:
    try:
        hosts = HostList.parse(text)
    except HostListError as error:
        raise SourceError(source, None, error.fault, error.remedy) from error
    counted = next((host for host in hosts if host.num_devices is not None), None)
    if counted is not None:
        message = f"host {counted.name!r} has a count, which node lists of Slurm do not have"
        raise SourceError(source, None, message, "check the variable")
    return [host.name for host in hosts]
