"""Template 2: `group_list[].instance_list[].devices[]` without a version, every scalar a string.

As hccl-controller and ModelArts wrote it: an instance is a pod, and HCCL puts all pods with one server_id, of whatever
group, on one server. The ranks follow the string order of server_id, then device_id, over all groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ranktable import kinds
from ranktable.kinds import Dialect, find_repeats, has_any
from ranktable.model import Entry, RankTable
from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.rules import Rule, citations
from ranktable.rules.identity import check_counts
from ranktable.schema import Count, Field, Members, Schema, check_limits, list_objects, walk_objects

_NAME = "template2-cloud"


def _count(name: str, *steps: str, noun: str) -> Field:
    """Return the key of a count, which rule R28 compares with what is listed."""
    return Field(name, "number", missing="error", rule="R28", count=Count(steps, noun))


_DEVICE = Schema(
    Field("device_id", "number", missing="error", rule="R8", role="device_id", limits=(0, 7)),
    Field("device_ip", role="device_ip"),
)
_INSTANCE = Schema(
    Field("pod_name", missing="error", role="pod_name"),
    Field("server_id", missing="error", role="server_id"),
    Field("devices", "list", missing="error", of=_DEVICE),
)
_GROUP = Schema(
    Field("group_name", missing="error", role="group", limits=(0, 127)),
    _count("instance_count", "instance_list", noun="instance"),
    _count("device_count", "instance_list", "devices", noun="device"),
    Field("instance_list", "list", missing="error", of=_INSTANCE),
)
_SCHEMA = Schema(
    Field("status", missing="error"),
    _count("group_count", "group_list", noun="group"),
    Field("group_list", "list", missing="error", role="groups", of=_GROUP),
    extras=frozenset({"version"}),
)


def _read(top: Entry, kind: Dialect) -> RankTable:
    found = []
    for pod in [pod for group in top.entries("group_list") for pod in group.entries("instance_list")]:
        devices = [
            kinds.read_device(path, {key: it for key, it in members.items() if (key, it) != ("device_ip", "")}, kind)
            for path, members in walk_objects(pod.members, pod.path, "devices")
        ]
        found.append(kinds.read_server(replace(pod, members=kinds.without(pod.members, {"devices"})), devices))
    return kinds.make_table(top, kinds.join_servers(found), kind)


@Rule("R28", "the counts and names of template 2 agree with what is listed", sources=(citations.STANDARD,))
def check_template2(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """Groups, instances and devices are counted in the file; pods are named once; HCCL's further demands."""
    groups = table.entries("group_list")
    yield from check_limits(table.members, _SCHEMA, "R28")
    yield from check_counts(table, _SCHEMA)
    for group in groups:
        yield from check_counts(group, _GROUP)
        yield from _check_addresses_present(group) if profile.is_ascend else ()
    same, remedy = "the same group_name stands at {}", "give each group its own name"
    yield from find_repeats(groups, "group_name", "R28", same, remedy)
    instances = [entry for group in groups for entry in group.entries("instance_list")]
    # A process finds its rank by the name of its pod, so the name stands once in the whole table.
    same, remedy = "the same pod_name stands at {}", "give each pod its own name"
    yield from find_repeats(instances, "pod_name", "R28", same, remedy)


def _check_addresses_present(group: Entry) -> Iterator[Problem]:
    """From two instances on the key must be there, and may be empty."""
    instances = group.entries("instance_list")
    for device in [entry for one in instances for entry in one.entries("devices")] if len(instances) > 1 else ():
        if not device.has("device_ip"):
            message = "the key is missing; HCCL's parser wants it even where it is empty"
            remedy = "write the address of the device's port (hccn_tool -i DEVICE_ID -ip -g)"
            yield device.complain("device_ip", "R28", message, remedy)


def _is_lab(value: Members) -> str:
    """By hand for the boards of 2019 to 2021: one instance per rank and device, with rank_id, and deploy_mode."""
    if "group_list" in value and "deploy_mode" in value:
        return "group_list and deploy_mode"
    instances = [each for group in list_objects(value, "group_list") for each in list_objects(group, "instance_list")]
    has_ranks = any("rank_id" in each for each in instances) and not any("pod_name" in each for each in instances)
    return "group_list with rank_id in its instances" if has_ranks else ""


DIALECTS = (
    Dialect(
        name="template2-lab",
        title="a template 2 lab rank table (deploy_mode, group_list)",
        consumer="HCCL of 2019 to 2021",
        recognise=_is_lab,
        sources=(citations.STANDARD,),
        instead="its boards are those of 2019 to 2021: write the job as version 1.0 with ranktable generate",
    ),
    Dialect(
        name=_NAME,
        title="a template 2 cloud rank table (group_list, no version)",
        recognise=has_any("group_list", "group_count"),
        keys=("group_list", "group_count"),
        sources=(citations.STANDARD,),
        schema=_SCHEMA,
        read=_read,
        rules=frozenset(("R7", "R8", "R13", "R14", "R15", "R16", "R28", "P1")),
        readers=frozenset({"hccl", "mindspore"}),
        writes_empty_addresses=True,
        ranks_by_position=True,
    ),
)
