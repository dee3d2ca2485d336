"""Ansible: an inventory in INI form, with a group of all hosts and one per super pod.

Source: the documentation of Ansible's inventories. The variables of a host say which ranks it has, so that a play
can start them; a colon would be taken for a port, so a host with an IPv6 address is given a name.
"""

from __future__ import annotations

import re

from ranktable.errors import BuildError
from ranktable.export.exporter import Exporter
from ranktable.export.nodes import Job, Node

_NOT_IN_GROUPS = re.compile(r"[^A-Za-z0-9_]")


def _write_inventory(job: Job) -> dict[str, str]:
    lines = ["[workers]", *(_host_line(node) for node in job.nodes)]
    for group, nodes in _super_pods(job).items():
        lines += ["", f"[{group}]", *(_alias(node) for node in nodes)]
    lines += ["", "[workers:vars]", f"master_addr={job.master}", f"master_port={job.master_port}"]
    lines += [f"world_size={job.world_size}", f"num_nodes={len(job.nodes)}"]
    return {"": "\n".join(lines) + "\n"}


def _host_line(node: Node) -> str:
    alias = _alias(node)
    address = node.host_ip if alias == node.name else node.name
    words = [alias, *([f"ansible_host={address}"] if address and address != alias else [])]
    words += [f"node_rank={node.node_rank}", f"num_devices={len(node.devices)}"]
    words += [f"ranks={_join(node.ranks)}", f"device_ids={_join(node.device_ids)}"]
    return " ".join(words)


def _alias(node: Node) -> str:
    return f"node{node.node_rank}" if ":" in node.name else node.name


def _super_pods(job: Job) -> dict[str, list[Node]]:
    pods: dict[str, list[Node]] = {}
    for node in job.nodes:
        if node.super_pod_id is not None:
            pods.setdefault(node.super_pod_id, []).append(node)
    groups = {f"super_pod_{_NOT_IN_GROUPS.sub('_', pod_id)}": nodes for pod_id, nodes in pods.items()}
    if len(groups) < len(pods):
        message = "two super pod ids become one group name, which has letters, digits and underscores only"
        raise BuildError(message, "give the super pods other ids")
    return groups


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


INVENTORY = Exporter(
    "an Ansible inventory",
    _write_inventory,
    frozenset({"device_id", "host_ip", "super_pod_list"}),
    keeps_ranks=True,
)
