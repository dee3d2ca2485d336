"""Rules P1, P2, P6 and P10 to P15: what single readers and chips ask for beyond the rules of all."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from ranktable.kinds import DeviceEntry, Survey, all_dialects
from ranktable.problem import Problem, Severity, join_key
from ranktable.profile import Profile
from ranktable.rules import citations
from ranktable.rules.registry import declare_rule, rule
from ranktable.text import count_noun
from ranktable.values import parse_address

_NAMES = {"hccl": "HCCL", "mindspore": "MindSpore", "mindie-llm": "MindIE-LLM", "mindie-motor": "MindIE-Motor"}
_LLM = ("mindie-llm",)
_MODE = 0o640
_MIN_LLM_SERVERS, _MAX_LLM_SERVERS = 2, 60
_MAX_LLM_DEVICES = 32
_MAX_LLM_RANK = 511
_SOURCES = (citations.MINDIE_LLM,)


@rule(
    "P1",
    "the reader reads tables of this kind",
    severity="error or warning",
    is_whole=True,
    sources=(citations.VERSIONS,),
)
def check_reader(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """Versions 1.3 and 1.4 have producers and no reader in HCCL: a warning as long as no reader is named."""
    if profile.reader is None:
        version = survey.kind.refused_version
        if version and profile.is_ascend:
            message = f"HCCL refuses version {version} (EI0014)"
            yield _complain(survey, "P1", "warning", message, "write the job's table as version 1.0 or 1.2 for HCCL")
        return
    if profile.reader not in survey.kind.readers:
        known = sorted(kind.name for kind in all_dialects() if profile.reader in kind.readers)
        message = f"{_NAMES[profile.reader]} does not read this kind of table"
        yield _complain(survey, "P1", "error", message, f"give it one of the kinds {', '.join(known)}")


@rule(
    "P2",
    "the chip reads tables of this version",
    severity="error or warning",
    is_whole=True,
    sources=(citations.VERSIONS, citations.OPERATOR),
)
def check_chip(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """A5 reads version 2.0 only, which no other chip reads.

    Versions 1.0 and 1.2 have one parser, so a super pod table for a chip without super pods is a warning.
    """
    if profile.chip is None:
        return
    if (profile.chip == "a5") != survey.kind.is_for_a5:
        reads = "version 2.0 only" if profile.chip == "a5" else "versions 1.0 and 1.2, not 2.0"
        remedy = "generate the table on its host" if profile.chip == "a5" else "name the chip a5, or use version 1.0"
        yield _complain(survey, "P2", "error", f"chip {profile.chip} reads {reads} (EI0014)", remedy)
    elif survey.kind.has_super_pods and profile.chip != "a3":
        message = f"super pods belong to chip a3, the table is checked for {profile.chip}"
        yield _complain(survey, "P2", "warning", message, 'write "version": "1.0", or name the chip a3')


@rule(
    "P6",
    "server_id is the address of the host",
    severity="warning",
    readers=("mindspore",),
    sources=(citations.MINDSPORE,),
)
def check_server_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """HCCL takes any name; MindSpore's documentation asks for the address."""
    for server in survey.servers:
        if server.server_id is not None and parse_address(server.server_id) is None:
            message = "the id is not an address; MindSpore's documentation asks for the host's address"
            yield server.complain("server_id", "P6", "warning", message, "write the address of the host")


def _complain(survey: Survey, rule_id: str, severity: Severity, message: str, remedy: str) -> Problem:
    return survey.complain("version", rule_id, severity, message, remedy)


declare_rule("P10", "the file has no permissions beyond 0640", readers=_LLM, sources=_SOURCES)


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


@rule("P11", "the table has 2 to 60 servers", readers=_LLM, sources=_SOURCES)
def check_llm_servers(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The parser reads server_count, which R6 holds to the list."""
    count = len(survey.servers)
    if not _MIN_LLM_SERVERS <= count <= _MAX_LLM_SERVERS:
        message = f"the table has {count_noun(count, 'server')}, it takes {_MIN_LLM_SERVERS} to {_MAX_LLM_SERVERS}"
        yield Problem("server_list", "P11", "error", message, "give one server no table, and a large service several")
    if not survey.has("server_count"):
        message = "the key is missing; MindIE-LLM reads it"
        yield survey.complain("server_count", "P11", "error", message, f'add "server_count": "{count}"')


@rule("P12", "every server has the same number of devices, 1 to 32", readers=_LLM, sources=_SOURCES)
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


@rule("P13", "rank ids go up to 511", readers=_LLM, sources=_SOURCES)
def check_llm_ranks(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """More ranks than that are not read."""
    for device in survey.devices:
        if device.rank_id is not None and device.rank_id > _MAX_LLM_RANK:
            message = f"MindIE-LLM reads ranks up to {_MAX_LLM_RANK}"
            yield device.complain("rank_id", "P13", "error", message, "divide the service into smaller ones")


@rule("P14", "container_ip is there and not empty", readers=_LLM, sources=_SOURCES)
def check_container_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The address of the pod, or of the host where there is no pod: by it each process finds its server."""
    for server in survey.servers:
        text = server.text("container_ip")
        if text is None or not text.strip():
            fault = "missing" if not server.has("container_ip") else "empty" if text is not None else "no string"
            message = f"the address is {fault}; MindIE-LLM finds its own server by it"
            remedy = "write the address of the pod, which is MIES_CONTAINER_IP in it"
            yield server.complain("container_ip", "P14", "error", message, remedy)


@rule("P15", "device_ip is one IPv4 address", readers=_LLM, sources=_SOURCES)
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
