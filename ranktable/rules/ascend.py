"""Rules R17 to R21, R24 to R26, P1 and P2: what single chips ask for, and who reads which kind of table.

Those of the 910A are left out when a device number shows that it is another chip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ranktable.kinds import all_dialects, dialect_of, find_repeats
from ranktable.model import Device, RankTable
from ranktable.problem import Problem, Severity, join_key
from ranktable.profile import Profile
from ranktable.rules import Rule, chip_of, citations, register, severity_on
from ranktable.rules.identity import MAX_DEVICE_ID, about_devices, check_cover
from ranktable.values import count_noun, name_placeholder

_QUADS_910A = {"0123", "4567", "0145", "0246", "0347", "1256", "1357", "2367"}
"""Four devices that form a ring."""
_MAX_DEVICES = {"910a": 8, "a2": 16, "a3": 16}
_NAMES = {"hccl": "HCCL", "mindspore": "MindSpore"}
_CONCISE = (citations.CONCISE,)
_910A = ("910a",)
_SDID = "super_device_id"
_HIGHEST_SDID = 2**32 - 1
_MAX_POD_ID_LENGTH = 127
_FIND_IT = "write the SDID of the device: npu-smi info -t spod-info -i CARD -c CHIP"


def _severity_910a(table: RankTable, profile: Profile) -> Severity | None:
    severity = severity_on(table, profile, "910a")
    if severity is None or profile.chip is not None:
        return severity
    is_larger = any(device.device_id > MAX_DEVICE_ID["910a"] for device in table.devices)
    return None if is_larger else severity


@Rule("R17", "a 910A server has 1, 2, 4 or 8 devices, and 8 when it is not alone", chips=_910A, sources=_CONCISE)
def check_910a(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """R17 to R20. More than eight devices are left to R21; of R20 the servers that differ from the most are named."""
    severity = _severity_910a(table, profile)
    if severity is None:
        return
    counts = Counter(len(server.devices) for server in table.servers)
    usual = max(counts, key=lambda count: (counts[count], count), default=None)
    is_alone = len(table.servers) < 2
    allowed = (1, 2, 4) if is_alone else ()
    wanted = "1, 2, 4 or 8 devices" if is_alone else "8 devices on each of several servers"
    for server in table.servers:
        count, ids = len(server.devices), {device.device_id for device in server.devices} - {-1}
        shown = ", ".join(map(str, sorted(ids)))
        if 0 < count < 8 and count not in allowed:
            message = f"the server has {count_noun(count, 'device')}; a 910A takes {wanted}"
            yield about_devices(server, "R17", severity, message, "list a number of devices that the chip takes")
        if count == len(ids) == 2 and len({number // 4 for number in ids}) == 2:
            message = f"devices {shown} are on two networks of a 910A"
            yield about_devices(server, "R18", "warning", message, "take two devices of 0-3 or two of 4-7")
        if count == len(ids) == 4 and shown.replace(", ", "") not in _QUADS_910A:
            message = f"devices {shown} form no ring on a 910A"
            yield about_devices(server, "R19", severity, message, "take devices 0-3 or devices 4-7")
        if count != usual:
            message = f"the server has {count} devices, the others have {usual}"
            yield about_devices(server, "R20", severity, message, f"list {usual} devices on every server")


register(Rule("R18", "two devices of a 910A server are both of 0-3 or both of 4-7", severity="warning", chips=_910A))
register(Rule("R19", "four devices of a 910A server are one of eight sets", chips=_910A, sources=_CONCISE))
register(Rule("R20", "every 910A server has the same number of devices", chips=_910A, sources=_CONCISE))


@Rule(
    "R21",
    "a server has no more devices than its chip allows",
    severity="error or warning",
    chips=("910a", "a2", "a3"),
    sources=_CONCISE,
)
def check_device_limit(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """8 on a 910A, 16 on A3, 16 on A2, where more than 8 are rare; R8 bounds the 300I Duo by its device numbers."""
    chip = chip_of(table, profile)
    if not profile.is_ascend or chip in ("300i-duo", "a5"):
        return
    limit = _MAX_DEVICES[chip or "a3"]
    usual = 8 if chip == "a2" else limit
    for server in table.servers:
        count = len(server.devices)
        if count > usual:
            severity: Severity = "error" if chip and count > limit else "warning"
            at_most = limit if count > limit else usual
            message = f"the server has {count} devices, at most {at_most} are usual on one server"
            yield about_devices(server, "R21", severity, message, "check that the server is not two")


@Rule(
    "R24",
    "super_device_id is a number of 32 bits that is unique in its super pod",
    chips=("a3",),
    sources=(citations.CONCISE, citations.VERIFY_PAGE),
)
def check_super_device_ids(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """Demanded of every device as soon as there is a super_pod_list; without one HCCL does not look at it."""
    pods, is_demanded = _pods_of_servers(table), table.has("super_pod_list")
    first_paths: dict[tuple[int, int], str] = {}
    for place, server in enumerate(table.servers):
        # A server that no pod has is a pod of its own here, so that R25 is its only fault.
        pod = pods.get(server.server_id, -1 - place)
        for device in server.devices:
            fault = _fault_of_number(device, pod, first_paths, is_demanded)
            if fault:
                yield device.complain(_SDID, "R24", fault, _FIND_IT)


def _fault_of_number(device: Device, pod: int, first_paths: dict[tuple[int, int], str], is_demanded: bool) -> str:
    text = device.text(_SDID)
    if text is None:
        is_missing = is_demanded and not device.has(_SDID)
        return "the key is missing; a table with super_pod_list needs it" if is_missing else ""
    number = device.number(_SDID)
    if number is None or number > _HIGHEST_SDID:
        what = "empty" if not text.strip() else name_placeholder(text)
        return f"the id is {what or 'no decimal number of 32 bits'}"
    path = join_key(device.path, _SDID)
    first = first_paths.setdefault((pod, number), path)
    return "" if first == path else f"the same super_device_id stands at {first}"


def _pods_of_servers(table: RankTable) -> dict[str, int]:
    """Return the place of each server's pod in the list; pods with one id are one pod."""
    places: dict[str, int] = {}
    pods: dict[str, int] = {}
    for place, pod in enumerate(table.super_pods):
        first = places.setdefault(pod.super_pod_id, place)
        for server_id in pod.server_ids:
            pods.setdefault(server_id, first)
    return pods


