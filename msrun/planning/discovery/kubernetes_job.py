"""Indexed Jobs of Kubernetes, also those that a JobSet makes: a pod for each host, numbered by its completion index.

Source: kubernetes.io, "Job with Pod-to-Pod Communication": the host name of a pod is <job>-<index>, and with a
`subdomain` that is the name of a headless Service its peers know it as <job>-<index>.<subdomain>. A JobSet names its
jobs <jobset>-<replicated job>-<number> and makes the Service. No variable holds the number of pods.
"""

from __future__ import annotations

from collections.abc import Mapping

from msrun.planning.discovery.surroundings import HostView, Surroundings, Told, read_number

INDEX = "JOB_COMPLETION_INDEX"
HOSTS_FILE = "/etc/hosts"


def find_kubernetes_job(environ: Mapping[str, str], host: HostView) -> Surroundings | None:
    """Return the Indexed Job that this pod is of; None elsewhere.

    Raises:
        UsageError: an index that is no number.
    """
    if not environ.get(INDEX):
        return None
    index = read_number(environ, INDEX)
    master = first_pod(host, index)
    return Surroundings(
        name=f"Kubernetes pod {host.name}",
        node_rank=Told(index, INDEX),
        master_addr=master,
        are_peers_near=master is not None,
        remedy="make a headless Service, name it as the pods' subdomain, or give --master_addr ADDRESS",
    )


def first_pod(host: HostView, index: int) -> Told[str] | None:
    """Return the name of pod 0 as its peers know it; None when pods of this job have no such names."""
    stem, dash, last = host.name.rpartition("-")
    if not host.domain or not dash or last != str(index):
        return None
    return Told(f"{stem}-0.{host.domain}", HOSTS_FILE)


def read_domain(hosts_file: str, host_name: str) -> str:
    """Return what follows a host's name in /etc/hosts, where the kubelet writes it for a pod with a subdomain.

    The line is "10.1.0.7 train-1.train.default.svc.cluster.local train-1"; without a subdomain "10.1.0.7 train-1".
    """
    for line in hosts_file.splitlines():
        names = line.partition("#")[0].split()[1:]
        if host_name in names:
            for name in names:
                if name.startswith(f"{host_name}."):
                    return name.removeprefix(f"{host_name}.")
    return ""
