"""Rules P1, P2 and P6: whether the reader and the chip that a table is checked for read this kind of table at all.

Source: HCCL's choice of a parser by the version (EI0014 for any other), the versions that products write for each
chip, the rank table pages of the MindSpore documentation (P6), and what MindIE's loaders read.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from ranktable.problem import Problem, Severity
from ranktable.profile import Profile
from ranktable.rules.registry import CONCISE, rule
from ranktable.survey import Survey

_HCCL_DIALECTS = frozenset({"1.0", "1.1", "1.2", "2.0", "template2-cloud", "template2-lab", "cross-cluster"})
_READ_BY = {
    "hccl": _HCCL_DIALECTS,
    "mindspore": _HCCL_DIALECTS,
    "mindie-llm": frozenset({"1.0", "1.2"}),
    "mindie-motor": frozenset({"mindie-global"}),
}
_NAMES = {"hccl": "HCCL", "mindspore": "MindSpore", "mindie-llm": "MindIE-LLM", "mindie-motor": "MindIE-Motor"}
_PRODUCER_ONLY = {"volcano-job": "1.3", "volcano-global": "1.4"}
_SUPER_POD_DIALECTS = frozenset({"1.2", "volcano-global"})


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
    elif survey.dialect in _SUPER_POD_DIALECTS and profile.chip != "a3":
        message = f"super pods belong to chip a3, the table is checked for {profile.chip}"
        yield _complain(survey, "P2", "warning", message, 'write "version": "1.0", or name the chip a3')


@rule("P6", "server_id is the address of the host", severity="warning", readers=("mindspore",))
def check_server_addresses(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """HCCL takes any name; MindSpore's documentation asks for the address."""
    for server in survey.servers:
        if server.server_id is not None and not _is_address(server.server_id):
            message = "the id is not an address; MindSpore's documentation asks for the host's address"
            yield server.complain("server_id", "P6", "warning", message, "write the address of the host")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _complain(survey: Survey, rule_id: str, severity: Severity, message: str, remedy: str) -> Problem:
    return survey.complain("version", rule_id, severity, message, remedy)
