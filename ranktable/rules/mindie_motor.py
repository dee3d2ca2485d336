"""Rules P20 to P24: what MindIE-Motor demands of the global table of an inference service.

Source: MindIE-Motor's loader of that table: addresses of hosts and pods, 1 to 128 devices on a server, at most 96
servers in a group, a group 0 with at most two coordinators and one group of instances at least, known hardware.
"""

from __future__ import annotations

from collections.abc import Iterator

from ranktable.problem import Problem, join_key, show_value
from ranktable.profile import Profile
from ranktable.rules.addresses import parse_address
from ranktable.rules.registry import rule
from ranktable.survey import ServerEntry, Survey, find_repeats

_DIALECTS = frozenset({"mindie-global"})
_READER = ("mindie-motor",)
_COORDINATORS = "0"
_CONTROL_GROUPS = (_COORDINATORS, "1")
_MAX_DEVICES = 128
_MAX_SERVERS = 96
_MAX_COORDINATORS = 2
_HARDWARE = ("800I A2(32G)", "800I A2(64G)", "800I-A2-32G", "800I-A2-64G")


@rule("P20", "server_id and server_ip are addresses, and server_ip is unique in its group", _DIALECTS, readers=_READER)
def check_server_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """server_id is the address of the host, server_ip that of the pod; instances are told apart by the latter."""
    for server in survey.servers:
        for key in ("server_id", "server_ip"):
            yield from _check_address(server, key)
    same = "the same server_ip stands at {}"
    yield from find_repeats(survey.servers, "server_ip", "P20", same, "write the address of each pod")


def _check_address(server: ServerEntry, key: str) -> Iterator[Problem]:
    text = server.text(key)
    if text is None:
        return
    address = parse_address(text)
    if address is None or address.is_unspecified or address.is_multicast:
        remedy = f"write the address of the {'host' if key == 'server_id' else 'pod'}"
        yield server.complain(key, "P20", "error", "the value is not the address of a host or a pod", remedy)


@rule("P21", "a server of an instance has 1 to 128 devices", _DIALECTS, readers=_READER)
def check_device_counts(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A server without devices is found by R5; coordinators and controllers have none."""
    for server in survey.servers:
        if len(server.devices) > _MAX_DEVICES:
            message = f"the server has {len(server.devices)} devices, at most {_MAX_DEVICES} are read"
            yield Problem(join_key(server.path, "device"), "P21", "error", message, "check that the server is not two")


@rule("P22", "a group has at most 96 servers", _DIALECTS, readers=_READER)
def check_group_sizes(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Larger groups are refused as a whole."""
    if len(survey.servers) > _MAX_SERVERS:
        message = f"the group has {len(survey.servers)} servers, at most {_MAX_SERVERS} are read"
        yield Problem(join_key(survey.path, "server_list"), "P22", "error", message, "divide the group")


@rule("P23", "group 0 has at most two coordinators, and there are instances", _DIALECTS, readers=_READER, is_whole=True)
def check_roles(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The groups are known by their ids: 0 coordinators, 1 controllers, all others instances."""
    groups = {group.text("group_id"): group for group in survey.groups}
    coordinators = groups.get(_COORDINATORS)
    path = "server_group_list"
    if coordinators is None:
        message = "there is no group 0, which holds the coordinator"
        yield Problem(path, "P23", "error", message, 'add a group with "group_id": "0"')
    elif len(coordinators.servers) > _MAX_COORDINATORS:
        message = f"group 0 has {len(coordinators.servers)} servers, at most {_MAX_COORDINATORS} coordinators are read"
        remedy = "keep a coordinator and its backup"
        yield Problem(join_key(coordinators.path, "server_list"), "P23", "error", message, remedy)
    if not any(group_id not in _CONTROL_GROUPS for group_id in groups):
        message = "there is no group of instances: only those of coordinators and controllers"
        yield Problem(path, "P23", "error", message, 'add a group with "group_id": "2"')


@rule("P24", "hardware_type is one that MindIE-Motor knows", _DIALECTS, severity="warning", readers=_READER)
def check_hardware(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """It is read for services of mixed hardware, so an unknown name is a warning."""
    for server in survey.servers:
        name = server.text("hardware_type")
        if name is not None and name not in _HARDWARE:
            remedy = f"write one of {', '.join(show_value(known) for known in _HARDWARE)}"
            message = "the name is not known; a service of mixed hardware is refused"
            yield server.complain("hardware_type", "P24", "warning", message, remedy)
