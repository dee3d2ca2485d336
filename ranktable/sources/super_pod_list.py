"""Which hosts stand in which super pod, as the user writes it: `0=node[1-2]`, several times or with `;` between."""

from __future__ import annotations

from collections.abc import Iterable

from ranktable.errors import BuildError, HostListError
from ranktable.sources.hosts import HostList


def parse_super_pods(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the server ids of each super pod; raises BuildError.

    >>> parse_super_pods(["0=node[1-2];1=node3"])
    {'0': ('node1', 'node2'), '1': ('node3',)}
    """
    pods: dict[str, tuple[str, ...]] = {}
    for part in (part.strip() for text in texts for part in text.split(";")):
        pod_id, equals, hosts = part.partition("=")
        if not equals or not pod_id.strip():
            raise BuildError(f"--super_pods: {part!r} has no id before its hosts", "write --super_pods 0=node[1-2]")
        if pod_id.strip() in pods:
            raise BuildError(f"--super_pods: super pod {pod_id.strip()!r} is given twice", "name all its hosts at once")
        pods[pod_id.strip()] = _parse_hosts(hosts, part)
    return pods


def _parse_hosts(text: str, part: str) -> tuple[str, ...]:
    try:
        hosts = HostList.parse(text)
    except HostListError as error:
        raise BuildError(f"--super_pods: {part!r}: {error.message}", error.remedy) from error
    counted = next((host.name for host in hosts if host.num_devices is not None), None)
    if counted is not None:
        raise BuildError(f"--super_pods: {part!r} counts devices of {counted!r}", "write names only")
    return tuple(host.name for host in hosts)
