"""Rules R17 to R21: how many devices a server may have, and which. All of them belong to Ascend chips.

Source: CANN 5.0 documentation of the 910 (1, 2, 4 or 8 devices; 8 on each of several servers; two rings of four),
and the limits in HCCL's parser. Rules of the 910A are left out when a device number shows that it is another chip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ranktable.kinds import ServerEntry, Survey
from ranktable.problem import Problem, Severity, join_key
from ranktable.profile import Profile
from ranktable.rules import citations
from ranktable.rules.identity import MAX_DEVICE_ID
from ranktable.rules.registry import chip_of, rule, severity_on
from ranktable.text import count_noun

_COUNTS_910A = (1, 2, 4, 8)
_QUADS_910A = tuple(
    frozenset(quad)
    for quad in (
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (0, 1, 4, 5),
        (0, 2, 4, 6),
        (0, 3, 4, 7),
        (1, 2, 5, 6),
        (1, 3, 5, 7),
        (2, 3, 6, 7),
    )
)
_MAX_DEVICES = {"910a": 8, "a2": 16, "a3": 16}
_USUAL_DEVICES = {"a2": 8}
"""Most A2 servers have 8 devices, a few have 16."""
_CONCISE = (citations.CONCISE,)


def _severity_910a(survey: Survey, profile: Profile) -> Severity | None:
    severity = severity_on(survey, profile, "910a")
    if severity is None or profile.chip is not None:
        return severity
    is_larger = any((device.device_id or 0) > MAX_DEVICE_ID["910a"] for device in survey.devices)
    return None if is_larger else severity


def _complain(server: ServerEntry, rule_id: str, severity: Severity, message: str, remedy: str) -> Problem:
    return Problem(join_key(server.path, "device"), rule_id, severity, message, remedy)


@rule(
    "R17",
    "a 910A server has 1, 2, 4 or 8 devices, and 8 when it is not alone",
    chips=("910a",),
    sources=_CONCISE,
)
def check_device_count(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """More than eight devices are left to R21."""
    severity = _severity_910a(survey, profile)
    allowed = (8,) if survey.is_multi_server else _COUNTS_910A
    for server in survey.servers if severity else ():
        count = len(server.devices)
        if severity and 0 < count < 8 and count not in allowed:
            wanted = "8 devices on each of several servers" if survey.is_multi_server else "1, 2, 4 or 8 devices"
            message = f"the server has {count_noun(count, 'device')}; a 910A takes {wanted}"
            yield _complain(server, "R17", severity, message, "list a number of devices that the chip takes")


@rule(
    "R18",
    "two devices of a 910A server are both of 0-3 or both of 4-7",
    severity="warning",
    chips=("910a",),
)
def check_device_pair(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """The two rings of four are separate networks; HCCL's parser accepts such a pair, so this is a warning."""
    for server in survey.servers if _severity_910a(survey, profile) else ():
        ids = _device_ids(server)
        if len(server.devices) == len(ids) == 2 and len({number // 4 for number in ids}) == 2:
            message = f"devices {_join(ids)} are on two networks of a 910A"
            yield _complain(server, "R18", "warning", message, "take two devices of 0-3 or two of 4-7")


@rule("R19", "four devices of a 910A server are one of eight sets", chips=("910a",), sources=_CONCISE)
def check_device_quad(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """The sets are the rings that the links of the board can form."""
    severity = _severity_910a(survey, profile)
    for server in survey.servers:
        ids = _device_ids(server)
        if severity and len(server.devices) == len(ids) == 4 and ids not in _QUADS_910A:
            message = f"devices {_join(ids)} form no ring on a 910A"
            yield _complain(server, "R19", severity, message, "take devices 0-3 or devices 4-7")


@rule("R20", "every 910A server has the same number of devices", chips=("910a",), sources=_CONCISE)
def check_equal_counts(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """The servers that differ from the most are reported. A2 and A3 take servers of different sizes."""
    severity = _severity_910a(survey, profile)
    counts = Counter(len(server.devices) for server in survey.servers)
    usual = max(counts, key=lambda count: (counts[count], count), default=0)
    for server in survey.servers:
        if severity and len(server.devices) != usual:
            message = f"the server has {len(server.devices)} devices, the others have {usual}"
            yield _complain(server, "R20", severity, message, f"list {usual} devices on every server")


@rule(
    "R21",
    "a server has no more devices than its chip allows",
    severity="error or warning",
    chips=("910a", "a2", "a3"),
    sources=_CONCISE,
)
def check_device_limit(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """8 on a 910A, 16 on A3, 16 on A2, where more than 8 are rare; R8 bounds the 300I Duo by its device numbers."""
    chip = chip_of(survey, profile)
    if not profile.is_ascend or chip in ("300i-duo", "a5"):
        return
    limit = _MAX_DEVICES[chip or "a3"]
    usual = _USUAL_DEVICES.get(chip or "", limit)
    for server in survey.servers:
        count = len(server.devices)
        if count > usual:
            severity: Severity = "error" if chip and count > limit else "warning"
            at_most = limit if count > limit else usual
            message = f"the server has {count} devices, at most {at_most} are usual on one server"
            yield _complain(server, "R21", severity, message, "check that the server is not two")


def _device_ids(server: ServerEntry) -> frozenset[int]:
    return frozenset(device.device_id for device in server.devices if device.device_id is not None)


def _join(ids: frozenset[int]) -> str:
    return ", ".join(str(number) for number in sorted(ids))
