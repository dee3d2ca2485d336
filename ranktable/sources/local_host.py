"""This host: its name, addresses, device nodes and hccn.conf, and what its tools answer. Nothing is guessed.

Device nodes and hccn.conf are read below a root folder, which is `/`, or where a container has mounted the root of its
host. On a host with GPUs or without accelerators there is no device address. The tools are asked with a time limit.

Source: the device nodes of the Ascend (`/dev/davinciN`) and NVIDIA (`/dev/nvidiaN`) drivers.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ranktable.errors import BuildError, SourceError
from ranktable.generate import HostInventory
from ranktable.model import Device
from ranktable.sources.captures import DIES_PER_CARD, HostAnswers, Said, read_address, read_answers
from ranktable.values import Address, count_noun, parse_address

TIME_LIMIT_S = 10.0
_HOMES = {
    "hccn_tool": ("usr/local/Ascend/driver/tools/hccn_tool", "usr/bin/hccn_tool"),
    "npu-smi": ("usr/local/sbin/npu-smi", "usr/local/bin/npu-smi", "usr/local/Ascend/driver/tools/npu-smi"),
}
_NODES = {"ascend": re.compile(r"davinci(\d{1,4})"), "gpu": re.compile(r"nvidia(\d{1,4})")}
NODE_NAMES = {"ascend": "/dev/davinciN", "gpu": "/dev/nvidiaN"}
_ANY_HOST = ("192.0.2.1", 9)
"""Of the block for documentation: which way packets to it would leave by, is asked, and nothing is sent."""


@dataclass(frozen=True, slots=True)
class LocalHost:
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
    return sorted(int(match.group(1)) for name in names if (match := _NODES[target].fullmatch(name)))


@dataclass(frozen=True, slots=True)
class DeviceTools:
    """Where to look for hccn_tool and npu-smi, and how long to wait for one answer."""

    root: Path = Path("/")
    search_path: str | None = None
    """Folders separated by colons; None means PATH. Then the places where the driver installs the tools."""
    time_limit_s: float = TIME_LIMIT_S

    def ask_addresses(self, device_ids: Iterable[int]) -> HostAnswers | None:
        """Return what hccn_tool says of each device's address, IPv4 or else IPv6; None without the tool.

        Raises SourceError when the tool cannot be run, gives no answer in time, or gives what is no address.
        """
        tool = self._find("hccn_tool")
        if tool is None:
            return None
        found = HostAnswers()
        for device_id in device_ids:
            for question in ("-ip -g", "-ip -inet6 -g"):
                said, is_answer = read_address(self._ask(tool, f"hccn_tool -i {device_id} {question}"))
                if is_answer:
                    found.add_address(device_id, said)
                    break
                found.failed.setdefault(device_id, said)
        return found

    def ask_super_pod(self, device_ids: Iterable[int]) -> HostAnswers | None:
        """Return SDIDs and super pod of the devices as npu-smi says; None without the tool. Raises SourceError."""
        tool = self._find("npu-smi")
        if tool is None:
            return None
        found = HostAnswers()
        for device_id in device_ids:
            card, chip = divmod(device_id, DIES_PER_CARD)
            found.add_super_pod(device_id, self._ask(tool, f"npu-smi info -t spod-info -i {card} -c {chip}"))
        return found

    def _find(self, name: str) -> str | None:
        found = shutil.which(name, path=self.search_path)
        homes = (str(self.root / home) for home in _HOMES[name])
        return found or next((home for home in homes if os.access(home, os.X_OK) and Path(home).is_file()), None)

    def _ask(self, tool: str, question: str) -> list[Said]:
        """Return a question and the lines that the tool prints, errors too, whatever its exit status."""
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
            raise SourceError(question, None, message, "check the installation of the driver") from error
        with process:
            try:
                output, _ = process.communicate(timeout=self.time_limit_s)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)
                message = f"there is no answer within {self.time_limit_s:g} s"
                raise SourceError(question, None, message, "look at the device with npu-smi info") from error
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        lines = output.decode("utf-8", "replace").splitlines()
        return [Said(question, question), *(Said(line.strip(), question) for line in lines)]


@dataclass(frozen=True, slots=True)
class Probed:
    """What this host has, for which target, and what is worth a word."""

    host: HostInventory
    device_target: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """How to ask this host."""

    root: Path = Path("/")
    """Folder that holds the host's /dev and /etc: another one in a container that has them mounted."""
    tools: DeviceTools | None = None
    """How to ask hccn_tool and npu-smi; None means on PATH, then where the driver below `root` has them."""
    server_id: str | None = None
    """The id to use in place of the host's main address."""
    asks_super_pod: bool = False

    def ask(self, device_target: str | None = None, device_ids: Sequence[int] | None = None) -> Probed:
        """Return the host with its devices, or those of `device_ids`.

        Raises BuildError for a target or a device that is not there, SourceError for answers that cannot be taken.
        """
        present = [target for target in NODE_NAMES if find_device_ids(target, self.root)]
        if device_target is None and len(present) > 1:
            raise BuildError("this host has Ascend devices and GPUs", "choose with --device_target")
        target = device_target or (present[0] if present else "cpu")
        chosen = self._choose_devices(target, device_ids)
        devices, pod_id, notes = tuple(map(Device, chosen)), None, tuple[str, ...]()
        if target == "ascend":
            devices, pod_id, notes = self._ask_devices(chosen)
        local = read_local_host()
        address = None if local.main_address is None else str(local.main_address)
        server_id = self.server_id or address or local.name
        if self.server_id is None and len(local.addresses) > 1:
            notes += (f"server_id is {server_id}, one of {len(local.addresses)} addresses; choose with --server_id",)
        elif self.server_id is None and address is None:
            notes += (f"server_id is the name {server_id}: this host has no address but loopback",)
        host = HostInventory(server_id, devices, address, super_pod_id=pod_id, origin="this host")
        return Probed(host, target, (f"asked this host: {target}, {count_noun(len(devices), 'device')}", *notes))

    def _choose_devices(self, target: str, asked: Sequence[int] | None) -> Sequence[int]:
        if target == "cpu":
            if asked is None:
                message = "this host has no accelerator, so the number of its processes is not known"
                raise BuildError(message, "give --devices 0-7 for 8 processes")
            return asked
        present = find_device_ids(target, self.root)
        if not present:
            message = f"there is no {NODE_NAMES[target]} below {self.root}"
            raise BuildError(message, "mount the devices into the container, or choose another --device_target")
        missing = [device_id for device_id in asked or () if device_id not in present]
        if missing:
            message = f"device {missing[0]} is not on this host, which has {', '.join(map(str, present))}"
            raise BuildError(message, "give physical device ids")
        return present if asked is None else asked

    def _ask_devices(self, device_ids: Sequence[int]) -> tuple[tuple[Device, ...], str | None, tuple[str, ...]]:
        """Ask hccn_tool and read hccn.conf, which must agree; npu-smi only when super pods are wanted."""
        tools, conf = self.tools or DeviceTools(self.root), self.root / "etc/hccn.conf"
        found = tools.ask_addresses(device_ids) or HostAnswers()
        if conf.is_file():
            for device_id, said in read_answers(conf).addresses.items():
                if device_id in device_ids:  # in a container hccn.conf lists all of the host's
                    found.add_address(device_id, said)
        found.add((tools.ask_super_pod(device_ids) if self.asks_super_pod else None) or HostAnswers())
        notes: tuple[str, ...] = ()
        missing = [device_id for device_id in device_ids if device_id not in found.addresses]
        if not found.addresses:
            shown = next(iter(found.failed.values()), None)
            why = f"hccn_tool says {shown.value!r}" if shown else "neither hccn_tool nor /etc/hccn.conf is there"
            notes, found.failed = (f"no device_ip is known: {why}",), {}
        elif missing and missing[0] not in found.failed:
            message = f"it has no address for device {missing[0]}, but for {len(found.addresses)} others"
            raise SourceError(str(conf), None, message, "complete it, or choose --devices")
        pod_id = found.super_pod_id.value if found.super_pod_id else None
        return found.devices(device_ids, "this host"), pod_id, notes
