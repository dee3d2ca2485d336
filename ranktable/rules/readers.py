"""Rules P1, P2, P6 and P10 to P24: what single readers and chips ask for beyond the rules of all.

Source: HCCL's choice of a parser by the version (EI0014 for any other), the versions that products write for each chip,
the rank table pages of the MindSpore documentation (P6); MindIE-LLM's rank table configuration (P10 to P15: file mode,
server_count of 2 to 60, 1 to 32 devices on every server and equally many, ranks up to 511, container_ip, IPv4
addresses; its limit of 63 for device_id is wider than R8's); MindIE-Motor's loader of the global table of a service
(P20 to P24: addresses of hosts and pods, 1 to 128 devices on a server, at most 96 servers in a group, a group 0 with at
most two coordinators and one group of instances at least, known hardware).
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from ranktable.problem import Problem, Severity, join_key, show_value
from ranktable.profile import Profile
from ranktable.rules.registry import CONCISE, MADE_FOR_A3, declare_rule, rule
from ranktable.survey import DeviceEntry, ServerEntry, Survey, find_repeats
from ranktable.text import count_noun
from ranktable.values import parse_address

_HCCL_DIALECTS = frozenset({"1.0", "1.1", "1.2", "2.0", "template2-cloud", "template2-lab", "cross-cluster"})
_READ_BY = {
    "hccl": _HCCL_DIALECTS,
    "mindspore": _HCCL_DIALECTS,
    "mindie-llm": frozenset({"1.0", "1.2"}),
    "mindie-motor": frozenset({"mindie-global"}),
}
_NAMES = {"hccl": "HCCL", "mindspore": "MindSpore", "mindie-llm": "MindIE-LLM", "mindie-motor": "MindIE-Motor"}
_PRODUCER_ONLY = {"volcano-job": "1.3", "volcano-global": "1.4"}
_LLM_DIALECTS = frozenset({"1.0", "1.2"})
_LLM = ("mindie-llm",)
_MODE = 0o640
_MIN_LLM_SERVERS, _MAX_LLM_SERVERS = 2, 60
_MAX_LLM_DEVICES = 32
_MAX_LLM_RANK = 511
_SERVICES = frozenset({"mindie-global"})
_MOTOR = ("mindie-motor",)
_COORDINATORS = "0"
_CONTROL_GROUPS = (_COORDINATORS, "1")
_MAX_MOTOR_DEVICES = 128
_MAX_MOTOR_SERVERS = 96
_MAX_COORDINATORS = 2
_HARDWARE = ("800I A2(32G)", "800I A2(64G)", "800I-A2-32G", "800I-A2-64G")


@rule(
    "P1", "the reader reads tables of this kind", CONCISE | _HCCL_DIALECTS, severity="error or warning", is_whole=True
)
def check_reader(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """Versions 1.3 and 1.4 have producers and no reader in HCCL: a warning as long as no reader is named."""
    if profile.reader is None:
        version = _PRODUCER_ONLY.get(survey.dialect)
        if version and profile.is_ascend:
            message = f"HCCL refuses version {version} (EI0014)"
            yield _complain(survey, "P1", "warning", message, "write the job's table as version 1.0 or 1.2 for HCCL")
        return
    known = _READ_BY[profile.reader]
    if survey.dialect not in known:
        message = f"{_NAMES[profile.reader]} does not read this kind of table"
        yield _complain(survey, "P1", "error", message, f"give it one of the kinds {', '.join(sorted(known))}")


@rule("P2", "the chip reads tables of this version", CONCISE | {"2.0"}, severity="error or warning", is_whole=True)
def check_chip(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """A5 reads version 2.0 only, which no other chip reads.

    Versions 1.0 and 1.2 have one parser, so a super pod table for a chip without super pods is a warning.
    """
    if profile.chip is None:
        return
    if (profile.chip == "a5") != (survey.dialect == "2.0"):
        reads = "version 2.0 only" if profile.chip == "a5" else "versions 1.0 and 1.2, not 2.0"
        remedy = "generate the table on its host" if profile.chip == "a5" else "name the chip a5, or use version 1.0"
        yield _complain(survey, "P2", "error", f"chip {profile.chip} reads {reads} (EI0014)", remedy)
    elif survey.dialect in MADE_FOR_A3 and profile.chip != "a3":
        message = f"super pods belong to chip a3, the table is checked for {profile.chip}"
        yield _complain(survey, "P2", "warning", message, 'write "version": "1.0", or name the chip a3')


@rule("P6", "server_id is the address of the host", severity="warning", readers=("mindspore",))
def check_server_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """HCCL takes any name; MindSpore's documentation asks for the address."""
    for server in survey.servers:
        if server.server_id is not None and parse_address(server.server_id) is None:
            message = "the id is not an address; MindSpore's documentation asks for the host's address"
            yield server.complain("server_id", "P6", "warning", message, "write the address of the host")


def _complain(survey: Survey, rule_id: str, severity: Severity, message: str, remedy: str) -> Problem:
    return survey.complain("version", rule_id, severity, message, remedy)


declare_rule("P10", "the file has no permissions beyond 0640", _LLM_DIALECTS, readers=_LLM)


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


