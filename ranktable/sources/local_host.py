"""This host: its name, addresses, device nodes and hccn.conf, and what its tools answer. Nothing is guessed.

Everything is read below a root folder, which is `/`, or where a container has mounted the root of its host. On a host
with GPUs or without accelerators there is no device address.

Source: proc(5) (fib_trie, if_inet6, route), and the device nodes of the Ascend (`/dev/davinciN`) and NVIDIA
(`/dev/nvidiaN`) drivers. Addresses of other host names are found with this host's resolver: several at a time, since
one may take seconds.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ranktable.errors import BuildError, SourceError
from ranktable.generate import HostInventory
from ranktable.model import Device
from ranktable.sources.answer import HostAnswers, found_devices, join_answers
from ranktable.sources.captures import read_answers
from ranktable.sources.device_tools import DeviceTools
from ranktable.text import count_noun
from ranktable.values import Address, parse_address

_LOCAL = re.compile(r"\|--\s+(\S+)\s+/32 host LOCAL")
_LINK_SCOPE = "20"
_NODES = {"ascend": re.compile(r"davinci(\d{1,4})"), "gpu": re.compile(r"nvidia(\d{1,4})"), "cpu": None}
_AT_ONCE = 32
_NODE_NAMES = {"ascend": "/dev/davinciN", "gpu": "/dev/nvidiaN"}


@dataclass(frozen=True, slots=True)
class LocalHost:
    """Name and addresses of a host."""

    name: str
    addresses: tuple[Address, ...]
    """Every address of its ports, without loopback."""
    main_address: Address | None = None
    """The address of the port of the default route, or the only one; None when it cannot be told."""


def read_local_host(root: Path = Path("/")) -> LocalHost:
    """Return name and addresses of the host whose files are below `root`; what cannot be read is left out."""
    name = _read(root / "proc/sys/kernel/hostname").strip() or _read(root / "etc/hostname").strip()
    name = name or socket.gethostname()
    ipv4 = [ipaddress.ip_address(text) for text in dict.fromkeys(_LOCAL.findall(_read(root / "proc/net/fib_trie")))]
    ipv6 = list(_read_ipv6(root))
    found = [address for address in [*ipv4, *ipv6] if not address.is_loopback]
    if not found and root == Path("/"):
        found = list(_ask_resolver(name))
    return LocalHost(name, tuple(found), _find_main(root, found))


def find_device_ids(target: str, root: Path = Path("/")) -> list[int]:
    """Return the numbers of the device nodes of a target ("ascend", "gpu"); cpu has none."""
    pattern = _NODES[target]
    if pattern is None:
        return []
    try:
        names = [path.name for path in (root / "dev").iterdir()]
    except OSError:
        return []
    return sorted(int(match.group(1)) for name in names if (match := pattern.fullmatch(name)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_ipv6(root: Path) -> Iterator[Address]:
    for line in _read(root / "proc/net/if_inet6").splitlines():
        words = line.split()
        if len(words) == 6 and re.fullmatch(r"[0-9a-f]{32}", words[0]) and words[3] != _LINK_SCOPE:
            yield ipaddress.IPv6Address(int(words[0], 16))


def _ask_resolver(name: str) -> Iterable[Address]:
    """Where there is no /proc (not Linux): what the host's own name stands for."""
    try:
        answers = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return
    for address in dict.fromkeys(parse_address(str(answer[4][0])) for answer in answers):
        if address is not None and not address.is_loopback:
            yield address


def _find_main(root: Path, addresses: list[Address]) -> Address | None:
    """Return the address in a network of the interface of the default route, else the only address."""
    routes = [line.split() for line in _read(root / "proc/net/route").splitlines()[1:]]
    routes = [words for words in routes if len(words) >= 8 and all(_is_hex(words[place]) for place in (1, 2, 7))]
    default = min((words for words in routes if int(words[1], 16) == 0), key=_metric, default=None)
    for words in routes:
        if default is None or words[0] != default[0] or int(words[1], 16) == 0 or int(words[2], 16) != 0:
            continue
        network = ipaddress.IPv4Network(f"{_from_hex(words[1])}/{_from_hex(words[7])}", strict=False)
        inside = next((address for address in addresses if address in network), None)
        if inside is not None:
            return inside
    return addresses[0] if len(addresses) == 1 else None


def _metric(words: list[str]) -> int:
    return int(words[6]) if words[6].isdigit() else 0


def _is_hex(text: str) -> bool:
    return re.fullmatch(r"[0-9A-Fa-f]{8}", text) is not None


def _from_hex(text: str) -> str:
    """Return an address of /proc/net/route, whose bytes stand in the order of the host."""
    return str(ipaddress.IPv4Address(bytes.fromhex(text)[::-1]))


def resolve_names(names: Iterable[str]) -> dict[str, str]:
    """Return the address of each name, IPv4 where it has one; an address stands for itself.

    A loopback address is refused when there is more than one name: no other host reaches it. Raises SourceError.
    """
    listed = list(dict.fromkeys(names))
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(listed)))) as pool:
        addresses = list(pool.map(_resolve, listed))
    for name, address in zip(listed, addresses, strict=True):
        if address.is_loopback and len(listed) > 1:
            message = f"the name stands for {address}, which no other host reaches"
            raise SourceError(name, None, message, "correct /etc/hosts, or give the address of the host")
    return {name: str(address) for name, address in zip(listed, addresses, strict=True)}


