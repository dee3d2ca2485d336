"""This host: its name, addresses, device nodes and hccn.conf below a root folder, and what its tools answer.

Source: the device nodes of the Ascend (`/dev/davinciN`) and NVIDIA (`/dev/nvidiaN`) drivers; the network configuration
pages of the Ascend driver (`address_N=` lines among others, in any order, with gaps in the ids); the hccn_tool and
npu-smi pages: `ipaddr:A` lines; `SDID : N` and `Super Pod ID : N` lines, or a sentence that the device does not support
the question. An A3 card has two dies: device id 2 CARD + CHIP.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

import psutil

from ranktable.errors import BuildError, HostListError
from ranktable.files import read_bytes
from ranktable.generate import HostInventory
from ranktable.model import Device
from ranktable.record import Record
from ranktable.values import MAX_INTEGER, Address, count_noun, name_placeholder, parse_address, parse_number

TIME_LIMIT_S = 10.0
_IP = re.compile(r"(?:vnic[ \t]+)?ip(?:v6)?[ \t]*_?addr(?:ess)?[ \t]*[:=][ \t]*([^\s/]+)", re.IGNORECASE)
_SDID = re.compile(r"SDID[ \t]*:[ \t]*(\S+)", re.IGNORECASE)
_POD = re.compile(r"Super[ \t]*Pod[ \t]*ID[ \t]*:[ \t]*(\S+)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:ipv6)?address_([0-9]{1,4})", re.IGNORECASE)
_LINE = re.compile(r"([^=\s]+)\s*=\s*(.*)")
_DIES_PER_CARD = 2
_HOMES = {
    "hccn_tool": ("usr/local/Ascend/driver/tools/hccn_tool", "usr/bin/hccn_tool"),
    "npu-smi": ("usr/local/sbin/npu-smi", "usr/local/bin/npu-smi", "usr/local/Ascend/driver/tools/npu-smi"),
}
_NODES = {"ascend": re.compile(r"davinci(\d{1,4})"), "gpu": re.compile(r"nvidia(\d{1,4})")}
NODE_NAMES = {"ascend": "/dev/davinciN", "gpu": "/dev/nvidiaN"}
_ANY_HOST = ("192.0.2.1", 9)
"""Of the block for documentation: which way packets to it would leave by, is asked, and nothing is sent."""


class Said(NamedTuple):
    """A value and where it stands."""

    value: str
    source: str
    line: int | None = None

    @property
    def origin(self) -> str:
        """`FILE:LINE`, or the name of what was asked."""
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def refuse(self, message: str, remedy: str) -> HostListError:
        """Return the error that this value cannot be taken."""
        return HostListError(message, remedy, self.origin)


class HostAnswers(Record, frozen=False):
    """What sources say about the devices of one host."""

    addresses: dict[int, Said] = field(default_factory=dict)
    super_device_ids: dict[int, Said] = field(default_factory=dict)
    super_pod_id: Said | None = None
    failed: dict[int, Said] = field(default_factory=dict)
    """Devices whose address was asked for and not given; the value is what the tool said instead."""

    def add_address(self, device_id: int, said: Said) -> None:
        """Add the address of a device; raises HostListError for what is none, or another one than is known."""
        address = parse_address(said.value)
        what = name_placeholder(said.value) or ("not an IPv4 or IPv6 address" if address is None else None)
        if what:
            message = f"the address {said.value!r} of device {device_id} is {what}"
            raise said.refuse(message, f"set one with hccn_tool -i {device_id} -ip -s address A netmask M")
        _agree(self.addresses.setdefault(device_id, said), said, f"device_ip of device {device_id}")

    def add_super_pod(self, device_id: int, answer: Said) -> None:
        """Add what npu-smi answers about a device, if it is in a super pod; raises HostListError for odd answers."""
        number, pod = _SDID.search(answer.value), _POD.search(answer.value)
        if number is None and pod is None:
            return
        if number is None or pod is None:
            missing = "SDID" if number is None else "Super Pod ID"
            raise answer.refuse(f"the answer for device {device_id} has no {missing}", "capture it once more")
        if parse_number(number[1]) is None or int(number[1]) > MAX_INTEGER:
            raise answer.refuse(f"SDID {number[1]!r} is no decimal number of 32 bits", "capture it once more")
        self.super_device_ids[device_id] = Said(number[1], answer.source)
        its_pod = Said(pod[1], answer.source)
        self.super_pod_id = self.super_pod_id or its_pod
        _agree(self.super_pod_id, its_pod, "super pod id")


def _agree(first: Said, second: Said, what: str) -> None:
    if (parse_address(first.value) or first.value) != (parse_address(second.value) or second.value):
        message = f"the {what} is {second.value} here, but {first.value} at {first.origin}"
        raise second.refuse(message, "one of the two is stale: correct it, the device itself (hccn_tool) is right")


def read_hccn_conf(root: Path) -> HostAnswers | None:
    """Return the addresses in etc/hccn.conf below a folder, None where it is not; raises ReadError, HostListError."""
    conf = root / "etc/hccn.conf"
    return parse_hccn_conf(read_bytes(str(conf)), str(conf)) if conf.is_file() else None


def parse_hccn_conf(data: bytes, source: str) -> HostAnswers:
    """Return the addresses in hccn.conf, IPv6 where a device has no other; raises HostListError for odd lines."""
    by_version = {6: HostAnswers(), 4: HostAnswers()}
    for number, text in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        line = text.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        if line and match is None:
            raise HostListError(
                f"{line[:60]!r} is not key=value", "give a copy of /etc/hccn.conf", f"{source}:{number}"
            )
        key = _ADDRESS.fullmatch(match[1]) if match else None
        if match is not None and key is not None:
            said = Said(match[2].strip().partition("/")[0], source, number)
            by_version[6 if ":" in said.value else 4].add_address(int(key[1]), said)
    found = HostAnswers(by_version[6].addresses | by_version[4].addresses)
    if not found.addresses:
        raise HostListError("it has no address_N line", "give a copy of /etc/hccn.conf, or of hccn_tool", source)
    return found


class LocalHost(NamedTuple):
    """Name and addresses of a host."""

    name: str
    addresses: tuple[Address, ...]
    """Every address of its ports, without loopback and link-local ones."""
    main_address: Address | None = None
    """The address of the port of the default route, or the only one; None when it cannot be told."""


def read_local_host() -> LocalHost:
    """Return name and addresses of this host."""
    texts = [entry.address.partition("%")[0] for port in psutil.net_if_addrs().values() for entry in port]
    found = [address for text in dict.fromkeys(texts) if (address := parse_address(text)) is not None]
    addresses = tuple(address for address in found if not address.is_loopback and not address.is_link_local)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANY_HOST)
            main = parse_address(probe.getsockname()[0])
        except OSError:
            main = None
    is_own = main in addresses
    return LocalHost(socket.gethostname(), addresses, main if is_own else addresses[0] if len(addresses) == 1 else None)


def find_device_ids(target: str, root: Path = Path("/")) -> list[int]:
    """Return the numbers of the device nodes of a target ("ascend", "gpu"); cpu has none."""
    try:
        names = [path.name for path in (root / "dev").iterdir()] if target in _NODES else []
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NODES[target].fullmatch(name)))


def ask_addresses(device_ids: Iterable[int], root: Path) -> HostAnswers | None:
    """Return what hccn_tool says of the devices' addresses, None without it; raises HostListError for odd answers."""
    tool = find_tool("hccn_tool", root)
    if tool is None:
        return None
    found = HostAnswers()
    for device_id in device_ids:
        for question in ("-ip -g", "-ip -inet6 -g"):
            answer = _ask(tool, f"hccn_tool -i {device_id} {question}")
            match = _IP.search(answer.value)
            if match:
                found.add_address(device_id, Said(match[1], answer.source))
                break
            words = next((line.strip() for line in answer.value.splitlines() if line.strip()), "")
            found.failed.setdefault(device_id, Said(words[:120], answer.source))
    return found


