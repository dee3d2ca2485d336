"""What this host says about itself in its files: name, addresses, device nodes, and a copy of hccn.conf.

Everything is read below a root folder, which is `/`, or where a container has mounted the root of its host.

Source: proc(5) (fib_trie, if_inet6, route), and the device nodes of the Ascend (`/dev/davinciN`) and NVIDIA
(`/dev/nvidiaN`) drivers.

Addresses of other host names are found with this host's resolver: several at a time, since one may take seconds.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ranktable.errors import SourceError
from ranktable.rules.addresses import Address, parse_address

_LOCAL = re.compile(r"\|--\s+(\S+)\s+/32 host LOCAL")
_LINK_SCOPE = "20"
_NODES = {"ascend": re.compile(r"davinci(\d{1,4})"), "gpu": re.compile(r"nvidia(\d{1,4})"), "cpu": None}


@dataclass(frozen=True, slots=True)
class LocalHost:
    """Name and addresses of a host."""

    name: str
    addresses: tuple[Address, ...]
    """Every address of its ports, without loopback."""
    main_address: Address | None = None
    """The address of the port of the default route, or the only one; None when it cannot be told."""

    def is_called(self, text: str) -> bool:
        """True when `text` is one of the addresses, or the name, with or without its domain."""
        address = parse_address(text)
        if address is not None:
            return address in self.addresses
        return text.partition(".")[0].lower() == self.name.partition(".")[0].lower() and (
            "." not in text or "." not in self.name or text.lower() == self.name.lower()
        )


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


_AT_ONCE = 32


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
