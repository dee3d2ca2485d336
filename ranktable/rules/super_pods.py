"""Rules R24 to R26 and P3: super pods, of A3 only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ranktable.kinds import DeviceEntry, ServerEntry, Survey, find_repeats
from ranktable.problem import Problem, join_key
from ranktable.profile import Profile
from ranktable.rules import citations
from ranktable.rules.registry import rule
from ranktable.values import name_placeholder, parse_number

_KEY = "super_device_id"
_HIGHEST = 2**32 - 1
_MAX_POD_ID_LENGTH = 127
_FIND_IT = "write the SDID of the device: npu-smi info -t spod-info -i CARD -c CHIP"
_MAX_SERVER, _MAX_CHIP, _MAX_DIE = 47, 7, 1


@rule(
    "R24",
    "super_device_id is a number of 32 bits that is unique in its super pod",
    chips=("a3",),
    sources=(citations.CONCISE, citations.VERIFY_PAGE),
)
def check_super_device_ids(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Demanded of every device as soon as there is a super_pod_list; without one HCCL does not look at it."""
    pods = _pods_of_servers(survey)
    first_paths: dict[tuple[int, int], str] = {}
    for place, server in enumerate(survey.servers):
        # A server that no pod has is a pod of its own here, so that R25 is its only fault.
        pod = pods.get(server.server_id or "", -1 - place)
        for device in server.devices:
            yield from _check_super_device_id(device, pod, first_paths, survey.has("super_pod_list"))


def _check_super_device_id(
    device: DeviceEntry, pod: int, first_paths: dict[tuple[int, int], str], is_demanded: bool
) -> Iterator[Problem]:
    text = device.text(_KEY)
    number = parse_number(text)
    if text is None:
        if is_demanded and not device.has(_KEY):
            yield _complain(device, "the key is missing; a table with super_pod_list needs it")
    elif number is None or number > _HIGHEST:
        what = name_placeholder(text)
        fault = "is empty" if not text.strip() else f"is {what}" if what else "is no decimal number of 32 bits"
        yield _complain(device, f"the id {fault}")
    elif (pod, number) in first_paths:
        yield _complain(device, f"the same super_device_id stands at {first_paths[pod, number]}")
    else:
        first_paths[pod, number] = join_key(device.path, _KEY)


def _complain(device: DeviceEntry, message: str) -> Problem:
    return device.complain(_KEY, "R24", "error", message, _FIND_IT)


def _pods_of_servers(survey: Survey) -> Mapping[str, int]:
    """Return the place of each server's pod in the list; pods with one id are one pod."""
    places: dict[str, int] = {}
    pods: dict[str, int] = {}
    for place, pod in enumerate(survey.super_pods):
        first = places.setdefault(pod.text("super_pod_id") or "", place)
        for entry in pod.servers:
            pods.setdefault(entry.text("server_id") or "", first)
    return pods