@Rule(
    "R25",
    "super_pod_list has unique pods that cover every server once, and no others",
    severity="error or warning",
    chips=("a3",),
    sources=(citations.CONCISE, citations.A3_PAGE),
)
def check_super_pod_list(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """Without the list HCCL takes the servers for ones without a super pod, which is odd when devices have numbers."""
    if not table.has("super_pod_list"):
        if any(device.has(_SDID) for device in table.devices):
            message = "the key is missing, so HCCL sees no super pods, though devices have a super_device_id"
            remedy = "list the super pods and their servers"
            yield table.complain("super_pod_list", "R25", message, remedy, "warning")
        return
    usable = []
    for pod in table.super_pods:
        pod_id = pod.text("super_pod_id")
        what = name_placeholder(pod_id or "")
        if what or (pod_id is not None and not 1 <= len(pod_id) <= _MAX_POD_ID_LENGTH):
            message = f"the id is {what or f'not of 1 to {_MAX_POD_ID_LENGTH} characters'}"
            yield pod.complain("super_pod_id", "R25", message, "write the number of the super pod")
        else:
            usable.append(pod)
    same, remedy = "the same super_pod_id stands at {}", "list the servers of one pod under one entry"
    yield from find_repeats(usable, "super_pod_id", "R25", same, remedy)
    members = [entry for pod in table.super_pods for entry in pod.entries("server_list")]
    yield from check_cover(members, table.servers, "server_id", "server_list", "R25", "super pod of super_pod_list")


@Rule(
    "R26",
    "the servers of one super pod stand together in server_list",
    severity="warning",
    chips=("a3",),
    sources=(citations.A3_PAGE,),
)
def check_pods_together(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """A server that comes back to a pod after another one is reported."""
    pods = _pods_of_servers(table)
    seen: set[int] = set()
    before: int | None = None
    for server in table.servers:
        pod = pods.get(server.server_id)
        if pod is None:
            continue
        if pod != before and pod in seen:
            message = "servers of another super pod stand between this one and the rest of its own"
            yield server.complain("server_id", "R26", message, "order server_list by super pod", "warning")
        seen.add(pod)
        before = pod


@Rule(
    "P1",
    "the reader reads tables of this kind",
    severity="error or warning",
    is_whole=True,
    sources=(citations.VERSIONS,),
)
def check_reader(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """Versions 1.3 and 1.4 have producers and no reader in HCCL: a warning as long as no reader is named."""
    version = dialect_of(table.dialect).refused_version
    if profile.reader is None and version and profile.is_ascend:
        message = f"HCCL refuses version {version} (EI0014)"
        remedy = "write the job's table as version 1.0 or 1.2 for HCCL"
        yield table.complain("version", "P1", message, remedy, "warning")
    elif profile.reader is not None and profile.reader not in dialect_of(table.dialect).readers:
        known = sorted(kind.name for kind in all_dialects() if profile.reader in kind.readers)
        message = f"{_NAMES[profile.reader]} does not read this kind of table"
        yield table.complain("version", "P1", message, f"give it one of the kinds {', '.join(known)}")


@Rule(
    "P2",
    "the chip reads tables of this version",
    severity="error or warning",
    is_whole=True,
    sources=(citations.VERSIONS, citations.OPERATOR),
)
def check_chip(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """A5 reads version 2.0 only. Versions 1.0 and 1.2 have one parser, so super pods on another chip are a warning."""
    kind = dialect_of(table.dialect)
    if profile.chip is None:
        return
    if (profile.chip == "a5") != kind.is_for_a5:
        reads = "version 2.0 only" if profile.chip == "a5" else "versions 1.0 and 1.2, not 2.0"
        remedy = "generate the table on its host" if profile.chip == "a5" else "name the chip a5, or use version 1.0"
        yield table.complain("version", "P2", f"chip {profile.chip} reads {reads} (EI0014)", remedy)
    elif kind.is_for_a3 and profile.chip != "a3":
        message = f"super pods belong to chip a3, the table is checked for {profile.chip}"
        yield table.complain("version", "P2", message, 'write "version": "1.0", or name the chip a3', "warning")
