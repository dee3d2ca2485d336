"""Rules R10 to R12: the order of the ranks over servers and inside one server.

Source: the rank table pages of the HCCL documentation (R10, R12: contiguous, physical order) and of the MindSpore
documentation (R11: the order of rank_id is that of server_id as strings).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ranktable.hostlist.ranges import fold_numbers
from ranktable.problem import Problem, Severity, join_key, show_value
from ranktable.profile import Profile
from ranktable.rules.chips import severity_on
from ranktable.rules.registry import CONCISE, rule
from ranktable.survey import DeviceEntry, ServerEntry, Survey


@rule("R10", "the ranks of one server follow each other without a gap", severity="warning")
def check_ranks_contiguous(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Interleaved servers make every rank guess of the form rank = server x devices + i wrong."""
    for server in survey.servers:
        ranks = server.ranks
        if any(after - before > 1 for before, after in pairwise(ranks)):
            message = f"the ranks of this server have gaps: {fold_numbers(ranks)}"
            yield _about_devices(server, "R10", message, "number the devices of each server in one row")


@rule(
    "R11",
    "the order of the ranks is the string order of the server ids, as MindSpore demands",
    CONCISE - {"mindie-global"},
    severity="error or warning",
)
def check_server_order(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """In string order "10.0.0.10" comes before "10.0.0.9".

    MindSpore's documentation requires it: an error for that reader, a warning when no reader is named. HCCL and MindIE
    go by the ranks as they are.
    """
    if not profile.is_ascend or profile.reader not in (None, "mindspore"):
        return
    severity: Severity = "error" if profile.reader else "warning"
    with_ranks = [(server.ranks[0], server.server_id or "", server) for server in survey.servers if server.ranks]
    by_rank = sorted(with_ranks, key=lambda entry: entry[0])
    for (_, earlier, _), (rank, server_id, server) in pairwise(by_rank):
        if server_id < earlier:
            message = f"its ranks start at {rank}, after those of {show_value(earlier)}, but its id sorts before that"
            remedy = "number the servers in the string order of their ids"
            yield server.complain("server_id", "R11", severity, message, remedy)


@rule(
    "R12",
    "on one server the order of the ranks is that of the device ids",
    severity="warning",
    chips=("910a", "a2"),
)
def check_device_order(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """The physical order that 910A and A2 expect."""
    if severity_on(survey, profile, "910a", "a2") is None:
        return
    for server in survey.servers:
        readable = [pair for device in server.devices if (pair := _ids(device)) is not None]
        by_device = [rank_id for _, rank_id in sorted(readable)]
        if by_device != sorted(by_device):
            message = f"in the order of device_id the ranks are {', '.join(map(str, by_device))}"
            yield _about_devices(server, "R12", message, "number the devices in the order of device_id")


def _ids(device: DeviceEntry) -> tuple[int, int] | None:
    if device.device_id is None or device.rank_id is None:
        return None
    return device.device_id, device.rank_id


def _about_devices(server: ServerEntry, rule_id: str, message: str, remedy: str) -> Problem:
    return Problem(join_key(server.path, "device"), rule_id, "warning", message, remedy)
