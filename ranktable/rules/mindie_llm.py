"""Rules P10 to P15: what MindIE-LLM demands of the table of a service over several servers.

Source: MindIE-LLM's rank table configuration: file mode, server_count of 2 to 60, 1 to 32 devices on every server and
equally many, ranks up to 511, container_ip, IPv4 addresses. Its limit of 63 for device_id is wider than R8's.
"""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Iterator
from pathlib import Path

from ranktable.problem import Problem, join_key
from ranktable.profile import Profile
from ranktable.rules.registry import declare_rule, rule
from ranktable.survey import DeviceEntry, Survey

_DIALECTS = frozenset({"1.0", "1.2"})
_READER = ("mindie-llm",)
_MODE = 0o640
_MIN_SERVERS, _MAX_SERVERS = 2, 60
_MAX_DEVICES = 32
_MAX_RANK = 511

declare_rule("P10", "the file has no permissions beyond 0640", _DIALECTS, readers=_READER)


def check_file_mode(source: str) -> list[Problem]:
    """Return the finding of rule P10; none for a source that is not a file, such as a pipe."""
    try:
        found = Path(source).stat()
    except (OSError, ValueError):
        return []
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode) or not mode & ~_MODE:
        return []
    message = f"its mode is {mode:04o}; MindIE-LLM refuses more than {_MODE:04o}"
    return [Problem("", "P10", "error", message, f"chmod {_MODE:o} the file")]


@rule("P11", "the table has 2 to 60 servers", _DIALECTS, readers=_READER)
def check_server_count(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The parser reads server_count, which R6 holds to the list."""
    count = len(survey.servers)
    if not _MIN_SERVERS <= count <= _MAX_SERVERS:
        message = f"the table has {count} server{'s' if count != 1 else ''}, it takes {_MIN_SERVERS} to {_MAX_SERVERS}"
        yield Problem("server_list", "P11", "error", message, "give one server no table, and a large service several")
    if not survey.has("server_count"):
        message = "the key is missing; MindIE-LLM reads it"
        yield survey.complain("server_count", "P11", "error", message, f'add "server_count": "{count}"')


@rule("P12", "every server has the same number of devices, 1 to 32", _DIALECTS, readers=_READER)
def check_device_counts(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The first server sets the number."""
    usual = len(survey.servers[0].devices) if survey.servers else 0
    for server in survey.servers:
        count = len(server.devices)
        message = ""
        if count > _MAX_DEVICES:
            message = f"the server has {count} devices, at most {_MAX_DEVICES} are read"
        elif count != usual:
            message = f"the server has {count} devices, the first one has {usual}"
        if message:
            path = join_key(server.path, "device")
            yield Problem(path, "P12", "error", message, "list as many devices on every server, at most 32")


@rule("P13", "rank ids go up to 511", _DIALECTS, readers=_READER)
def check_ranks(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """More ranks than that are not read."""
    for device in survey.devices:
        if device.rank_id is not None and device.rank_id > _MAX_RANK:
            message = f"MindIE-LLM reads ranks up to {_MAX_RANK}"
            yield device.complain("rank_id", "P13", "error", message, "divide the service into smaller ones")


@rule("P14", "container_ip is there and not empty", _DIALECTS, readers=_READER)
def check_container_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The address of the pod, or of the host where there is no pod: by it each process finds its server."""
    for server in survey.servers:
        text = server.text("container_ip")
        if text is None or not text.strip():
            fault = "missing" if not server.has("container_ip") else "empty" if text is not None else "no string"
            message = f"the address is {fault}; MindIE-LLM finds its own server by it"
            remedy = "write the address of the pod, which is MIES_CONTAINER_IP in it"
            yield server.complain("container_ip", "P14", "error", message, remedy)


@rule("P15", "device_ip is one IPv4 address", _DIALECTS, readers=_READER)
def check_device_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Even on one server, and no list and no IPv6; what is no address at all is left to R13."""
    for device in survey.devices:
        message = _address_fault(device)
        if message:
            remedy = "write the IPv4 address of the device's port"
            yield device.complain("device_ip", "P15", "error", message, remedy)


def _address_fault(device: DeviceEntry) -> str:
    if not device.has("device_ip"):
        return "the key is missing; MindIE-LLM needs it on every device"
    text = device.text("device_ip") or ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "MindIE-LLM reads one address, not a list" if "," in text else ""
    return "" if address.version == 4 else "MindIE-LLM reads IPv4 addresses only"
