"""What hosts said about their devices: copies of /etc/hccn.conf, and answers of their tools, captured or just given.

A folder holds for the host HOST `HOST.conf` (a copy of /etc/hccn.conf) or `HOST.txt` or `HOST.log` (captured answers),
or a folder `HOST` with `hccn.conf` and any `*.txt` and `*.log`. What several files say about one device must agree.

In a captured text each command stands before its answer, as
`bash -xc 'for i in 0 1 2 3 4 5 6 7; do hccn_tool -i $i -ip -g; done' > HOST.txt 2>&1` leaves it, or a script that
echoes its commands, or a terminal. Taken are `hccn_tool -i N -ip -g`, with `-inet6`, `-vnic` (A3), and
`npu-smi info -t spod-info -i C -c D` (device id 2C + D: an A3 card has two dies).

Source: the network configuration pages of the Ascend driver (`address_N=` lines among others, in any order, with gaps
in the ids), the MindSpore tutorial that takes `device_ip` from them, and the hccn_tool and npu-smi pages: `ipaddr:A`
lines; `SDID : N` and `Super Pod ID : N` lines, or a sentence that the device does not support the question.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ranktable.errors import ReadError, SourceError
from ranktable.files import read_bytes
from ranktable.model import Device
from ranktable.values import name_placeholder, parse_address

KINDS = ("-ip", "-ip -inet6", "-vnic")
"""The questions for an address; the first that a host answers for a device gives its device_ip."""
DIES_PER_CARD = 2
_COMMAND = re.compile(r"hccn_tool\s+-i\s+(\d{1,4})\s+(-[\w-]+(?:\s+-[\w-]+)*)|npu-smi\s+info\s+(-t\s+spod-info\b.*)")
_CARD, _CHIP = re.compile(r"-i\s+(\d{1,4})"), re.compile(r"-c\s+(\d{1,2})")
_IP = re.compile(r"(?:vnic\s+)?ip(?:v6)?\s*_?addr(?:ess)?\s*[:=]\s*(\S.*)", re.IGNORECASE)
_SDID = re.compile(r"SDID\s*:\s*(\S+)", re.IGNORECASE)
_POD = re.compile(r"Super\s*Pod\s*ID\s*:\s*(\S+)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:ipv6)?address_([0-9]{1,4})", re.IGNORECASE)
_LINE = re.compile(r"([^=\s]+)\s*=\s*(.*)")
_CAPTURES = (".txt", ".log")


@dataclass(frozen=True, slots=True)
class Said:
    """A value and where it stands."""

    value: str
    source: str
    line: int | None = None

    @property
    def origin(self) -> str:
        """`FILE:LINE`, or the name of what was asked."""
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def refuse(self, message: str, remedy: str) -> SourceError:
        """Return the error that this value cannot be taken."""
        return SourceError(self.source, self.line, message, remedy)


@dataclass(slots=True)
class HostAnswers:
    """What one source, or several together, say about the devices of one host."""

    addresses: dict[int, Said] = field(default_factory=dict)
    """`device_ip` by device id."""
    super_device_ids: dict[int, Said] = field(default_factory=dict)
    super_pod_id: Said | None = None
    failed: dict[int, Said] = field(default_factory=dict)
    """Devices whose address was asked for and not given; the value is what the tool said instead."""

    def add_address(self, device_id: int, said: Said) -> None:
        """Add the address of a device; raises SourceError for what is none, or another one than is known."""
        address = parse_address(said.value)
        what = name_placeholder(said.value) or ("not an IPv4 or IPv6 address" if address is None else None)
        if what:
            message = f"the address {said.value!r} of device {device_id} is {what}"
            raise said.refuse(message, f"set one with hccn_tool -i {device_id} -ip -s address A netmask M")
        _agree(self.addresses.setdefault(device_id, said), said, f"device_ip of device {device_id}")

    def add_super_pod(self, device_id: int, lines: Iterable[Said]) -> None:
        """Add what npu-smi says in the lines of an answer about a device, if it says that it is in a super pod.

        Raises SourceError for an SDID that is not of 32 bits, for an answer that has one of the two only, and when two
        devices are in two super pods.
        """
        found: list[Said | None] = [None, None]
        for line in lines:
            for place, pattern in enumerate((_SDID, _POD)):
                match = pattern.search(line.value)
                if match and found[place] is None:
                    found[place] = Said(match.group(1), line.source, line.line)
        number, pod = found
        if number is None or pod is None:
            if number or pod:
                missing = "SDID" if number is None else "Super Pod ID"
                message = f"the answer for device {device_id} has no {missing}"
                raise (number or pod).refuse(message, "capture it once more")  # type: ignore[union-attr]
            return
        if not re.fullmatch(r"[0-9]{1,10}", number.value) or int(number.value) >= 2**32:
            raise number.refuse(f"SDID {number.value!r} is no decimal number of 32 bits", "capture it once more")
        _agree(self.super_device_ids.setdefault(device_id, number), number, f"super_device_id of device {device_id}")
        self.super_pod_id = self.super_pod_id or pod
        _agree(self.super_pod_id, pod, "super pod id")

    def add(self, other: HostAnswers) -> None:
        """Add what another source says; raises SourceError with both places when they disagree."""
        for device_id, said in other.addresses.items():
            self.add_address(device_id, said)
        for device_id, said in other.super_device_ids.items():
            _agree(self.super_device_ids.setdefault(device_id, said), said, f"super_device_id of device {device_id}")
        if other.super_pod_id is not None:
            self.super_pod_id = self.super_pod_id or other.super_pod_id
            _agree(self.super_pod_id, other.super_pod_id, "super pod id")
        self.failed.update(other.failed)

    def devices(self, device_ids: Iterable[int] | None, server_id: str) -> tuple[Device, ...]:
        """Return the devices that the answers speak of, or those of `device_ids`.

        A device whose address a tool failed to give is an error that quotes the tool, never a device without address.
        Raises SourceError.
        """
        known = sorted({*self.addresses, *self.super_device_ids, *self.failed})
        chosen = known if device_ids is None else list(device_ids)
        for device_id in chosen:
            failure = self.failed.get(device_id)
            if failure is not None and device_id not in self.addresses:
                message = f"device {device_id} of {server_id!r} has no address: the answer is {failure.value!r}"
                raise failure.refuse(message, "set its address with hccn_tool, or leave the device out with --devices")
        return tuple(
            Device(number, -1, _value(self.addresses, number), _value(self.super_device_ids, number))
            for number in chosen
        )


def _value(said: Mapping[int, Said], device_id: int) -> str | None:
    found = said.get(device_id)
    return None if found is None else found.value


def _agree(first: Said, second: Said, what: str) -> None:
    if (parse_address(first.value) or first.value) != (parse_address(second.value) or second.value):
        message = f"the {what} is {second.value} here, but {first.value} at {first.origin}"
        raise second.refuse(message, "one of the two is stale: correct it, the device itself (hccn_tool) is right")


def parse_transcript(data: bytes, source: str) -> HostAnswers:
    """Return what the captured answers say. Raises SourceError with the line for an answer that cannot be taken."""
    by_kind = {kind: HostAnswers() for kind in KINDS}
    found = HostAnswers()
    answers = list(_split_answers(data.decode("utf-8", "replace"), source))
    for device_id, kind, answer in answers:
        if kind == "spod-info":
            found.add_super_pod(device_id, answer)
        elif kind in by_kind:
            said, is_answer = read_address(answer)
            if is_answer:
                by_kind[kind].add_address(device_id, said)
            else:
                found.failed[device_id] = said
    if not answers:
        message = "no captured hccn_tool or npu-smi command stands in it"
        raise SourceError(source, None, message, "capture with: bash -xc 'hccn_tool -i 0 -ip -g; ...' > FILE 2>&1")
    for kind in reversed(KINDS):
        found.addresses |= by_kind[kind].addresses
    return found


def read_address(answer: list[Said]) -> tuple[Said, bool]:
    """Return the address in the lines of an answer and True, or what it says instead and False.

    The first of the lines is the question.
    """
    question, *lines = answer
    for line in lines:
        match = _IP.search(line.value)
        if match:
            return Said(match.group(1).split()[0].partition("/")[0], line.source, line.line), True
    words = next((line for line in lines if line.value), Said("", question.source, question.line))
    return Said(words.value[:120], words.source, words.line), False


def _split_answers(text: str, source: str) -> Iterator[tuple[int, str, list[Said]]]:
    """Yield each command as its device and the kind of its question, with its line and the lines of its answer."""
    current: tuple[int, str, list[Said]] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        said = Said(raw.strip(), source, number)
        command = _COMMAND.search(said.value)
        if command is not None:
            if current is not None:
                yield current
            current = (*_name_question(command, said), [said])
        elif current is not None and not said.value.startswith("+ "):  # the trace of bash -x
            current[2].append(said)
        elif current is None and _IP.match(said.value):
            message = "an address stands before any hccn_tool command, so its device is not known"
            raise said.refuse(message, "capture with bash -x, which prints the commands too")
    if current is not None:
        yield current


def _name_question(command: re.Match[str], said: Said) -> tuple[int, str]:
    if command.group(1) is not None:
        flags = command.group(2).split()
        kind = "-vnic" if "-vnic" in flags else "-ip" + (" -inet6" if "-inet6" in flags else "")
        is_question = "-g" in flags and ("-vnic" in flags or "-ip" in flags)
        return int(command.group(1)), kind if is_question else "another"
    card, chip = _CARD.search(command.group(3)), _CHIP.search(command.group(3))
    if card is None or chip is None:
        message = "npu-smi info -t spod-info is asked without -i CARD and -c CHIP"
        raise said.refuse(message, "ask each chip: npu-smi info -t spod-info -i 0 -c 0")
    return int(card.group(1)) * DIES_PER_CARD + int(chip.group(1)), "spod-info"


def parse_hccn_conf(data: bytes, source: str) -> HostAnswers:
    """Return the addresses in a copy of hccn.conf; an IPv6 address counts where a device has no other.

    Raises SourceError with the line for an address that is none, for a device with two, and for a file without any.
    """
    by_version = {6: HostAnswers(), 4: HostAnswers()}
    for number, text in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        line = text.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        if line and match is None:
            raise SourceError(source, number, f"{line[:60]!r} is not key=value", "give a copy of /etc/hccn.conf")
        key = _ADDRESS.fullmatch(match.group(1)) if match else None
        if match is not None and key is not None:
            said = Said(match.group(2).strip().partition("/")[0], source, number)
            by_version[6 if ":" in said.value else 4].add_address(int(key.group(1)), said)
    found = HostAnswers(by_version[6].addresses | by_version[4].addresses)
    if not found.addresses:
        raise SourceError(source, None, "it has no address_N line", "give a copy of /etc/hccn.conf, or of hccn_tool")
    return found


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
        elif path.suffix in (".conf", *_CAPTURES):
            found.setdefault(path.name.removesuffix(path.suffix), []).append(path)
    if not found:
        message = "no HOST.conf, HOST.txt, HOST.log or HOST/hccn.conf is in the folder"
        raise SourceError(str(top), None, message, "copy /etc/hccn.conf of each host to FOLDER/HOST.conf")
    return found


def read_answers(*paths: Path) -> HostAnswers:
    """Return what files of one host say together: copies of hccn.conf by the suffix `.conf`, captured answers else.

    Raises ReadError, SourceError with both places where they disagree.
    """
    found = HostAnswers()
    for path in paths:
        parse = parse_hccn_conf if path.suffix == ".conf" else parse_transcript
        found.add(parse(read_bytes(str(path)), str(path)))
    return found


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "name a folder with one HOST.conf for each host"
        raise ReadError(str(folder), reason.lower(), remedy) from error
