"""Rules R28 and R29: the counts of template 2, and what its parser asks for besides.

Source: HCCL's parser of tables without a version. R29 is a convention; HCCL does not read the names of device ports.
"""

from __future__ import annotations

from collections.abc import Iterator

from ranktable.codec.schema import walk_objects
from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.rules.identity import check_counts, schema_of
from ranktable.rules.registry import TEMPLATE2, rule
from ranktable.survey import DeviceEntry, Entry, Survey, find_repeats
from ranktable.values import parse_number

_CLOUD, _LAB = "template2-cloud", "template2-lab"
_MAX_GROUP_NAME = 127
_MAX_CLOUD_DEVICE_ID = 7
_PER_SERVER = (1, 2, 4, 8, 16)


@rule("R28", "the counts and names of template 2 agree with what is listed", TEMPLATE2, severity="error or warning")
def check_template2(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """Groups, instances and devices are counted in the file; pods are named once; HCCL's further demands."""
    groups = [Entry(path, group) for path, group in walk_objects(survey.members, "", "group_list")]
    schema = schema_of(survey)
    yield from check_counts(survey, schema)
    for group in groups:
        yield from _check_group_name(group)
        yield from check_counts(group, schema.within("group_list"))
    if survey.dialect == _CLOUD:
        yield from _check_pods(groups)
        yield from _check_cloud_devices(survey)
    else:
        for group in groups:
            yield from _check_average(group, profile)
        yield from _check_board(survey, profile)
    if profile.is_ascend:
        yield from _check_addresses_present(survey, groups)


@rule("R29", "para_plane_nic_num is the number of names in para_plane_nic_name", frozenset({_LAB}), severity="warning")
def check_nic_count(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A convention of the hand-written tables: HCCL ignores both for ports of devices."""
    names, number = survey.members.get("para_plane_nic_name"), parse_number(survey.members.get("para_plane_nic_num"))
    if isinstance(names, list) and number is not None and number != len(names):
        message = f"para_plane_nic_name lists {len(names)} names"
        yield survey.complain("para_plane_nic_num", "R29", "warning", message, f'write "{len(names)}"')


def _check_group_name(group: Entry) -> Iterator[Problem]:
    name = group.text("group_name")
    if name is not None and len(name.encode("utf-8", "surrogatepass")) > _MAX_GROUP_NAME:
        message = f"the name is longer than {_MAX_GROUP_NAME} bytes"
        yield group.complain("group_name", "R28", "error", message, "shorten it")


def _check_pods(groups: list[Entry]) -> Iterator[Problem]:
    """A process finds its rank by the name of its pod, so the name stands once in the whole table."""
    pods = (Entry(*found) for group in groups for found in walk_objects(group.members, group.path, "instance_list"))
    same = "the same pod_name stands at {}"
    yield from find_repeats(pods, "pod_name", "R28", same, "give each pod its own name")


def _check_cloud_devices(survey: Survey) -> Iterator[Problem]:
    """The parser of this form knows boards of eight devices only."""
    for device in survey.devices:
        if device.device_id is not None and device.device_id > _MAX_CLOUD_DEVICE_ID:
            message = f"HCCL reads device numbers up to {_MAX_CLOUD_DEVICE_ID} in a table without a version"
            yield device.complain("device_id", "R28", "error", message, "write the table as version 1.0")


def _check_average(group: Entry, profile: Profile) -> Iterator[Problem]:
    """The 310P (300I Duo) is exempt."""
    num_devices, num_servers = (parse_number(group.members.get(key)) for key in ("device_num", "server_num"))
    if not num_devices or not num_servers or profile.chip == "300i-duo":
        return
    if num_devices % num_servers or num_devices // num_servers not in _PER_SERVER:
        message = f"{num_devices} devices on {num_servers} servers are not 1, 2, 4, 8 or 16 on each"
        yield group.complain("device_num", "R28", "error", message, "list as many devices on every server")


def _check_board(survey: Survey, profile: Profile) -> Iterator[Problem]:
    location = survey.text("para_plane_nic_location")
    if location is not None and location != "device" and profile.is_ascend:
        message = "HCCL reads tables only whose network ports belong to the devices"
        yield survey.complain("para_plane_nic_location", "R28", "error", message, 'write "device"')
    if survey.text("deploy_mode") not in (None, "lab"):
        message = "whatever stands here, HCCL takes a table that has the key for the lab form"
        yield survey.complain("deploy_mode", "R28", "warning", message, 'write "lab"')


def _check_addresses_present(survey: Survey, groups: list[Entry]) -> Iterator[Problem]:
    """The key must be there, and may be empty: in the lab form always, in the cloud form from two instances on."""
    for group in groups:
        instances = list(walk_objects(group.members, group.path, "instance_list"))
        if survey.dialect == _CLOUD and len(instances) < 2:
            continue
        for instance_path, instance in instances:
            for path, device in walk_objects(instance, instance_path, "devices"):
                if "device_ip" not in device:
                    message = "the key is missing; HCCL's parser wants it even where it is empty"
                    remedy = "write the address of the device's port (hccn_tool -i DEVICE_ID -ip -g)"
                    yield DeviceEntry(path, device).complain("device_ip", "R28", "error", message, remedy)
