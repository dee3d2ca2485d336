"""Rules R3 and R6 to R9: status, counts, and the ids of servers, devices and ranks.

Source: what HCCL's rank table parser refuses (errors EI0014 and EI0017), and its documentation.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from ranktable.model import COMPLETED
from ranktable.placeholder import name_placeholder
from ranktable.problem import Problem, Severity
from ranktable.profile import Profile
from ranktable.rules.chips import chip_of
from ranktable.rules.registry import rule
from ranktable.survey import DeviceEntry, ServerEntry, Survey, find_repeats

MAX_SERVER_ID_LENGTH = 64
MAX_DEVICE_ID = {"910a": 7, "a2": 15, "a3": 15, "300i-duo": 31, "a5": 64}
"""Highest physical device id of each chip."""


@rule("R3", 'status is "completed"', is_whole=True)
def check_status(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """HCCL reads a file with another status again every second, for half an hour, and then gives up."""
    status = survey.text("status")
    if status is not None and status != COMPLETED:
        message = 'the table is not ready: a reader waits until the status is "completed"'
        yield survey.complain(
            "status", "R3", "error", message, 'wait for its producer, or write "completed" when it is'
        )


@rule("R6", "server_count is the number of entries of server_list")
def check_server_count(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The count is compared with what is listed."""
    found = len(survey.servers)
    if survey.declared_server_count is not None and survey.declared_server_count != found:
        message = f"the {_noun(survey)} lists {found} server{'s' if found != 1 else ''}"
        yield survey.complain("server_count", "R6", "error", message, f'write "{found}", or list the missing servers')


def _noun(survey: Survey) -> str:
    return "group" if survey.path else "table"


@rule("R7", "server_id is a unique name or address of 1 to 64 characters", severity="error or warning")
def check_server_ids(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Masks of documentation samples are named as such; a doubled id is reported at its second place.

    In a group of a MindIE global table two pods of one host share its id and have their own `server_ip`: a warning.
    """

    def severity(first: ServerEntry, second: ServerEntry) -> Severity:
        addresses = (first.text("server_ip"), second.text("server_ip"))
        are_pods = survey.dialect == "mindie-global" and None not in addresses and addresses[0] != addresses[1]
        return "warning" if are_pods else "error"

    for server in survey.servers:
        if server.server_id is not None:
            yield from _check_server_id(server, server.server_id, survey)
    same = "the same server_id stands at {}"
    yield from find_repeats(survey.servers, "server_id", "R7", same, "give each server its own id", severity=severity)


def _check_server_id(server: ServerEntry, server_id: str, survey: Survey) -> Iterator[Problem]:
    what = name_placeholder(server_id)
    if not server_id.strip():
        yield server.complain("server_id", "R7", "error", "the id is empty", "write the address or name of the host")
    elif what:
        message = f"the id is {what}, not the address or name of a host"
        yield server.complain("server_id", "R7", "error", message, "write the address or name of this host")
    elif len(server_id) > MAX_SERVER_ID_LENGTH:
        message = f"the id has {len(server_id)} characters, at most {MAX_SERVER_ID_LENGTH} are read"
        yield server.complain("server_id", "R7", "error", message, "shorten it")
    elif survey.is_multi_server and _is_loopback(server_id):
        message = "the id is a loopback address in a table of several servers"
        yield server.complain("server_id", "R7", "warning", message, "write the address that the other hosts reach")


def _is_loopback(server_id: str) -> bool:
    try:
        return ipaddress.ip_address(server_id).is_loopback
    except ValueError:
        return server_id == "localhost"


@rule("R8", "device_id is a physical device number that is unique on its server")
def check_device_ids(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """The highest number depends on the chip; without a chip it is that of the largest, the 300I Duo."""
    chip = chip_of(survey, profile)
    highest = MAX_DEVICE_ID[chip or "300i-duo"]
    for server in survey.servers:
        for device in server.devices if profile.is_ascend else ():
            if device.device_id is not None and device.device_id > highest:
                message = f"the highest device number is {highest} on {chip or 'any chip of version 1.0'}"
                yield device.complain("device_id", "R8", "error", message, "write the physical number of the device")
        same, remedy = "the same device_id stands at {}", "give each device of a server its own number"
        yield from find_repeats(server.devices, "device_id", "R8", same, remedy, lambda device: device.device_id)


@rule("R9", "the rank ids are 0 to n-1, each once")
def check_rank_ids(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """n is the number of devices in the table, in the group, or in the instance of an inference service."""
    for servers in _rank_spaces(survey):
        yield from _check_rank_space(servers, _noun(survey))


def _rank_spaces(survey: Survey) -> list[tuple[ServerEntry, ...]]:
    """Return the servers that count their ranks together.

    In a group with `deploy_server` "0" every server can be an instance of its own, with ranks from 0.
    """
    with_ranks = [server for server in survey.servers if server.devices]
    is_each_alone = survey.text("deploy_server") == "0" and all(server.ranks[:1] == [0] for server in with_ranks)
    return [(server,) for server in with_ranks] if is_each_alone else [survey.servers]


def _check_rank_space(servers: Sequence[ServerEntry], noun: str) -> Iterator[Problem]:
    size = sum(len(server.devices) for server in servers)
    first_paths: dict[int, str] = {}
    wrong: list[tuple[DeviceEntry, str]] = []
    for device in (device for server in servers for device in server.devices):
        if device.rank_id is None:
            continue
        if device.rank_id >= size:
            wrong.append((device, f"the {noun} has {size} devices, so ranks go from 0 to {size - 1}"))
        elif device.rank_id in first_paths:
            wrong.append((device, f"the same rank_id stands at {first_paths[device.rank_id]}"))
        else:
            first_paths[device.rank_id] = device.path_of("rank_id")
    missing = (rank for rank in range(size) if rank not in first_paths)
    for device, message in wrong:
        yield device.complain("rank_id", "R9", "error", message, f'write "{next(missing)}", a rank that is missing')