@rule("P11", "the table has 2 to 60 servers", _LLM_DIALECTS, readers=_LLM)
def check_llm_servers(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The parser reads server_count, which R6 holds to the list."""
    count = len(survey.servers)
    if not _MIN_LLM_SERVERS <= count <= _MAX_LLM_SERVERS:
        message = f"the table has {count_noun(count, 'server')}, it takes {_MIN_LLM_SERVERS} to {_MAX_LLM_SERVERS}"
        yield Problem("server_list", "P11", "error", message, "give one server no table, and a large service several")
    if not survey.has("server_count"):
        message = "the key is missing; MindIE-LLM reads it"
        yield survey.complain("server_count", "P11", "error", message, f'add "server_count": "{count}"')


@rule("P12", "every server has the same number of devices, 1 to 32", _LLM_DIALECTS, readers=_LLM)
def check_llm_devices(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The first server sets the number."""
    usual = len(survey.servers[0].devices) if survey.servers else 0
    for server in survey.servers:
        count = len(server.devices)
        message = ""
        if count > _MAX_LLM_DEVICES:
            message = f"the server has {count} devices, at most {_MAX_LLM_DEVICES} are read"
        elif count != usual:
            message = f"the server has {count} devices, the first one has {usual}"
        if message:
            path = join_key(server.path, "device")
            yield Problem(path, "P12", "error", message, "list as many devices on every server, at most 32")


@rule("P13", "rank ids go up to 511", _LLM_DIALECTS, readers=_LLM)
def check_llm_ranks(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """More ranks than that are not read."""
    for device in survey.devices:
        if device.rank_id is not None and device.rank_id > _MAX_LLM_RANK:
            message = f"MindIE-LLM reads ranks up to {_MAX_LLM_RANK}"
            yield device.complain("rank_id", "P13", "error", message, "divide the service into smaller ones")


@rule("P14", "container_ip is there and not empty", _LLM_DIALECTS, readers=_LLM)
def check_container_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The address of the pod, or of the host where there is no pod: by it each process finds its server."""
    for server in survey.servers:
        text = server.text("container_ip")
        if text is None or not text.strip():
            fault = "missing" if not server.has("container_ip") else "empty" if text is not None else "no string"
            message = f"the address is {fault}; MindIE-LLM finds its own server by it"
            remedy = "write the address of the pod, which is MIES_CONTAINER_IP in it"
            yield server.complain("container_ip", "P14", "error", message, remedy)


@rule("P15", "device_ip is one IPv4 address", _LLM_DIALECTS, readers=_LLM)
def check_llm_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
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
    address = parse_address(text)
    if address is None:
        return "MindIE-LLM reads one address, not a list" if "," in text else ""
    return "" if address.version == 4 else "MindIE-LLM reads IPv4 addresses only"


@rule(
    "P20",
    "server_id and server_ip are addresses, and server_ip is unique in its group",
    _SERVICES,
    readers=_MOTOR,
)
def check_motor_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """server_id is the address of the host, server_ip that of the pod; instances are told apart by the latter."""
    for server in survey.servers:
        for key in ("server_id", "server_ip"):
            yield from _check_motor_address(server, key)
    same = "the same server_ip stands at {}"
    yield from find_repeats(survey.servers, "server_ip", "P20", same, "write the address of each pod")


def _check_motor_address(server: ServerEntry, key: str) -> Iterator[Problem]:
    text = server.text(key)
    if text is None:
        return
    address = parse_address(text)
    if address is None or address.is_unspecified or address.is_multicast:
        remedy = f"write the address of the {'host' if key == 'server_id' else 'pod'}"
        yield server.complain(key, "P20", "error", "the value is not the address of a host or a pod", remedy)


@rule("P21", "a server of an instance has 1 to 128 devices", _SERVICES, readers=_MOTOR)
def check_motor_devices(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A server without devices is found by R5; coordinators and controllers have none."""
    for server in survey.servers:
        if len(server.devices) > _MAX_MOTOR_DEVICES:
            message = f"the server has {len(server.devices)} devices, at most {_MAX_MOTOR_DEVICES} are read"
            yield Problem(join_key(server.path, "device"), "P21", "error", message, "check that the server is not two")


@rule("P22", "a group has at most 96 servers", _SERVICES, readers=_MOTOR)
def check_group_sizes(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Larger groups are refused as a whole."""
    if len(survey.servers) > _MAX_MOTOR_SERVERS:
        message = f"the group has {len(survey.servers)} servers, at most {_MAX_MOTOR_SERVERS} are read"
        yield Problem(join_key(survey.path, "server_list"), "P22", "error", message, "divide the group")


@rule(
    "P23",
    "group 0 has at most two coordinators, and there are instances",
    _SERVICES,
    readers=_MOTOR,
    is_whole=True,
)
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


@rule("P24", "hardware_type is one that MindIE-Motor knows", _SERVICES, severity="warning", readers=_MOTOR)
def check_hardware(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """It is read for services of mixed hardware, so an unknown name is a warning."""
    for server in survey.servers:
        name = server.text("hardware_type")
        if name is not None and name not in _HARDWARE:
            remedy = f"write one of {', '.join(show_value(known) for known in _HARDWARE)}"
            message = "the name is not known; a service of mixed hardware is refused"
            yield server.complain("hardware_type", "P24", "warning", message, remedy)
