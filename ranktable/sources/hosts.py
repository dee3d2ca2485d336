"""Host lists: `a:8,b:8`, `node[01-16]:8`, `rack[1-2]-node[1-4]:8`, `10.0.0.[1-4]:8`, `[fe80::1]:8`.

Ranges in brackets keep zero padding, may have several parts (`[1-3,7]`) and a step (`[0-8/2]`), and multiply when
there are several, as in the host lists of Slurm and pdsh. A bare IPv6 address has no count: put it in brackets.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product

from ranktable.errors import HostListError

MAX_HOSTS = 65536

_COUNT = re.compile(r"[1-9][0-9]{0,4}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([1-9][0-9]{0,5}))?)?")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_PIECES = re.compile(r"\[[^\[\]]*\]|[^\[\]]+")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Host:
    """A host and how many devices (slots) it brings; None where the list does not say."""

    name: str
    num_devices: int | None = None


@dataclass(frozen=True, slots=True)
class HostList:
    """Hosts in a fixed order, each once. `str()` folds them back into ranges that parse to the same list.

    >>> str(HostList.parse("node[08-10]:8,node11:8"))
    'node[08-11]:8'
    """

    hosts: tuple[Host, ...]

    @classmethod
    def parse(cls, text: str) -> HostList:
        """Return the hosts of `text`; raises HostListError with the faulty part of it."""
        hosts = tuple(islice(_parse_hosts(text), MAX_HOSTS + 1))
        if len(hosts) > MAX_HOSTS:
            raise HostListError(text[:60], f"names more than {MAX_HOSTS} hosts", "check the ranges")
        return cls.of(hosts)

    @classmethod
    def of(cls, hosts: Iterable[Host]) -> HostList:
        """Return the list of `hosts`; raises HostListError when it is empty or has a host twice."""
        kept: dict[str, Host] = {}
        for host in hosts:
            if host.name in kept:
                raise HostListError(host.name, "is given twice", "give each host once, with all its devices")
            kept[host.name] = host
        if not kept:
            raise HostListError("", "names no host", "write a list such as host-a:8,host-b:8")
        return cls(tuple(kept.values()))

    def __str__(self) -> str:
        return ",".join(_fold(self.hosts))

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)


def parse_numbers(text: str) -> list[int]:
    """Return the numbers of a list with ranges: `0-3,6` is 0, 1, 2, 3, 6. Raises HostListError."""
    numbers = [int(number) for part in text.split(",") for number in _expand_range(part, part)]
    if len(set(numbers)) < len(numbers):
        raise HostListError(text, "has a number twice", "give each number once")
    return numbers


def _parse_hosts(text: str) -> Iterator[Host]:
    for item in _split_items(text):
        names, count = _split_count(item)
        yield from (Host(name, count) for name in _expand_names(names, item))


def _split_items(text: str) -> Iterator[str]:
    """Split at the commas and line breaks outside brackets."""
    depth, start = 0, 0
    for place, character in enumerate(text + ","):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise HostListError(text[start : place + 1].strip(), "has a bracket too many", "write node[1-4]:8")
        if (depth == 0 and character in ",\n") or place == len(text):
            item = text[start:place].strip()
            if depth:
                raise HostListError(item, "has a bracket that is not closed", "write node[1-4]:8")
            if item:
                yield item
            elif character == "," and text.strip() and place < len(text):
                raise HostListError(text[: place + 1][-20:], "has a comma without a host before it", "remove the comma")
            start = place + 1


def _split_count(item: str) -> tuple[str, int | None]:
    """Split `name:8`; a whole IPv6 address has no count."""
    if _is_address(item):
        return item, None
    name, colon, count = item.rpartition(":")
    if not colon or "]" in count:
        return item, None
    if not _COUNT.fullmatch(count):
        raise HostListError(item, f"has {count!r} for a number of devices", "write a number from 1 on, as in host-a:8")
    return name, int(count)


def _expand_names(names: str, item: str) -> Iterator[str]:
    inner = names[1:-1]
    if names.startswith("[") and names.endswith("]") and ":" in inner:
        if not _is_address(inner):
            raise HostListError(item, "has no IPv6 address in its brackets", "write [fe80::1]:8")
        yield inner
        return
    if _is_address(names):
        yield names
        return
    choices = [
        _expand_brackets(piece[1:-1], item) if piece.startswith("[") else (piece,) for piece in _PIECES.findall(names)
    ]
    for parts in product(*choices):
        name = "".join(parts)
        if not _NAME.fullmatch(name):
            raise HostListError(item, f"names {name!r}, which is no host name or address", "write host-a:8")
        yield name


def _expand_brackets(inside: str, item: str) -> tuple[str, ...]:
    expanded = (number for part in inside.split(",") for number in _expand_range(part, item))
    numbers = tuple(islice(expanded, MAX_HOSTS + 1))
    if len(numbers) > MAX_HOSTS:
        raise HostListError(item, f"names more than {MAX_HOSTS} hosts", "check the range")
    return numbers


def _expand_range(part: str, item: str) -> Iterator[str]:
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        raise HostListError(item, f"has {part!r} for a range", "write numbers such as 1-4, 01-16 or 1,3")
    first, last, step = match.group(1), match.group(2) or match.group(1), int(match.group(3) or 1)
    is_padded = first.startswith("0") and len(first) > 1
    if int(last) < int(first):
        raise HostListError(item, f"has the range {part!r}, which runs backwards", f"write {last}-{first}")
    if (is_padded or last.startswith("0")) and len(first) != len(last):
        raise HostListError(item, f"has the range {part!r} with ends of different width", "write 01-16 or 1-16")
    if int(last) - int(first) >= MAX_HOSTS * step:
        raise HostListError(item, f"has the range {part!r} of more than {MAX_HOSTS} numbers", "check the range")
    return (f"{number:0{len(first) if is_padded else 0}d}" for number in range(int(first), int(last) + 1, step))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@dataclass(slots=True)
class _Run:
    """Hosts that differ in their last number only, which counts up by one."""

    head: str
    first: str
    last: str
    tail: str
    num_devices: int | None

    def takes(self, other: _Run) -> bool:
        """True when `other`, a single host, continues this run."""
        same = (self.head, self.tail, self.num_devices) == (other.head, other.tail, other.num_devices)
        keeps_width = len(other.first) == len(self.first) if self.first.startswith("0") else other.first[0] != "0"
        return same and keeps_width and int(other.first) == int(self.last) + 1

    def __str__(self) -> str:
        numbers = self.first if self.first == self.last else f"[{self.first}-{self.last}]"
        return f"{self.head}{numbers}{self.tail}{_count_text(self.num_devices)}"


def _fold(hosts: Iterable[Host]) -> Iterator[str]:
    run: _Run | None = None
    for host in hosts:
        single = _start_run(host)
        if run and single and run.takes(single):
            run.last = single.first
            continue
        if run:
            yield str(run)
        run = single
        if single is None:
            name = f"[{host.name}]" if ":" in host.name else host.name
            yield f"{name}{_count_text(host.num_devices)}"
    if run:
        yield str(run)


def _start_run(host: Host) -> _Run | None:
    match = _LAST_NUMBER.fullmatch(host.name)
    if match is None or ":" in host.name or len(match.group(2)) > 9:
        return None
    head, number, tail = match.groups()
    return _Run(head, number, number, tail, host.num_devices)


def _count_text(num_devices: int | None) -> str:
    return "" if num_devices is None else f":{num_devices}"