@rule(
    "R25",
    "super_pod_list has unique pods that cover every server once, and no others",
    severity="error or warning",
    chips=("a3",),
    sources=(citations.CONCISE, citations.A3_PAGE),
)
def check_super_pod_list(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Without the list HCCL takes the servers for ones without a super pod, which is odd when devices have numbers."""
    if survey.has("super_pod_list"):
        yield from _check_pod_ids(survey)
        yield from _check_coverage(survey)
        return
    if any(device.has(_KEY) for device in survey.devices):
        message = "the key is missing, so HCCL sees no super pods, though devices have a super_device_id"
        yield survey.complain("super_pod_list", "R25", "warning", message, "list the super pods and their servers")


def _check_pod_ids(survey: Survey) -> Iterator[Problem]:
    usable = []
    for pod in survey.super_pods:
        pod_id = pod.text("super_pod_id")
        what = name_placeholder(pod_id or "")
        if what:
            message = f"the id is {what}, not that of a super pod"
            yield pod.complain("super_pod_id", "R25", "error", message, "write the number of the super pod")
        elif pod_id is not None and not 1 <= len(pod_id) <= _MAX_POD_ID_LENGTH:
            message = f"the id has {len(pod_id)} characters, it takes 1 to {_MAX_POD_ID_LENGTH}"
            yield pod.complain("super_pod_id", "R25", "error", message, "write the number of the super pod")
        else:
            usable.append(pod)
    same, remedy = "the same super_pod_id stands at {}", "list the servers of one pod under one entry"
    yield from find_repeats(usable, "super_pod_id", "R25", same, remedy)


def _check_coverage(survey: Survey) -> Iterator[Problem]:
    known = {server.server_id for server in survey.servers}
    entries = [entry for pod in survey.super_pods for entry in pod.servers]
    for entry in entries:
        if entry.text("server_id") is not None and entry.text("server_id") not in known:
            message = "the id is not in server_list"
            yield entry.complain("server_id", "R25", "error", message, "write the id as it stands in server_list")
    inside = [entry for entry in entries if entry.text("server_id") in known]
    same = "the same server stands at {}"
    yield from find_repeats(inside, "server_id", "R25", same, "list each server in one super pod")
    covered = {entry.text("server_id") for entry in inside}
    for server in survey.servers:
        if server.server_id is not None and server.server_id not in covered:
            message = "the server is in no super pod of super_pod_list"
            yield server.complain("server_id", "R25", "error", message, "list it in its super pod")


@rule(
    "R26",
    "the servers of one super pod stand together in server_list",
    severity="warning",
    chips=("a3",),
    sources=(citations.A3_PAGE,),
)
def check_pods_together(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A server that comes back to a pod after another one is reported."""
    pods = _pods_of_servers(survey)
    seen: set[int] = set()
    before: int | None = None
    for server in survey.servers:
        pod = pods.get(server.server_id or "")
        if pod is None:
            continue
        if pod != before and pod in seen:
            message = "servers of another super pod stand between this one and the rest of its own"
            remedy = "order server_list by super pod"
            yield server.complain("server_id", "R26", "warning", message, remedy)
        seen.add(pod)
        before = pod


@dataclass(frozen=True, slots=True)
class Sdid:
    """A super device id by its parts; 22-31 server, 18-21 chip, 16-17 die, 0-15 device, with device = 2 chip + die."""

    server: int
    chip: int
    die: int
    device: int


def parse_sdid(number: int) -> Sdid | None:
    """Return the parts of a super device id, None for a number that is not laid out like one.

    Numbers below 65536 are counts, as samples of the documentation have them, not ids of this layout: only device 0 of
    chip 0 of server 0 would be one.

    >>> parse_sdid(102563855)
    Sdid(server=24, chip=7, die=1, device=15)
    """
    parts = Sdid(number >> 22, number >> 18 & 0xF, number >> 16 & 0x3, number & 0xFFFF)
    is_in_range = parts.server <= _MAX_SERVER and parts.chip <= _MAX_CHIP and parts.die <= _MAX_DIE
    is_laid_out = number >> 16 > 0 and is_in_range and parts.device == 2 * parts.chip + parts.die
    return parts if is_laid_out else None


@rule("P3", "super_device_id agrees with device_id and its server", severity="warning", chips=("a3",))
def check_sdids(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A warning, since HCCL does not take the number apart; numbers of another layout are left alone."""
    for server in survey.servers:
        parts = [(device, found) for device in server.devices if (found := _sdid_of(device)) is not None]
        for device, found in parts:
            if device.device_id is not None and device.device_id != found.device:
                message = f"as an SDID it is the number of device {found.device}, not of device {device.device_id}"
                yield device.complain(_KEY, "P3", "warning", message, _FIND_IT)
        yield from _check_server_index(server, sorted({found.server for _, found in parts}))


def _check_server_index(server: ServerEntry, indexes: list[int]) -> Iterator[Problem]:
    if len(indexes) > 1:
        shown = ", ".join(map(str, indexes[:4])) + (", ..." if len(indexes) > 4 else "")
        message = f"as SDIDs the super_device_ids of this server belong to servers {shown}"
        remedy = "check that the devices are those of one server"
        yield Problem(join_key(server.path, "device"), "P3", "warning", message, remedy)


def _sdid_of(device: DeviceEntry) -> Sdid | None:
    number = parse_number(device.text(_KEY))
    return None if number is None or number > _HIGHEST else parse_sdid(number)
