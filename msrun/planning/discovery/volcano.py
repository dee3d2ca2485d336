"""Volcano jobs (batch.volcano.sh): a pod for each host, numbered within its task.

Source: Volcano's plugins `env` (VC_TASK_INDEX) and `svc` (VC_<TASK>_HOSTS, VC_<TASK>_NUM; host name and subdomain).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msrun.errors import UsageError
from msrun.planning.discovery.kubernetes_job import first_pod
from msrun.planning.discovery.surroundings import OFF, HostView, Surroundings, Told, read_number, read_place

INDEX = "VC_TASK_INDEX"
_HOSTS = re.compile(r"VC_(\w+)_HOSTS\Z")


def find_volcano(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the Volcano job that this pod is of; None elsewhere.

    Raises:
        UsageError: several tasks, whose pods have the same numbers, or variables that contradict each other.
    """
    if not environ.get(INDEX):
        return None
    name = f"Volcano pod {host.name}"
    tasks = {match[1]: environ[name] for name in sorted(environ) if (match := _HOSTS.match(name)) and environ[name]}
    if not tasks:
        return _without_hosts(environ, host, name)
    if len(tasks) > 1:
        raise UsageError(
            f"VC_<TASK>_HOSTS of {len(tasks)} tasks ({', '.join(tasks)}): {INDEX} starts at 0 in each, so the pods "
            "have no numbers of their own; put all pods into one task, use the plugin pytorch, or give --worker_num, "
            f"--local_worker_num, --node_rank and --master_addr, or {OFF}"
        )
    (task, hosts_text), *_ = tasks.items()
    hosts, variable = hosts_text.split(","), f"VC_{task}_HOSTS"
    count = f"VC_{task}_NUM"
    if environ.get(count) and read_number(environ, count) != len(hosts):
        raise UsageError(f"{count}={environ[count]}: but {variable} has {len(hosts)} hosts; give {OFF}")
    node_rank, node_num = read_place({**environ, variable: str(len(hosts))}, INDEX, variable)
    return Surroundings(name=name, node_num=node_num, node_rank=node_rank, master_addr=Told(hosts[0], variable))


def _without_hosts(environ: Mapping[str, str], host: HostView, name: str) -> Surroundings:
    index = read_number(environ, INDEX)
    master = first_pod(host, index)
    return Surroundings(
        name=name,
        node_rank=Told(index, INDEX),
        master_addr=master,
        are_peers_near=master is not None,
        remedy="add the plugin svc to the job, or give --master_addr ADDRESS",
    )
