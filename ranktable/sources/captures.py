"""What hosts said about their devices, in files: copies of /etc/hccn.conf and captured answers of their tools.

A folder holds for the host HOST `HOST.conf` (a copy of /etc/hccn.conf) or `HOST.txt` or `HOST.log` (captured answers),
or a folder `HOST` with `hccn.conf` and any `*.txt` and `*.log`. What several files say about one device must agree.

In a captured text each command stands before its answer, as
`bash -xc 'for i in 0 1 2 3 4 5 6 7; do hccn_tool -i $i -ip -g; done' > HOST.txt 2>&1` leaves it, or a script that
echoes its commands, or a terminal. Taken are `hccn_tool -i N -ip -g`, with `-inet6`, `-vnic` (A3), and
`npu-smi info -t spod-info -i C -c D` (device id 2C + D: an A3 card has two dies).

Source: the network configuration pages of the Ascend driver (`address_N`, `netmask_N`, `netdetect_N`, gateway and
`xsfp_reset` lines, as key=value, in any order, with gaps in the ids), the MindSpore tutorial that takes `device_ip`
from them, and the hccn_tool and npu-smi pages: `ipaddr:A` and `netmask:M` lines; `SDID : N` and `Super Pod ID : N`
lines, or a sentence that the device does not support the question.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ranktable.errors import ReadError, SourceError
from ranktable.files import read_bytes
from ranktable.sources.answer import HostAnswers, Said, add_answer, check_device_address, join_answers

_COMMAND = re.compile(r"hccn_tool\s+-i\s+(\d{1,4})\s+(-[\w-]+(?:\s+-[\w-]+)*)|npu-smi\s+info\s+(-t\s+spod-info\b.*)")
_CARD, _CHIP = re.compile(r"-i\s+(\d{1,4})"), re.compile(r"-c\s+(\d{1,2})")
_IP = re.compile(r"(?:vnic\s+)?ip(?:v6)?\s*_?addr(?:ess)?\s*[:=]\s*(\S.*)", re.IGNORECASE)
_SDID = re.compile(r"SDID\s*:\s*(\S+)", re.IGNORECASE)
_POD = re.compile(r"Super\s*Pod\s*ID\s*:\s*(\S+)", re.IGNORECASE)
_DIES_PER_CARD = 2

Lines = Sequence[tuple[int | None, str]]
"""The lines of an answer with their numbers; None for what a tool has just said."""
KINDS = ("-ip", "-ip -inet6", "-vnic")
"""The questions for an address; the first that a host answers for a device gives its device_ip."""
_ADDRESS = re.compile(r"(?:ipv6)?address_([0-9]{1,4})", re.IGNORECASE)
_LINE = re.compile(r"([^=\s]+)\s*=\s*(.*)")
_CONF = ".conf"
_CAPTURES = (".txt", ".log")


@dataclass(slots=True)
class _Section:
    """One command and the lines of its answer."""

    line: int
    device_id: int
    kind: str
    answer: list[tuple[int, str]] = field(default_factory=list)


def parse_transcript(data: bytes, source: str) -> HostAnswers:
    """Return what the captured answers say. Raises SourceError with the line for an answer that cannot be taken."""
    sections = list(_split_sections(data.decode("utf-8", "replace"), source))
    if not sections:
        message = "no captured hccn_tool or npu-smi command stands in it"
        raise SourceError(source, None, message, "capture with: bash -xc 'hccn_tool -i 0 -ip -g; ...' > FILE 2>&1")
    by_kind: dict[str, dict[int, Said]] = {kind: {} for kind in KINDS}
    failed: dict[int, Said] = {}
    for section in sections:
        if section.kind in by_kind:
            said, is_answer = read_address(section.answer, source, section.line)
            if is_answer:
                check_device_address(said, section.device_id)
                add_answer(
                    by_kind[section.kind],
                    section.device_id,
                    said,
                    "capture it once more, and keep the last answer only",
                )
            else:
                failed[section.device_id] = said
    addresses = {**by_kind["-vnic"], **by_kind["-ip -inet6"], **by_kind["-ip"]}
    asked = (section for section in sections if section.kind == "spod-info")
    pod, silent = join_super_pod(
        (section.device_id, _read_spod_lines(section.answer, section.device_id, source)) for section in asked
    )
    notes = [*_note_left_out(by_kind, addresses, source)]
    notes += [f"{source}: npu-smi tells no super pod for {len(silent)} devices"] if silent else []
    return HostAnswers(addresses, pod.super_device_ids, pod.super_pod_id, failed, (*notes, *pod.notes))


def read_address(answer: Lines, source: str, line: int | None) -> tuple[Said, bool]:
    """Return the address in the lines of an answer and True, or what it says instead and False."""
    for number, text in answer:
        match = _IP.search(text)
        if match:
            return Said(match.group(1).split()[0].partition("/")[0], source, number), True
    words = next(((number, text) for number, text in answer if text), (line, ""))
    return Said(words[1][:120], source, words[0]), False


def parse_spod_info(text: str, device_id: int, source: str) -> tuple[Said, Said] | None:
    """Return SDID and super pod id of an answer of npu-smi, None when the device is in no super pod.

    Raises SourceError for an SDID that is not of 32 bits, and for an answer that has one of the two only.
    """
    return _read_spod_lines([(None, line.strip()) for line in text.splitlines()], device_id, source)


def _split_sections(text: str, source: str) -> Iterator[_Section]:
    section: _Section | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        command = _COMMAND.search(line)
        if command is None:
            if section is not None and not line.startswith("+ "):  # the trace of bash -x
                section.answer.append((number, line))
            elif _IP.match(line):
                message = "an address stands before any hccn_tool command, so its device is not known"
                raise SourceError(source, number, message, "capture with bash -x, which prints the commands too")
            continue
        if section is not None:
            yield section
        section = _Section(number, *_name_question(command, source, number))
    if section is not None:
        yield section


def _name_question(command: re.Match[str], source: str, number: int) -> tuple[int, str]:
    if command.group(1) is not None:
        flags = command.group(2).split()
        kind = "-vnic" if "-vnic" in flags else "-ip" + (" -inet6" if "-inet6" in flags else "")
        is_question = "-g" in flags and ("-vnic" in flags or "-ip" in flags)
        return int(command.group(1)), kind if is_question else "another"
    card, chip = _CARD.search(command.group(3)), _CHIP.search(command.group(3))
    if card is None or chip is None:
        message = "npu-smi info -t spod-info is asked without -i CARD and -c CHIP"
        raise SourceError(source, number, message, "ask each chip: npu-smi info -t spod-info -i 0 -c 0")
    return int(card.group(1)) * _DIES_PER_CARD + int(chip.group(1)), "spod-info"


def _note_left_out(by_kind: dict[str, dict[int, Said]], taken: dict[int, Said], source: str) -> Iterator[str]:
    for kind in KINDS[1:]:
        count = sum(taken[device_id] is not said for device_id, said in by_kind[kind].items())
        if count:
            yield f"{source}: {count} answers to hccn_tool {kind} are left out beside those to a plainer question"


def join_super_pod(answers: Iterable[tuple[int, tuple[Said, Said] | None]]) -> tuple[HostAnswers, list[int]]:
    """Return what npu-smi says of the devices of one host, and the devices of which it tells no super pod.

    Raises SourceError when two devices are in two super pods.
    """
    numbers: dict[int, Said] = {}
    pod: Said | None = None
    silent: list[int] = []
    strange: tuple[str, ...] = ()
    for device_id, found in answers:
        if found is None:
            silent.append(device_id)
            continue
        numbers[device_id], said = found
        strange += _describe_strange_number(numbers[device_id], device_id)
        pod = pod or said
        if pod.value != said.value:
            message = f"super pod id {said.value} here, but {pod.value} at {pod.origin}"
            raise said.refuse(message, "one host is in one super pod: look at the driver, and ask once more")
    return HostAnswers({}, numbers, pod, notes=strange), silent


def _describe_strange_number(said: Said, device_id: int) -> tuple[str, ...]:
    """Return a warning when the low 16 bits of an SDID, the device id, are not those of the device that has it.

    A warning only: HCCL does not take the number apart. Source: the DCMI pages of the Ascend driver.
    """
    inside = int(said.value) & 0xFFFF
    if inside == device_id:
        return ()
    return (f"warning: {said.origin}: SDID {said.value} is that of device {inside}, not of device {device_id}",)


def _read_spod_lines(lines: Lines, device_id: int, source: str) -> tuple[Said, Said] | None:
    number = next((Said(match.group(1), source, at) for at, line in lines if (match := _SDID.search(line))), None)
    pod = next((Said(match.group(1), source, at) for at, line in lines if (match := _POD.search(line))), None)
    if number is None and pod is None:
        return None
    if number is None or pod is None:
        line = next((at for at, _ in lines), None)
        missing = "SDID" if number is None else "Super Pod ID"
        raise SourceError(source, line, f"the answer for device {device_id} has no {missing}", "capture it once more")
    if not re.fullmatch(r"[0-9]{1,10}", number.value) or int(number.value) >= 2**32:
        raise number.refuse(f"SDID {number.value!r} is no decimal number of 32 bits", "capture it once more")
    return number, pod


def parse_hccn_conf(data: bytes, source: str) -> HostAnswers:
    """Return the addresses in a copy of hccn.conf; an IPv6 address counts where a device has no other.

    Raises SourceError with the line for an address that is none, for a device with two, and for a file without any.
    """
    first: dict[int, Said] = {}
    second: dict[int, Said] = {}
    for number, text in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        line = text.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        if line and match is None:
            raise SourceError(source, number, f"{line[:60]!r} is not key=value", "give a copy of /etc/hccn.conf")
        key = _ADDRESS.fullmatch(match.group(1)) if match else None
        if match is None or key is None:
            continue
        said, device_id = Said(match.group(2).strip().partition("/")[0], source, number), int(key.group(1))
        is_ipv6 = check_device_address(said, device_id).version == 6
        add_answer(second if is_ipv6 else first, device_id, said, "remove the stale line")
    if not first and not second:
        raise SourceError(source, None, "it has no address_N line", "give a copy of /etc/hccn.conf, or of hccn_tool")
    left_out = sum(device_id in first for device_id in second)
    notes = (f"{source}: the IPv6 addresses of {left_out} devices are left out beside IPv4 ones",) if left_out else ()
    return HostAnswers({**second, **first}, notes=notes)


def find_host_files(folder: str | os.PathLike[str]) -> dict[str, list[Path]]:
    """Return the files of each host of the folder, by server id in the order of the ids.

    Raises ReadError for a folder that cannot be read, SourceError for one without any such file.
    """
    top = Path(folder)
    found: dict[str, list[Path]] = {}
    for path in _list(top):
        if path.is_dir():
            inner = [file for file in _list(path) if file.name == "hccn.conf" or file.suffix in _CAPTURES]
            if inner:
                found.setdefault(path.name, []).extend(inner)
        elif path.suffix in (_CONF, *_CAPTURES):
            found.setdefault(path.name.removesuffix(path.suffix), []).append(path)
    if not found:
        message = "no HOST.conf, HOST.txt, HOST.log or HOST/hccn.conf is in the folder"
        raise SourceError(str(top), None, message, "copy /etc/hccn.conf of each host to FOLDER/HOST.conf")
    return found


def read_host_answers(paths: Iterable[Path]) -> HostAnswers:
    """Return what the files of one host say together; raises ReadError, SourceError with both places."""
    return join_answers(read_answers(path) for path in paths)


def read_answers(path: Path) -> HostAnswers:
    """Return what one file says: a copy of hccn.conf by its suffix `.conf`, captured answers otherwise."""
    parse = parse_hccn_conf if path.suffix == _CONF else parse_transcript
    return parse(read_bytes(str(path)), str(path))


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "name a folder with one HOST.conf for each host"
        raise ReadError(str(folder), reason.lower(), remedy) from error