def _resolve(name: str) -> Address:
    address = parse_address(name)
    if address is not None:
        return address
    try:
        answers = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the name cannot be resolved: {reason.lower()}"
        raise SourceError(name, None, message, "check the name, or leave --resolve out") from error
    found = [address for answer in answers if (address := parse_address(str(answer[4][0]))) is not None]
    if not found:
        raise SourceError(name, None, "the name has no address", "check the name, or leave --resolve out")
    return min(found, key=lambda address: address.version)


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
    """Folder that holds the host's /dev, /etc and /proc: another one in a container that has them mounted."""
    tools: DeviceTools | None = None
    """How to ask hccn_tool and npu-smi; None means on PATH, then where the driver below `root` has them."""
    server_id: str | None = None
    """The id to use in place of the host's main address."""
    asks_super_pod: bool = False

    def ask(self, device_target: str | None = None, device_ids: Sequence[int] | None = None) -> Probed:
        """Return the host with its devices, or those of `device_ids`.

        Raises BuildError for a target or a device that is not there, SourceError for answers that cannot be taken.
        """
        target = device_target or self._find_target()
        local = read_local_host(self.root)
        chosen = self._choose_devices(target, device_ids)
        devices, pod_id, notes = self._ask_devices(chosen) if target == "ascend" else (_plain(chosen), None, ())
        address = None if local.main_address is None else str(local.main_address)
        server_id = self.server_id or address or local.name
        if self.server_id is None and len(local.addresses) > 1:
            notes += (f"server_id is {server_id}, one of {len(local.addresses)} addresses; choose with --server_id",)
        elif self.server_id is None and address is None:
            notes += (f"server_id is the name {server_id}: this host has no address but loopback",)
        host = HostInventory(server_id, devices, address, super_pod_id=pod_id, origin="this host")
        return Probed(host, target, (f"asked this host: {target}, {count_noun(len(devices), 'device')}", *notes))

    def _find_target(self) -> str:
        found = [target for target in ("ascend", "gpu") if find_device_ids(target, self.root)]
        if len(found) > 1:
            raise BuildError("this host has Ascend devices and GPUs", "choose with --device_target")
        return found[0] if found else "cpu"

    def _choose_devices(self, target: str, asked: Sequence[int] | None) -> Sequence[int]:
        present = find_device_ids(target, self.root)
        if target == "cpu":
            if asked is None:
                message = "this host has no accelerator, so the number of its processes is not known"
                raise BuildError(message, "give --devices 0-7 for 8 processes")
            return asked
        if not present:
            message = f"there is no {_NODE_NAMES[target]} below {self.root}"
            raise BuildError(message, "mount the devices into the container, or choose another --device_target")
        missing = [device_id for device_id in asked or () if device_id not in present]
        if missing:
            message = f"device {missing[0]} is not on this host, which has {', '.join(map(str, present))}"
            raise BuildError(message, "give physical device ids")
        return present if asked is None else asked

    def _ask_devices(self, device_ids: Sequence[int]) -> tuple[tuple[Device, ...], str | None, tuple[str, ...]]:
        """Ask hccn_tool and read hccn.conf, which must agree; npu-smi only when super pods are wanted."""
        tools = self.tools or DeviceTools(self.root)
        said = tools.ask_addresses(device_ids)
        conf = self.root / "etc/hccn.conf"
        answers = [said] if said else []
        answers += [_only(read_answers(conf), device_ids)] if conf.is_file() else []
        pod = tools.ask_super_pod(device_ids) if self.asks_super_pod else None
        joined = join_answers([*answers, *([pod] if pod else [])])
        notes = joined.notes
        if not joined.addresses:
            shown = next(iter(joined.failed.values()), None)
            why = f"hccn_tool says {shown.value!r}" if shown else "neither hccn_tool nor /etc/hccn.conf is there"
            notes += (f"no device_ip is known: {why}",)
            joined = HostAnswers({}, joined.super_device_ids, joined.super_pod_id)
        self._refuse_gaps(joined, device_ids)
        pod_id = joined.super_pod_id.value if joined.super_pod_id else None
        return found_devices(joined, device_ids, "this host"), pod_id, notes

    def _refuse_gaps(self, answers: HostAnswers, device_ids: Sequence[int]) -> None:
        missing = [device_id for device_id in device_ids if device_id not in answers.addresses]
        if answers.addresses and missing and missing[0] not in answers.failed:
            message = f"it has no address for device {missing[0]}, but for {len(answers.addresses)} others"
            raise SourceError(str(self.root / "etc/hccn.conf"), None, message, "complete it, or choose --devices")


def _only(answers: HostAnswers, device_ids: Sequence[int]) -> HostAnswers:
    """Return what concerns these devices: in a container hccn.conf lists all of the host's."""
    wanted = frozenset(device_ids)
    kept = {device_id: said for device_id, said in answers.addresses.items() if device_id in wanted}
    return HostAnswers(kept, notes=answers.notes)


def _plain(device_ids: Sequence[int]) -> tuple[Device, ...]:
    return tuple(map(Device, device_ids))