def ask_super_pod(device_ids: Iterable[int], root: Path, found: HostAnswers | None = None) -> HostAnswers | None:
    """Add SDIDs and super pod of the devices as npu-smi says; None without the tool. Raises HostListError."""
    tool = find_tool("npu-smi", root)
    if tool is None:
        return None
    found = found or HostAnswers()
    for device_id in device_ids:
        card, chip = divmod(device_id, _DIES_PER_CARD)
        found.add_super_pod(device_id, _ask(tool, f"npu-smi info -t spod-info -i {card} -c {chip}"))
    return found


def find_tool(name: str, root: Path) -> str | None:
    """Return the path of a tool: on PATH, else where the driver below `root` has it."""
    homes = (str(root / home) for home in _HOMES[name])
    return shutil.which(name) or next(filter(shutil.which, homes), None)


def _ask(tool: str, question: str) -> Said:
    """Return what the tool prints, errors too, whatever its exit status."""
    try:
        process = subprocess.Popen(
            [tool, *question.split()[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended with all that it started
        )
    except OSError as error:
        message = f"{tool} cannot be started: {(error.strerror or str(error)).lower()}"
        raise HostListError(message, "check the installation of the driver", question) from error
    with process:
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            message = f"there is no answer within {TIME_LIMIT_S:g} s"
            raise HostListError(message, "look at the device with npu-smi info", question) from error
    return Said(output.decode("utf-8", "replace"), question)


def probe_host(
    root: Path = Path("/"),
    device_target: str | None = None,
    device_ids: Sequence[int] | None = None,
    *,
    server_id: str | None = None,
    asks_super_pod: bool = False,
) -> tuple[HostInventory, str, tuple[str, ...]]:
    """Return this host with its devices, or those of `device_ids`; for which target, and what is worth a word.

    `root` is the folder that holds the host's /dev and /etc; `server_id` is used in place of the host's main address.
    Raises BuildError for a target or a device that is not there, HostListError for answers that cannot be taken.
    """
    present = [target for target in NODE_NAMES if find_device_ids(target, root)]
    if device_target is None and len(present) > 1:
        raise BuildError("this host has Ascend devices and GPUs", "choose with --device_target")
    target = device_target or (present[0] if present else "cpu")
    chosen = _choose_devices(target, device_ids, root)
    devices, pod_id, notes = tuple(map(Device, chosen)), None, tuple[str, ...]()
    if target == "ascend":
        devices, pod_id, notes = _ask_devices(chosen, root, asks_super_pod)
    local = read_local_host()
    address = None if local.main_address is None else str(local.main_address)
    name = server_id or address or local.name
    if server_id is None and len(local.addresses) > 1:
        notes += (f"server_id is {name}, one of {len(local.addresses)} addresses; choose with --server_id",)
    elif server_id is None and address is None:
        notes += (f"server_id is the name {name}: this host has no address but loopback",)
    host = HostInventory(name, devices, address, super_pod_id=pod_id)
    return host, target, (f"asked this host: {target}, {count_noun(len(devices), 'device')}", *notes)


def _choose_devices(target: str, asked: Sequence[int] | None, root: Path) -> Sequence[int]:
    if target == "cpu":
        if asked is None:
            message = "this host has no accelerator, so the number of its processes is not known"
            raise BuildError(message, "give --devices 0-7 for 8 processes")
        return asked
    present = find_device_ids(target, root)
    if not present:
        message = f"there is no {NODE_NAMES[target]} below {root}"
        raise BuildError(message, "mount the devices into the container, or choose another --device_target")
    missing = [device_id for device_id in asked or () if device_id not in present]
    if missing:
        message = f"device {missing[0]} is not on this host, which has {', '.join(map(str, present))}"
        raise BuildError(message, "give physical device ids")
    return present if asked is None else asked


def _ask_devices(
    device_ids: Sequence[int], root: Path, asks_super_pod: bool
) -> tuple[tuple[Device, ...], str | None, tuple[str, ...]]:
    """Ask hccn_tool and read hccn.conf, which must agree; npu-smi only when super pods are wanted."""
    found, conf = ask_addresses(device_ids, root) or HostAnswers(), read_hccn_conf(root) or HostAnswers()
    for device_id, said in conf.addresses.items():
        if device_id in device_ids:  # in a container hccn.conf lists all of the host's
            found.add_address(device_id, said)
    if asks_super_pod:
        ask_super_pod(device_ids, root, found)
    notes: tuple[str, ...] = ()
    missing = next((device_id for device_id in device_ids if device_id not in found.addresses), None)
    failure = None if missing is None else found.failed.get(missing)
    if not found.addresses:
        why = f"hccn_tool says {failure.value!r}" if failure else "neither hccn_tool nor /etc/hccn.conf is there"
        notes = (f"no device_ip is known: {why}",)
    elif failure is not None:
        message = f"device {missing} has no address: the answer is {failure.value!r}"
        raise failure.refuse(message, "set its address with hccn_tool, or leave the device out with --devices")
    elif missing is not None:
        message = f"it has no address for device {missing}, but for {len(found.addresses)} others"
        raise HostListError(message, "complete it, or choose --devices", str(root / "etc/hccn.conf"))
    pairs = [(number, found.addresses.get(number), found.super_device_ids.get(number)) for number in device_ids]
    devices = tuple(Device(n, -1, ip.value if ip else None, sdid.value if sdid else None) for n, ip, sdid in pairs)
    return devices, found.super_pod_id.value if found.super_pod_id else None, notes
