"""Rules P4 and P7: the clusters of a table that spans several.

Source: the rank table pages of the MindSpore documentation (clusters of servers) and the global tables of Volcano
(clusters of super pods). Neither says what its reader does with a table that breaks P4, so it is this project's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.rules.addresses import parse_address
from ranktable.rules.registry import rule
from ranktable.survey import Entry, Survey, find_repeats


@rule(
    "P4",
    "cluster_list has unique clusters that cover every server or super pod once, and no others",
    frozenset({"volcano-global", "cross-cluster"}),
    is_whole=True,
)
def check_clusters(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Clusters that name servers must cover all servers, clusters that name super pods all super pods."""
    same, remedy = "the same cluster_id stands at {}", "give each cluster its own id"
    yield from find_repeats(survey.clusters, "cluster_id", "P4", same, remedy)
    servers = [entry for cluster in survey.clusters for entry in cluster.servers]
    pods = [entry for cluster in survey.clusters for entry in cluster.super_pods]
    yield from _check_members(servers, survey.servers, "server_id", "server_list")
    yield from _check_members(pods, survey.super_pods, "super_pod_id", "super_pod_list")


def _check_members(members: list[Entry], listed: Collection[Entry], key: str, where: str) -> Iterator[Problem]:
    known, named = {entry.text(key) for entry in listed}, {entry.text(key) for entry in members}
    for entry in members:
        if entry.text(key) is not None and entry.text(key) not in known:
            remedy = f"write the id as it stands in {where}"
            yield entry.complain(key, "P4", "error", f"the id is not in {where}", remedy)
    inside = (entry for entry in members if entry.text(key) in known)
    yield from find_repeats(inside, key, "P4", "it stands at {} already", "list it once")
    for entry in listed if members else ():
        if entry.text(key) is not None and entry.text(key) not in named:
            message = f"the {key.removesuffix('_id').replace('_', ' ')} is in no cluster of cluster_list"
            yield entry.complain(key, "P4", "error", message, "list it in its cluster")


@rule(
    "P7",
    "over clusters every server has a server_ip, and every device a dpu_ip and a numa_id",
    frozenset({"cross-cluster"}),
    severity="warning",
)
def check_cluster_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """MindSpore's documentation lists them for each server and device of such a table."""
    for server in survey.servers:
        yield from _check_addresses(server, "server_ip", "the host's address in the network of the clusters")
        for device in server.devices:
            yield from _check_addresses(device, "dpu_ip", "the address of the DPU that serves the device")
            if not device.has("numa_id"):
                remedy = "write the number of the device's NUMA node"
                yield device.complain("numa_id", "P7", "warning", "the key is missing in a table with clusters", remedy)


def _check_addresses(entry: Entry, key: str, what: str) -> Iterator[Problem]:
    text = entry.text(key)
    if not entry.has(key):
        yield entry.complain(key, "P7", "warning", "the key is missing in a table with clusters", f"write {what}")
    elif text is None or parse_address(text) is None:
        yield entry.complain(key, "P7", "warning", "the value is not an IPv4 or IPv6 address", f"write {what}")
